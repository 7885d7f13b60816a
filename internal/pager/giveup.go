package pager

import (
	"context"
	"fmt"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

var _ cohort.Reliever = (*Pager)(nil)

// GiveUp gives up the entries of Clean and Loose pages, which are in memory too: they become Template,
// and are encoded again when a pass comes. It does so until ctx ends and returns how many
// there were. For a pool that is full, or a host that is short; any goroutine.
//
// A sandbox that a pass is working on gives up nothing: the pass drops those pages, which
// makes more room than their entries do.
func (p *Pager) GiveUp(ctx context.Context) (given int) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return 0
	}
	select {
	case p.passes <- struct{}{}:
		defer func() { <-p.passes }()
	default:
		return 0
	}
	frames := p.cleanFrames()
	for len(frames) > 0 && ctx.Err() == nil {
		n := min(len(frames), BatchPages)
		k, err := p.giveUp(frames[:n])
		given += k
		if err != nil {
			break // the sandbox is dead, and OnFatal was told
		}
		frames = frames[n:]
	}
	p.stats.givenUp.Add(uint64(given)) //nolint:gosec // G115: a count
	return given
}

// cleanFrames returns the Clean and Loose pages, in ascending order.
func (p *Pager) cleanFrames() (frames []units.Frame) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table.each(func(f units.Frame, e entry) bool {
		if e.tag() == tagClean || e.tag() == tagLoose {
			frames = append(frames, f)
		}
		return true
	})
	return frames
}

// giveUp gives up the entries of at most BatchPages pages, if they still have one.
func (p *Pager) giveUp(frames []units.Frame) (given int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead != nil {
		return 0, p.dead
	}
	var space [BatchPages]guestmem.Run
	runs := space[:0]
	for _, f := range frames {
		e := p.table.load(f)
		if e.tag() != tagClean && e.tag() != tagLoose {
			continue
		}
		p.table.store(f, entryTemplate)
		p.table.unmark(f)
		p.release(e.ref())
		given++
		if k := len(runs) - 1; k >= 0 && runs[k].Start+units.Frame(runs[k].Pages) == f {
			runs[k].Pages++
			continue
		}
		runs = append(runs, guestmem.Run{Start: f, Pages: 1})
	}
	for _, r := range p.bridge(runs) {
		if err := p.mem.Unprotect(r); err != nil {
			return given, p.fail(fmt.Errorf("unprotect %d clean pages from frame %d: %w", r.Pages, r.Start, err))
		}
	}
	return given, nil
}
