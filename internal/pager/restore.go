package pager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// installPages is how many pages are installed with the mutex held once: a page costs up to
// 20 us here (the first touch of new memory), and a fault waits for all of them. Halved, a
// page costs a system call's 1 us more for each 8.
const installPages = 16

// A RestoreResult says what became of the pages that a Restore was given.
type RestoreResult struct {
	Evicted int // were evicted, and were decoded and installed
	Shared  int // the template's own page, or the zero page, was mapped
	Private int // a copy of the template's page, or a page of zeros, was installed to be written
	Present int // were mapped already, or are served by nobody else (out of range, twice in a batch)
	Lost    int // changed while they were decoded: a fault or a report was faster
	Took    time.Duration
}

// Restored returns how many pages are there because of the Restore.
func (r RestoreResult) Restored() int { return r.Evicted + r.Shared + r.Private }

// Restore brings pages back ahead of their use, in the order given, BatchPages at a time;
// neighbours in a batch go together. What is there already is skipped.
//
// Of pages that will only be read, evicted ones become Loose (they keep their entry), those of the template and zero
// pages are mapped as shared. Those that will be written are installed writable, whatever
// they were: that saves the write fault and the kernel's copy, and costs a private page and,
// for an evicted one, its entry if the write does not come.
//
// Any goroutine may call it, several for one sandbox too. Batches of all sandboxes take
// turns; see Class. When ctx ends the pages in hand are left as they were: within the time of
// one decode, or of installPages installs. ErrFatal and ErrGone are as for Evict. The result counts what was done,
// also with an error.
func (p *Pager) Restore(ctx context.Context, pages []Touch, class Class) (RestoreResult, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	var res RestoreResult
	if p.closed {
		return res, ErrClosed
	}
	start := time.Now()
	p.workers.restores.Add(1)
	defer p.workers.restores.Add(-1)
	var err error
	for rest := pages; len(rest) > 0 && err == nil; {
		n := min(len(rest), BatchPages)
		err = p.workers.restore(ctx, p, class, func(w *worker) error {
			b := &w.batch
			b.take(rest[:n])
			return p.restoreBatch(ctx, w, &res)
		})
		rest = rest[n:]
	}
	res.Took = time.Since(start)
	if err != nil && !errors.Is(err, ErrFatal) && ctx.Err() == nil {
		err = fmt.Errorf("restore pages of sandbox %s: %w", p.name, err)
	}
	return res, err
}

// take makes pages the batch, in ascending order.
func (b *batch) take(pages []Touch) {
	b.begin()
	b.n = copy(b.touches[:], pages)
	slices.SortFunc(b.touches[:b.n], func(x, y Touch) int { return cmp.Compare(x.Frame, y.Frame) })
	for i, t := range b.touches[:b.n] {
		b.frames[i] = t.Frame
	}
}

// restoreBatch brings back the frames of the batch.
func (p *Pager) restoreBatch(ctx context.Context, w *worker, res *RestoreResult) error {
	b := &w.batch
	start := time.Now()
	if err := w.locked(p, func() error { return p.collect(w, res) }); err != nil {
		return err
	}
	defer func() {
		for i := range b.n {
			if b.fates[i] == fateEncoded {
				p.unref(b.before[i].ref())
			}
		}
	}()
	wanted := 0
	for i := range b.n {
		if !b.fates[i].installs() {
			continue
		}
		wanted++
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := p.fill(w, i); err != nil {
			p.abort(err)
			return p.Err()
		}
	}
	if wanted == 0 {
		return ctx.Err()
	}
	before, installed := res.Evicted, res.Evicted+res.Private
	err := w.locked(p, func() error { return p.installBatch(ctx, w, res) })
	if n := res.Evicted - before; n > 0 {
		took := time.Since(start)
		p.stats.prefetch.recordN(took, n)
		p.stats.prefetchPage.recordN(took/time.Duration(res.Evicted+res.Private-installed), n)
	}
	return err
}

// installs reports whether a page of a Restore is installed as a private one.
func (f fate) installs() bool { return f == fateEncoded || f == fateFill }

// fill puts the content of the i-th page into its place in the worker's buffer. It holds no
// lock: the content of an evicted page is held by our reference, and that of the template's
// never changes.
func (p *Pager) fill(w *worker, i int) error {
	b := &w.batch
	dst := w.page(i)
	image := p.image.Page(b.frames[i])
	switch {
	case b.fates[i] == fateEncoded:
		if err := p.load(dst, b.frames[i], b.before[i], w.codec); err != nil {
			return err
		}
		b.stored[i].Way = w.codec.Loaded()
	case image == nil || b.before[i] == entryZero:
		*dst = units.Page{}
	default:
		*dst = *image
	}
	if b.touches[i].Write {
		b.after[i] = ahead(codec.Checksum(dst))
	}
	return nil
}

// collect notes the frames of the batch that are to be installed, evicted ones with a
// reference to their entries, and maps template and zero pages at once. Caller holds mu.
func (p *Pager) collect(w *worker, res *RestoreResult) error {
	b := &w.batch
	if p.dead != nil {
		b.n = 0
		return p.dead
	}
	for i := range b.n {
		b.fates[i] = fateSkip
		if int(b.frames[i]) < p.table.frames && (i == 0 || b.frames[i] != b.frames[i-1]) {
			b.fates[i] = p.wants(b, i)
		}
		if b.fates[i] == fateSkip {
			res.Present++
		}
	}
	for _, want := range [...]fate{fateEqual, fateZero} {
		runs := b.runs(w.runs[:0], func(i int) bool { return b.fates[i] == want })
		for _, r := range runs {
			extra := r.Pages
			mapped := p.mapRest(r.Start, r.Start+units.Frame(r.Pages), want == fateZero, &extra)
			res.Shared += mapped
			p.stats.shared.Add(uint64(mapped))
			res.Present += r.Pages - mapped
		}
	}
	return nil
}

// wants says what a Restore does with the i-th page. Caller holds mu.
func (p *Pager) wants(b *batch, i int) fate {
	f := b.frames[i]
	e := p.table.load(f)
	b.before[i] = e
	switch e.tag() {
	case tagEvicted:
		if p.cohort.Ref(e.ref()) != nil {
			return fateSkip // damaged, or shared too often: a fault finds out which
		}
		return fateEncoded
	case tagTemplate, tagZero:
		if b.touches[i].Write {
			return fateFill
		}
		if e == entryZero || p.image.Hole(f) {
			return fateZero
		}
		return fateEqual
	case tagBusy, tagClean, tagKept, tagAhead, tagLoose, tagCount:
	}
	return fateSkip
}

// installBatch installs the pages whose state did not change meanwhile. Our reference keeps
// the entry from being used again, so an equal word means equal content: that of an Evicted
// page is the entry's, and that of a Template or Zero page that is not mapped is the
// template's or zeros. Caller holds mu, which is given away in between to faults.
func (p *Pager) installBatch(ctx context.Context, w *worker, res *RestoreResult) error {
	b := &w.batch
	for i := 0; i < b.n; {
		if p.dead != nil {
			return p.dead
		}
		if !b.fates[i].installs() {
			i++
			continue
		}
		if p.table.load(b.frames[i]) != b.before[i] {
			res.Lost++
			i++
			continue
		}
		j := i + 1
		for j < b.n && j-i < installPages && p.installsWith(b, j) {
			j++
		}
		done, err := p.installRun(w, i, j, res)
		if err != nil {
			return p.fail(err)
		}
		i += done
		w.makeWay(p)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// installsWith reports whether the j-th page can be installed by one call with the one before.
func (p *Pager) installsWith(b *batch, j int) bool {
	return b.fates[j].installs() && b.frames[j] == b.frames[j-1]+1 &&
		b.touches[j].Write == b.touches[j-1].Write && p.table.load(b.frames[j]) == b.before[j]
}

// installRun installs the pages i to j-1 of the batch, which are neighbours, and returns how
// many of them are done with. Caller holds mu.
func (p *Pager) installRun(w *worker, i, j int, res *RestoreResult) (done int, err error) {
	b := &w.batch
	write := b.touches[i].Write
	done, err = p.mem.Copy(b.frames[i], w.pages.Data[i*units.PageSize:j*units.PageSize], !write && p.protect)
	for k := i; k < i+done; k++ {
		p.installed(b, k, write, res)
	}
	if err == nil {
		return j - i, nil
	}
	k := i + done
	if b.fates[k] == fateFill && errors.Is(err, guestmem.ErrExists) {
		res.Present++ // it is mapped: then the mapping is the truth
		return done + 1, nil
	}
	return done, p.installError(b.frames[k], b.before[k], err)
}

// installed publishes the new word of the k-th page. Caller holds mu.
func (p *Pager) installed(b *batch, k int, write bool, res *RestoreResult) {
	f, e := b.frames[k], b.before[k]
	if b.fates[k] == fateFill {
		p.table.store(f, b.after[k])
		p.stats.private.Add(1)
		res.Private++
		return
	}
	if write {
		p.table.store(f, b.after[k])
		p.release(e.ref())
	} else {
		p.table.store(f, p.back(e.ref()))
		p.table.mark(f, false)
	}
	p.stats.ways[b.stored[k].Way].Add(1)
	res.Evicted++
}
