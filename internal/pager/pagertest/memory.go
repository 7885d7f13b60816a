// Package pagertest has a guest's memory that exists only in this process, for tests that run
// a pager step by step, or thousands of them: no VMM, no userfaultfd, no clock.
//
// A Memory follows what the kernel does (mm/userfaultfd.c) for one page table entry:
//
//	none --Continue--> shared --write of a guest--> private
//	none --ZeroPage--> zero   --write of a guest--> private
//	none --Copy--> private, protected or not
//	private --Protect, Unprotect--> protected or not
//	anything mapped --Drop--> none, with a marker if it was protected --Unprotect--> none
//
// A Thread of the guest makes an access at once, or waits: then an event is queued, until
// somebody reads it or the thread is woken; a woken thread tries again.
//
// Locks: Memory.mu, then nothing. Step and Fail are called without it.
package pagertest

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

// What is mapped at a frame.
type mapping uint8

const (
	none mapping = iota
	shared
	zero
	private
)

type page struct {
	mapped    mapping
	protected bool
	marker    bool // none: it was protected when it was dropped
	content   units.Page
}

// A Memory implements pager.Memory. Safe for concurrent use.
type Memory struct {
	// Step is called in the middle of operations, before each page of a Read, and before all
	// others: what the guest and others do at that moment. It may be nil.
	Step func()
	// Serve serves faults; a Read that comes to a page that is not mapped waits for it. It may
	// be nil: then such a Read fails.
	Serve func()
	// Fail is asked before each operation on the guest's memory, by its name (that of the
	// method, in lower case), for an error to fail with. It may be nil.
	Fail func(op string) error

	image *guestmem.Image // immutable
	poll  int             // immutable; eventfd: readable while an event waits
	never int             // immutable; eventfd: never readable

	mu       sync.Mutex
	pages    []page    // guarded by mu
	waiting  []*Thread // guarded by mu; in the order of their faults
	signaled bool      // guarded by mu; poll is readable
}

// New returns the memory of a guest whose pages are not mapped.
func New(im *guestmem.Image) (*Memory, error) {
	m := &Memory{image: im, pages: make([]page, im.Frames())}
	var errs [2]error
	m.poll, errs[0] = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	m.never, errs[1] = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("make fake memory: %w", err)
	}
	return m, nil
}

// Close frees its descriptors.
func (m *Memory) Close() error { return errors.Join(unix.Close(m.poll), unix.Close(m.never)) }

// A Thread is a vCPU of the guest. One goroutine uses it at a time.
type Thread struct {
	memory *Memory
	fault  guestmem.Fault // guarded by memory.mu; what it waits for
	waits  bool           // guarded by memory.mu
	unread bool           // guarded by memory.mu; nobody has read the event
	woken  chan struct{}  // a token when it was woken; for those that wait for it
}

// Thread returns a new thread.
func (m *Memory) Thread() *Thread { return &Thread{memory: m, woken: make(chan struct{}, 1)} }

// Waits reports whether the thread waits for a page.
func (t *Thread) Waits() bool {
	t.memory.mu.Lock()
	defer t.memory.mu.Unlock()
	return t.waits
}

// Woken returns a channel that holds a token when the thread was woken.
func (t *Thread) Woken() <-chan struct{} { return t.woken }

// Access lets the thread read or write a page: do is called with it and may change it if
// write is set. ok is false if the thread waits now, and while it does.
func (t *Thread) Access(f units.Frame, write bool, do func(*units.Page)) (ok bool) {
	m := t.memory
	m.mu.Lock()
	defer m.mu.Unlock()
	if t.waits {
		return false
	}
	p := &m.pages[f]
	if p.mapped == none || write && p.protected {
		t.fault = guestmem.Fault{Frame: f, Write: write, WP: p.mapped != none, Minor: p.mapped == none && !m.image.Hole(f)}
		t.waits, t.unread = true, true
		m.waiting = append(m.waiting, t)
		m.signal()
		return false
	}
	if write && p.mapped != private {
		p.content = *m.content(f)
		p.mapped = private
	}
	if write {
		do(&p.content)
		return true
	}
	read := *m.content(f)
	do(&read)
	return true
}

// content returns what a mapped frame contains. Caller holds mu.
func (m *Memory) content(f units.Frame) *units.Page {
	switch p := &m.pages[f]; p.mapped {
	case private:
		return &p.content
	case shared:
		if image := m.image.Page(f); image != nil {
			return image
		}
	case zero, none:
	}
	return new(units.Page)
}

// signal makes PollFD as readable as it must be. Caller holds mu.
func (m *Memory) signal() {
	unread := slices.ContainsFunc(m.waiting, func(t *Thread) bool { return t.unread })
	if unread == m.signaled {
		return
	}
	m.signaled = unread
	count := [8]byte{1}
	if unread {
		_, _ = unix.Write(m.poll, count[:]) // it never overflows
		return
	}
	_, _ = unix.Read(m.poll, count[:])
}

// wake wakes the threads that wait at [f, end). Caller holds mu.
func (m *Memory) wake(f, end units.Frame) {
	kept := m.waiting[:0]
	for _, t := range m.waiting {
		if t.fault.Frame < f || t.fault.Frame >= end {
			kept = append(kept, t)
			continue
		}
		t.waits, t.unread = false, false
		select {
		case t.woken <- struct{}{}:
		default:
		}
	}
	m.waiting = kept
	m.signal()
}

// before is what comes before each operation.
func (m *Memory) before(op string) error {
	if m.Step != nil {
		m.Step()
	}
	if m.Fail != nil {
		return m.Fail(op)
	}
	return nil
}

// State describes a frame for messages, and for checks what a pager relies on: whether it is
// mapped, privately, protected, and whether a marker is there.
func (m *Memory) State(f units.Frame) (mapped, isPrivate, protected, marker bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := &m.pages[f]
	return p.mapped != none, p.mapped == private, p.protected, p.marker
}

// Frames returns the number of pages.
func (m *Memory) Frames() int { return len(m.pages) }

// PollFD returns a descriptor that is readable while an event waits.
func (m *Memory) PollFD() int { return m.poll }

// ReportFD returns a descriptor that is never readable.
func (m *Memory) ReportFD() int { return m.never }

// Report says that there is none: tests call the pager's own functions.
func (m *Memory) Report() (guestmem.Run, bool, error) { return guestmem.Run{}, false, nil }

// Answer does nothing.
func (m *Memory) Answer() error { return nil }

// Faults returns events in their order.
func (m *Memory) Faults(faults []guestmem.Fault, _ []uffd.Event) (n int, err error) {
	if m.Fail != nil {
		if err := m.Fail("faults"); err != nil {
			return 0, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range m.waiting {
		if t.unread && n < len(faults) {
			faults[n], t.unread = t.fault, false
			n++
		}
	}
	m.signal()
	return n, nil
}

// Scan visits private pages, and markers as swapped ones.
func (m *Memory) Scan(visit func(r guestmem.Run, swapped bool) bool) error {
	if err := m.before("scan"); err != nil {
		return err
	}
	for f := range m.pages {
		m.mu.Lock()
		found, marker := m.pages[f].mapped == private, m.pages[f].marker
		m.mu.Unlock()
		if (found || marker) && !visit(guestmem.Run{Start: units.Frame(f), Pages: 1}, marker) {
			return nil
		}
	}
	return nil
}

// Private visits the private pages of a run.
func (m *Memory) Private(r guestmem.Run, visit func(guestmem.Run)) error {
	if err := m.before("private"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range r.Pages {
		if f := r.Start + units.Frame(i); m.pages[f].mapped == private {
			visit(guestmem.Run{Start: f, Pages: 1})
		}
	}
	return nil
}

// Count counts private pages.
func (m *Memory) Count() (resident, swapped int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.pages {
		if m.pages[i].mapped == private {
			resident++
		}
	}
	return resident, 0, nil
}

// ErrWaits: the reader of a page that is not mapped waits for ever.
var ErrWaits = errors.New("the reader of a page that is not mapped waits for ever")

// fetch lets the reader of a page that is not mapped wait as a thread of the guest would.
func (m *Memory) fetch(f units.Frame) error {
	reader := m.Thread()
	for range 10 {
		if reader.Access(f, false, func(*units.Page) {}) {
			return nil
		}
		if m.Serve == nil {
			break
		}
		m.Serve()
	}
	return fmt.Errorf("%w: frame %d", ErrWaits, f)
}

// Read reads pages; Step comes before each, and in its middle the page may be torn.
func (m *Memory) Read(dst []byte, runs []guestmem.Run) error {
	for _, r := range runs {
		for i := range r.Pages {
			if err := m.before("read"); err != nil {
				return err
			}
			f := r.Start + units.Frame(i)
			if err := m.fetch(f); err != nil {
				return err
			}
			m.mu.Lock()
			half := units.PageSize / 2
			copy(dst[:half], m.content(f)[:half])
			m.mu.Unlock()
			if m.Step != nil {
				m.Step()
			}
			m.mu.Lock()
			copy(dst[half:units.PageSize], m.content(f)[half:])
			m.mu.Unlock()
			dst = dst[units.PageSize:]
		}
	}
	return nil
}

// each calls fn for the pages of a run with mu held, after Step and Fail, until it fails.
func (m *Memory) each(op string, r guestmem.Run, fn func(f units.Frame, p *page) error) (done int, err error) {
	if err := m.before(op); err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for done < r.Pages {
		f := r.Start + units.Frame(done)
		if err := fn(f, &m.pages[f]); err != nil {
			return done, err
		}
		done++
	}
	return done, nil
}

// Protect write-protects pages; those that are not mapped get a marker.
func (m *Memory) Protect(r guestmem.Run) error {
	_, err := m.each("protect", r, func(_ units.Frame, p *page) error {
		p.protected, p.marker = p.mapped != none, p.mapped == none
		return nil
	})
	return err
}

// Unprotect allows writing, removes markers and wakes.
func (m *Memory) Unprotect(r guestmem.Run) error {
	_, err := m.each("unprotect", r, func(f units.Frame, p *page) error {
		p.protected, p.marker = false, false
		m.wake(f, f+1)
		return nil
	})
	return err
}

// Copy installs private pages and wakes.
func (m *Memory) Copy(f units.Frame, src []byte, protect bool) (done int, err error) {
	return m.each("copy", guestmem.Run{Start: f, Pages: len(src) / units.PageSize}, func(f units.Frame, p *page) error {
		if p.mapped != none {
			return guestmem.ErrExists
		}
		*p = page{mapped: private, protected: protect, content: units.Page(src[:units.PageSize])}
		src = src[units.PageSize:]
		m.wake(f, f+1)
		return nil
	})
}

// Continue maps the image's pages and wakes.
func (m *Memory) Continue(r guestmem.Run) (done int, err error) {
	return m.each("continue", r, func(f units.Frame, p *page) error {
		switch {
		case p.mapped != none:
			return guestmem.ErrExists
		case m.image.Hole(f):
			return unix.EFAULT
		}
		p.mapped, p.marker = shared, false
		m.wake(f, f+1)
		return nil
	})
}

// ZeroPage maps the zero page and wakes. A marker counts as a mapped page.
func (m *Memory) ZeroPage(r guestmem.Run) (done int, err error) {
	return m.each("zeropage", r, func(f units.Frame, p *page) error {
		if p.mapped != none || p.marker {
			return guestmem.ErrExists
		}
		p.mapped = zero
		m.wake(f, f+1)
		return nil
	})
}

// Wake wakes.
func (m *Memory) Wake(r guestmem.Run) error {
	_, err := m.each("wake", r, func(f units.Frame, _ *page) error { m.wake(f, f+1); return nil })
	return err
}

// Drop frees pages; protected ones leave a marker.
func (m *Memory) Drop(runs []guestmem.Run) error {
	if err := m.before("drop"); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range runs {
		for i := range r.Pages {
			p := &m.pages[r.Start+units.Frame(i)]
			*p = page{marker: p.protected}
		}
	}
	return nil
}
