package pager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// An EvictResult says what one pass did, in pages.
type EvictResult struct {
	Scanned   int         // private pages found
	Dropped   int         // freed
	Encoded   int         // kept by the cohort, verified; dropped too, unless the pass was cancelled
	Zeros     int         // dropped because all zeros
	Equal     int         // dropped because equal to the template
	Clean     int         // dropped without encoding
	Kept      int         // stay: they do not shrink
	Warm      int         // stay: the pass was told to leave them alone
	Cancelled int         // stay: written meanwhile
	Abandoned int         // stay: the pass ended, or the pool was full
	Bytes     units.Bytes // added to the pool
	Took      time.Duration
}

// Evict makes one pass over all private pages: it encodes what shrinks into the pool and
// frees the pages. When ctx is cancelled the pass ends after the page in hand: what of its
// batch is encoded by then becomes Clean and stays, the rest is as it was. The guest runs on all the while.
//
// The result counts what was done, also with an error. cohort.ErrFull: nothing was encoded
// from there on; zero, equal and clean pages were dropped all the same. ErrVerify: see
// there. ErrGone: the VMM is dead. ErrFatal: OnFatal was told.
//
// Only one pass runs at a time; a second caller waits.
func (p *Pager) Evict(ctx context.Context) (EvictResult, error) {
	return p.passInTurn(ctx, passMode{})
}

// passInTurn waits for the turn and makes one pass.
func (p *Pager) passInTurn(ctx context.Context, mode passMode) (EvictResult, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	release, err := p.takePass(ctx)
	if err != nil {
		return EvictResult{}, err
	}
	defer release()
	return p.onePass(ctx, mode)
}

// takePass waits for the turn to make passes. Caller holds life.
func (p *Pager) takePass(ctx context.Context) (release func(), err error) {
	select {
	case p.passes <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err = p.Err()
	if p.closed {
		err = ErrClosed
	}
	if err != nil {
		<-p.passes
		return nil, err
	}
	return func() { <-p.passes }, nil
}

// onePass makes one pass. The caller has the turn.
func (p *Pager) onePass(ctx context.Context, mode passMode) (res EvictResult, err error) {
	start := time.Now()
	h := &hurry{plain: p.workers.plain}
	stop := context.AfterFunc(ctx, h.cancelled)
	err = p.workers.encode(ctx, mode.frozen, func(w *worker) error {
		h.begin(w)
		defer h.end()
		return p.pass(ctx, w, mode, &res)
	})
	if !stop() {
		p.stats.cancel.record(h.since())
	}
	if errors.Is(err, errPanic) {
		p.abort(err)
		err = p.Err()
	}
	res.Took = time.Since(start)
	p.stats.notePass(res)
	if err != nil && !errors.Is(err, ErrFatal) && ctx.Err() == nil {
		err = fmt.Errorf("evict pages of sandbox %s: %w", p.name, err)
	}
	return res, err
}

func (c *counters) notePass(r EvictResult) {
	c.passes.Add(1)
	c.scanned.Add(uint64(r.Scanned))
	c.encodedPages.Add(uint64(r.Encoded))
	c.zeroPages.Add(uint64(r.Zeros))
	c.equalPages.Add(uint64(r.Equal))
	c.cleanPages.Add(uint64(r.Clean))
	c.keptPages.Add(uint64(r.Kept))
	c.evicting.Add(int64(r.Took))
}

// pass scans and hands batches of frames to evictBatch.
func (p *Pager) pass(ctx context.Context, w *worker, mode passMode, res *EvictResult) error {
	b := &w.batch
	b.begin()
	b.mode = mode
	p.scanBegins(b)
	var failed error
	next := func() bool {
		if b.n == 0 {
			return true
		}
		failed = p.evictBatch(ctx, w, res)
		b.n = 0
		if failed == nil {
			failed = ctx.Err()
		}
		return failed == nil
	}
	err := p.mem.Scan(func(r guestmem.Run, _ bool) bool {
		res.Scanned += r.Pages
		for i := range r.Pages {
			f := r.Start + units.Frame(i)
			if p.leaves(mode.keep, f) {
				res.Warm++
				continue
			}
			b.frames[b.n] = f
			b.n++
			if b.n == BatchPages && !next() {
				return false
			}
		}
		return true
	})
	if failed == nil && err == nil {
		next()
	}
	if failed == nil && err == nil && !p.leave && !mode.frozen {
		failed = p.populate(ctx, w)
	}
	p.tidy()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	var full error
	if b.full {
		p.stats.fullPasses.Add(1)
		full = fmt.Errorf("%d pages stay: %w", res.Abandoned, cohort.ErrFull)
	}
	return errors.Join(full, b.verify)
}

// tidy gives back what the table and the log of touches have in memory and do not need.
func (p *Pager) tidy() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table.tidy()
	p.touched.trim()
}

// A fate is what a pass decided about a page of its batch.
type fate uint8

const (
	fateSkip    fate = iota // not ours: it was in no state to be evicted
	fateClean               // was Clean when looked at: drop without encoding
	fateAbandon             // unprotect, back to what it was
	fateKeep                // does not shrink: unprotect, Kept
	fateZero                // drop, Zero
	fateEqual               // drop, Template
	fateEncoded             // drop, Evicted; in a Restore: decode and install
	fateSame                // was Loose and is what its ref names: drop, Evicted
	fateFill                // only in a Restore: install a copy of the template's page, or zeros
)

// A batch is up to BatchPages frames in ascending order that a pass has in hand.
type batch struct {
	n      int
	frames [BatchPages]units.Frame
	before [BatchPages]entry // the word when it was taken in hand
	fates  [BatchPages]fate
	slot   [BatchPages]int           // its page in the worker's buffer, if it is read
	after  [BatchPages]entry         // fateEncoded: Evicted(r); fateKeep: Kept(sum); in a Restore for writing: Ahead(sum)
	stored [BatchPages]cohort.Stored // fateEncoded

	written [BatchPages]bool // it was Ahead or Loose, and was written

	touches [BatchPages]Touch // of a Restore: the pages asked for, frames again

	discards uint64    // Pager.discards when the scan of this pass began
	look     discarder // scratch of skipDiscarded

	mode     passMode
	full     bool  // the pool was full in this pass
	relieved bool  // siblings were asked to give up clean pages in this pass
	verify   error // the first encoding of this pass that failed verification
}

func (b *batch) begin() { b.n, b.full, b.relieved, b.verify, b.mode = 0, false, false, nil, passMode{} }

// A passMode says how a pass differs from that of Evict.
type passMode struct {
	all  bool      // pages that do not shrink are kept as they are
	stay bool      // what is kept stays mapped, Clean
	soon time.Time // from this moment on only quick ways of keeping a page are tried; zero: never

	frozen bool // the guest stands still

	keep Selection // what it leaves alone
}

// fast reports whether the guest has stood still for long enough.
func (m passMode) fast() bool { return !m.soon.IsZero() && time.Now().After(m.soon) }

// runs collects the neighbouring frames of those the filter selects.
func (b *batch) runs(dst []guestmem.Run, selected func(i int) bool) []guestmem.Run {
	dst = dst[:0]
	for i := range b.n {
		if !selected(i) {
			continue
		}
		if k := len(dst); k > 0 && dst[k-1].Start+units.Frame(dst[k-1].Pages) == b.frames[i] {
			dst[k-1].Pages++
			continue
		}
		dst = append(dst, guestmem.Run{Start: b.frames[i], Pages: 1})
	}
	return dst
}

// evictBatch takes the frames of the batch through protect, read, encode, publish, drop.
func (p *Pager) evictBatch(ctx context.Context, w *worker, res *EvictResult) error {
	b := &w.batch
	if err := w.locked(p, func() error { return p.protectBatch(ctx, w) }); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return w.locked(p, func() error { return p.publishBatch(w, false, res) })
	}
	if err := p.readBatch(w); err != nil {
		return errors.Join(err, w.locked(p, func() error { return p.publishBatch(w, false, res) }))
	}
	left := standBackFor
	if b.mode.frozen {
		left = 0
	}
	for i := range b.n {
		if b.fates[i] != fateAbandon {
			continue
		}
		p.workers.standBack(ctx, &left)
		if ctx.Err() != nil {
			break
		}
		if p.table.load(b.frames[i]) == entryBusy { // else cancelled: no use encoding it
			p.encode(ctx, w, i)
		}
	}
	return w.locked(p, func() error {
		drop := ctx.Err() == nil
		if err := p.publishBatch(w, drop, res); err != nil || !drop || p.leave || b.mode.frozen {
			return err
		}
		p.mapBack(w)
		return nil
	})
}

// protectBatch makes the pages that may be encoded Busy and write-protects them, run by
// run; faults go first in between, and the end of ctx leaves the rest alone. Caller holds mu.
func (p *Pager) protectBatch(ctx context.Context, w *worker) error {
	b := &w.batch
	if p.dead != nil {
		return p.dead
	}
	seen := b.discards
	pages := 0
	for i := 0; i < b.n; {
		if err := p.skipDiscarded(b, i, &seen); err != nil {
			b.n = i
			return errors.Join(err, p.publishBatch(w, false, &EvictResult{}))
		}
		if i == b.n {
			break
		}
		if ctx.Err() != nil {
			b.n = i
			break
		}
		e := p.table.load(b.frames[i])
		if !e.mayBeEncoded() {
			b.fates[i] = fateSkip
			if e.tag() == tagClean {
				b.fates[i], b.before[i] = fateClean, e
			}
			i++
			continue
		}
		j := i
		for j < b.n && b.frames[j] == b.frames[i]+units.Frame(j-i) {
			e := p.table.load(b.frames[j])
			if !e.mayBeEncoded() {
				break
			}
			b.before[j], b.fates[j], b.slot[j] = e, fateAbandon, pages
			p.table.store(b.frames[j], entryBusy)
			pages++
			j++
		}
		run := guestmem.Run{Start: b.frames[i], Pages: j - i}
		if err := p.mem.Protect(run); err != nil {
			// Perhaps a part of it is protected. What was taken in hand goes back.
			for k := j; k < b.n; k++ {
				b.fates[k] = fateSkip
			}
			err = fmt.Errorf("write-protect %d pages from frame %d: %w", run.Pages, run.Start, err)
			return errors.Join(err, p.publishBatch(w, false, &EvictResult{}))
		}
		i = j
		w.makeWay(p)
	}
	return nil
}

// readBatch reads the Busy pages of the batch into the worker's buffer. A page that is
// written meanwhile is torn there, but it is no longer Busy then.
func (p *Pager) readBatch(w *worker) error {
	b := &w.batch
	runs := b.runs(w.runs[:0], func(i int) bool { return b.fates[i] == fateAbandon })
	pages := 0
	for _, r := range runs {
		pages += r.Pages
	}
	if pages == 0 {
		return nil
	}
	if err := p.mem.Read(w.pages.Data[:pages*units.PageSize], runs); err != nil {
		return fmt.Errorf("read %d pages from frame %d: %w", pages, runs[0].Start, err)
	}
	return nil
}

// publishBatch ends the batch: new words first, then the drop. With drop unset, encoded
// pages become Clean and stay, and nothing is dropped. Caller holds mu.
func (p *Pager) publishBatch(w *worker, drop bool, res *EvictResult) error {
	b := &w.batch
	var dropped, released [BatchPages]bool
	for i := range b.n {
		if dropped[i], released[i] = p.publish(b, i, drop, res); dropped[i] {
			p.regions.dropped(b.frames[i])
		}
	}
	if p.dead != nil {
		return p.dead
	}
	if runs := b.runs(w.runs[:0], func(i int) bool { return dropped[i] }); len(runs) > 0 {
		if err := p.mem.Drop(runs); err != nil {
			return p.fail(err)
		}
	}
	// Only now: a page that is to be dropped is protected until it is gone. Rule 6: the markers.
	for _, r := range p.bridge(b.runs(w.runs[:0], func(i int) bool { return released[i] || dropped[i] })) {
		if err := p.mem.Unprotect(r); err != nil {
			return p.fail(fmt.Errorf("unprotect, and clear markers of, %d pages from frame %d: %w", r.Pages, r.Start, err))
		}
	}
	return nil
}
