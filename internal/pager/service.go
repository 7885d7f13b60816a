package pager

import (
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// An outcome says what a fault turned out to be, for the counters.
type outcome uint8

const (
	outcomeStale outcome = iota
	outcomeTemplate
	outcomeZero
	outcomeRestore
	outcomeRestoreWrite
	outcomeCancelled
	outcomeDirtied
	outcomeDead
)

// lockFault takes mu for a fault. Passes look at waiting and make way.
func (p *Pager) lockFault() {
	p.waiting.Add(1)
	p.mu.Lock()
	p.waiting.Add(-1)
}

// handle serves one fault that was read from the kernel at `since`. It does not allocate
// unless the sandbox fails. Only fault threads call it.
func (p *Pager) handle(f guestmem.Fault, w *faultWorker, since time.Time) {
	out := p.handleLocked(f, w)
	if out == outcomeDead {
		return
	}
	took := time.Since(since)
	p.account(out, took)
	if out == outcomeRestore || out == outcomeRestoreWrite {
		p.stats.noteLoaded(w.codec.Loaded(), took)
	}
	if out != outcomeStale {
		p.tell()
	}
}

func (p *Pager) handleLocked(f guestmem.Fault, w *faultWorker) outcome {
	p.lockFault()
	defer p.mu.Unlock() // also when a bug panics: serveFaults turns that into a dead sandbox
	if p.dead != nil {
		return outcomeDead
	}
	out, err := p.serve(f, w)
	if err != nil {
		_ = p.fail(err)
		return outcomeDead
	}
	if out == outcomeRestore || out == outcomeRestoreWrite {
		w.note(f.Frame)
	}
	if out != outcomeStale {
		p.note(Touch{Frame: f.Frame, Write: f.Write || f.WP, Kind: out.kind()})
	}
	return out
}

// kind returns what the guest waited for.
func (o outcome) kind() Kind {
	switch o {
	case outcomeTemplate:
		return KindTemplate
	case outcomeZero:
		return KindZero
	case outcomeRestore, outcomeRestoreWrite:
		return KindEvicted
	case outcomeCancelled, outcomeDirtied:
		return KindProtected
	case outcomeStale, outcomeDead:
	}
	return KindUnknown
}

func (p *Pager) account(out outcome, took time.Duration) {
	c := p.stats
	c.noteStall(took)
	switch out {
	case outcomeStale:
		c.stale.Add(1)
	case outcomeTemplate:
		c.template.record(took)
	case outcomeZero:
		c.zero.record(took)
	case outcomeRestoreWrite:
		c.writes.Add(1)
		c.restore.record(took)
	case outcomeRestore:
		c.restore.record(took)
	case outcomeCancelled:
		c.cancelled.Add(1)
		c.protect.record(took)
	case outcomeDirtied:
		c.dirtied.Add(1)
		c.protect.record(took)
	case outcomeDead:
	}
}

// serve is the table of the package doc. Caller holds mu.
func (p *Pager) serve(f guestmem.Fault, w *faultWorker) (outcome, error) {
	one := guestmem.Run{Start: f.Frame, Pages: 1}
	e := p.table.load(f.Frame)
	switch e.tag() {
	case tagTemplate, tagKept, tagAhead, tagLoose, tagZero:
		if e.tag() == tagLoose {
			p.noteUsed(f.Frame)
		}
		if f.WP {
			return outcomeStale, p.mem.Unprotect(one)
		}
		if e == entryZero || p.image.Hole(f.Frame) {
			return p.mapAround(f.Frame, true)
		}
		return p.mapAround(f.Frame, false)

	case tagBusy:
		if !f.WP {
			return outcomeStale, p.mem.Wake(one)
		}
		p.table.store(f.Frame, entryTemplate)
		return outcomeCancelled, p.mem.Unprotect(one)

	case tagEvicted:
		return p.restore(f.Frame, e, f.Write || f.WP, w)

	case tagClean:
		p.noteUsed(f.Frame)
		if !f.WP {
			return outcomeStale, p.mem.Wake(one)
		}
		p.table.store(f.Frame, entryTemplate)
		p.release(e.ref())
		return outcomeDirtied, p.mem.Unprotect(one)

	case tagCount:
	}
	return outcomeDead, fmt.Errorf("%w: frame %d has the unknown state %#x", ErrIntegrity, f.Frame, uint32(e))
}

// restore brings an evicted page back. Caller holds mu.
func (p *Pager) restore(f units.Frame, e entry, write bool, w *faultWorker) (outcome, error) {
	if err := p.load(&w.page, f, e, w.codec); err != nil {
		return outcomeDead, err
	}
	if _, err := p.mem.Copy(f, w.page[:], !write && p.protect); err != nil {
		return outcomeDead, p.installError(f, e, err)
	}
	p.stats.ways[w.codec.Loaded()].Add(1)
	if write {
		p.table.store(f, entryTemplate)
		p.release(e.ref())
		return outcomeRestoreWrite, nil
	}
	p.table.store(f, p.back(e.ref()))
	return outcomeRestore, nil
}

// back returns the word of a page that is mapped again with the content that r names.
func (p *Pager) back(r cohort.Ref) entry {
	if p.protect {
		return clean(r)
	}
	return loose(r)
}

// load fills dst with the page of an Evicted frame and checks it. The caller holds a
// reference to it, or mu.
func (p *Pager) load(dst *units.Page, f units.Frame, e entry, w *cohort.Worker) error {
	if err := p.cohort.Load(w, dst, e.ref()); err != nil {
		p.cohort.ReportDamage(err, p)
		return fmt.Errorf("%w: frame %d: %w", ErrIntegrity, f, err)
	}
	return nil
}

// installError names why an evicted page could not be installed. A page that is mapped
// although it is Evicted has a content nobody knows: that is no success.
func (p *Pager) installError(f units.Frame, e entry, err error) error {
	if errors.Is(err, guestmem.ErrExists) {
		return fmt.Errorf("%w: frame %d is evicted (ref %#x) and yet mapped", ErrIntegrity, f, e.ref())
	}
	return fmt.Errorf("install frame %d: %w", f, err)
}

// zeroWindow is by how much the window of zero pages is wider than that of template
// pages. A guest that allocates memory walks through free, hence zero, pages; mapping one
// more costs 0.1 us and no memory, a fault 10-30 us. Doubled again, a single read in a
// large hole maps half a megabyte for nothing.
const zeroWindow = 4

// maxExtra bounds the additional ioctls that one fault spends on neighbours when some of
// them are mapped already. Doubled, a fault in a half-written window takes 3 us longer.
const maxExtra = 4

// mapAround maps the template's page (or the zero page) at f and, in the aligned window
// around it, at neighbours for which the same is right. Caller holds mu.
func (p *Pager) mapAround(f units.Frame, zero bool) (outcome, error) {
	out := outcomeTemplate
	if zero {
		out = outcomeZero
	}
	window := p.around
	if zero && window > 1 {
		window *= zeroWindow
	}
	lo := f &^ (window - 1)
	hi := min(lo+window, units.Frame(p.table.frames))
	end := f + 1
	for end < hi && p.mappable(end, zero) {
		end++
	}
	start := f
	for start > lo && p.mappable(start-1, zero) {
		start--
	}
	// Those who wait are woken when the whole of a call is mapped: a short one first.
	done, err := p.mapRun(guestmem.Run{Start: f, Pages: int(min(end, f+p.around) - f)}, zero)
	if done == 0 {
		if errors.Is(err, guestmem.ErrExists) {
			return outcomeStale, p.mem.Wake(guestmem.Run{Start: f, Pages: 1})
		}
		if err == nil {
			err = errors.New("no progress")
		}
		return outcomeDead, fmt.Errorf("map the %v page of frame %d: %w", p.table.load(f).tag(), f, err)
	}
	// The thread that faulted runs again; the rest is for those that come after it.
	extra := maxExtra
	mapped := done - 1
	mapped += p.mapRest(f+units.Frame(done), end, zero, &extra)
	mapped += p.mapRest(start, f, zero, &extra)
	p.stats.around.Add(uint64(mapped))
	return out, nil
}

// mappable reports whether rule 5 allows to map the template's page (zero: the zero page)
// at a neighbour.
func (p *Pager) mappable(f units.Frame, zero bool) bool {
	e := p.table.load(f)
	if zero {
		return e == entryZero || e == entryTemplate && p.image.Hole(f)
	}
	return e == entryTemplate && !p.image.Hole(f)
}

func (p *Pager) mapRun(r guestmem.Run, zero bool) (int, error) {
	if zero {
		return p.mem.ZeroPage(r)
	}
	return p.mem.Continue(r)
}

// mapRest maps what it can of [f, end), skipping pages that are mapped already. Errors are
// left to the fault that will come for such a page.
func (p *Pager) mapRest(f, end units.Frame, zero bool, extra *int) (mapped int) {
	for f < end && *extra > 0 {
		*extra--
		done, err := p.mapRun(guestmem.Run{Start: f, Pages: int(end - f)}, zero)
		mapped += done
		f += units.Frame(done)
		if errors.Is(err, guestmem.ErrExists) {
			f++
		} else if err != nil {
			return mapped
		}
	}
	return mapped
}
