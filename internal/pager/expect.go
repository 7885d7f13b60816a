package pager

import (
	"slices"

	"github.com/agentzip/agentzip/internal/units"
)

// An expectation is the pages that the next call will probably touch, and those of them that
// it will write. Both ascending; never changed.
type expectation struct{ touched, written []units.Frame }

// Expect names the pages that the next tool call will probably touch, in place of those
// named before: they are kept in ways that are quick to undo, and those that will be written
// are not mapped back as shared, so that Restore can install them writable. Any goroutine.
func (p *Pager) Expect(pages []Touch) {
	e := expectation{touched: make([]units.Frame, 0, len(pages))}
	for _, t := range pages {
		e.touched = append(e.touched, t.Frame)
		if t.Write {
			e.written = append(e.written, t.Frame)
		}
	}
	slices.Sort(e.touched)
	slices.Sort(e.written)
	p.soon.Store(&e)
}

// expected reports whether Expect named f.
func (p *Pager) expected(f units.Frame) bool {
	e := p.soon.Load()
	if e == nil {
		return false
	}
	_, found := slices.BinarySearch(e.touched, f)
	return found
}

// expectedWrite reports whether Expect named f as one that will be written.
func (p *Pager) expectedWrite(f units.Frame) bool {
	e := p.soon.Load()
	if e == nil {
		return false
	}
	_, found := slices.BinarySearch(e.written, f)
	return found
}
