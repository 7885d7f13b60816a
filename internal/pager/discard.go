package pager

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime/debug"
	"time"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/invariant"
	"github.com/agentzip/agentzip/internal/units"
)

// Dead pages. A guest with free page reporting says which pages are in nobody's use, and
// uses none of them before it is answered. Their content is then nobody's: it may become
// zeros, or stay what it is. So a report is a drop without an encoding, and any part of it
// may be ignored:
//
//	state       private page mapped                    not mapped, or shared
//	Template    publish Zero, drop, clear markers      nothing: it costs nothing
//	Zero        the same
//	Kept(c), Ahead(c): the same
//	Clean(h), Loose(h): the same, release h
//	Evicted(h)  cannot be                              publish Zero, release h
//	Busy        nothing: the page is in the hands of a pass, which reads it and must not meet a
//	            fault (rule 4); the pass decides what becomes of it
//
// Zero is Template where the image has a hole: the same content, and no word to keep.
//
// Those who work on copies outside the lock find out by the word, as with a write: a Restore
// that decodes the old entry holds a reference to it and sees another word, a pass that found
// the page Clean too. Not so a pass that found a page private and has not taken it in hand yet:
// Template and Zero do not say whether a page is mapped, and one that is not must never become
// Busy (its reader would fault, be told that Busy is mapped, and fault again for ever). So a
// pass looks again if anything was dropped since its scan began, and whenever it has made way
// for others in the middle of a batch.

// A discarder is the scratch of a discard. Owned by a fault thread or a batch.
type discarder struct {
	start   units.Frame
	private uint64 // bit i: frame start+i is mapped privately
	runs    [BatchPages]guestmem.Run
}

// note is the visitor of Memory.Private.
func (d *discarder) note(r guestmem.Run) {
	for i := range r.Pages {
		d.private |= 1 << (r.Start - d.start + units.Frame(i))
	}
}

// serveReports takes the report that waits, if it is still there, and answers it. ok says
// that there may be others.
func serveReports(p *Pager, w *faultWorker) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			p.abort(fmt.Errorf("panic while serving a report: %v\n%s", r, debug.Stack()))
			ok = false
		}
	}()
	r, there, err := p.mem.Report()
	if err == nil && there {
		since := time.Now()
		// Failed or not, the sandbox is dead or the report done: the VMM need not wait.
		ok = p.discard(r, &w.discard) == nil
		p.stats.reports.record(time.Since(since))
		err = p.mem.Answer()
	}
	if errors.Is(err, ErrGone) {
		return false // whoever needs the VMM next finds out
	}
	if err != nil {
		p.abort(fmt.Errorf("serve a report of free pages: %w", err))
		return false
	}
	return ok || !there
}

// discard forgets the content of a run that the guest has reported free. It takes the lock
// anew for each BatchPages frames: a report has up to 1024.
func (p *Pager) discard(r guestmem.Run, d *discarder) error {
	if invariant.Enabled {
		invariant.Check(int(r.Start)+r.Pages <= p.table.frames, "a report lies in the guest's memory")
	}
	p.stats.reported.Add(uint64(r.Pages))
	for done := 0; done < r.Pages; done += BatchPages {
		part := guestmem.Run{Start: r.Start + units.Frame(done), Pages: min(BatchPages, r.Pages-done)}
		if err := p.discardLocked(part, d); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pager) discardLocked(r guestmem.Run, d *discarder) error {
	p.lockFault()
	defer p.mu.Unlock() // also when a bug panics
	if p.dead != nil {
		return p.dead
	}
	d.start, d.private = r.Start, 0
	if err := p.mem.Private(r, d.note); err != nil {
		return p.fail(fmt.Errorf("look for %d reported pages from frame %d: %w", r.Pages, r.Start, err))
	}
	drop := uint64(0)
	for i := range r.Pages {
		if p.forget(r.Start+units.Frame(i), d.private&(1<<i) != 0) {
			drop |= 1 << i
		}
	}
	if drop == 0 {
		return nil
	}
	runs := bitRuns(d.runs[:0], r.Start, drop)
	if err := p.mem.Drop(runs); err != nil {
		return p.fail(fmt.Errorf("drop reported pages from frame %d: %w", r.Start, err))
	}
	for _, run := range runs { // rule 6: the markers
		if err := p.mem.Unprotect(run); err != nil {
			return p.fail(fmt.Errorf("clear markers of %d reported pages from frame %d: %w", run.Pages, run.Start, err))
		}
	}
	for _, run := range runs {
		p.regions.discarded(run.Start)
		p.regions.discarded(run.Start + units.Frame(run.Pages-1))
	}
	p.discards++
	p.stats.discarded.Add(uint64(bits.OnesCount64(drop)))
	return nil
}

// scanBegins notes the moment from which on a pass must mind drops by reports.
func (p *Pager) scanBegins(b *batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b.discards = p.discards
}

// skipDiscarded takes out of the batch, from index `from` on, the frames that were private
// when they were scanned and are no longer. seen is Pager.discards at the last look, and is
// brought up to date. To be called again whenever mu was given up. Caller holds mu.
func (p *Pager) skipDiscarded(b *batch, from int, seen *uint64) error {
	if p.discards == *seen {
		return nil
	}
	*seen = p.discards
	kept := from
	for i := from; i < b.n; {
		j := i + 1
		for j < b.n && b.frames[j] == b.frames[j-1]+1 {
			j++
		}
		b.look.start, b.look.private = b.frames[i], 0
		if err := p.mem.Private(guestmem.Run{Start: b.frames[i], Pages: j - i}, b.look.note); err != nil {
			return fmt.Errorf("look for %d pages from frame %d: %w", j-i, b.look.start, err)
		}
		for k := range j - i {
			if b.look.private&(1<<k) != 0 {
				b.frames[kept] = b.look.start + units.Frame(k)
				kept++
			}
		}
		i = j
	}
	b.n = kept
	return nil
}

// forget publishes the new word of a reported page; drop says that its physical page must be
// freed now. Caller holds mu.
func (p *Pager) forget(f units.Frame, private bool) (drop bool) {
	e := p.table.load(f)
	switch e.tag() {
	case tagTemplate, tagZero, tagKept, tagAhead:
		drop = private
	case tagClean, tagLoose:
		p.noteWasted(f)
		p.release(e.ref())
		p.stats.discardedEntries.Add(1)
		drop = true
	case tagEvicted:
		p.release(e.ref())
		p.stats.discardedEntries.Add(1)
	case tagBusy, tagCount:
		return false
	}
	zero := entryZero
	if p.image.Hole(f) {
		zero = entryTemplate
	}
	if (drop || e.hasRef()) && e != zero {
		p.table.store(f, zero)
	}
	return drop
}

// bitRuns collects the runs of frames whose bit is set; bit 0 is frame start.
func bitRuns(dst []guestmem.Run, start units.Frame, set uint64) []guestmem.Run {
	for set != 0 {
		first := bits.TrailingZeros64(set)
		n := bits.TrailingZeros64(^(set >> first))
		dst = append(dst, guestmem.Run{Start: start + units.Frame(first), Pages: n})
		if first+n == 64 {
			break
		}
		set = set >> (first + n) << (first + n)
	}
	return dst
}
