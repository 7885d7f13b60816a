package pager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// Restore brings evicted pages back ahead of their use and maps template and zero pages;
// pages that are there already, frames out of range and repetitions are skipped. It returns
// how many pages it brought. Evicted pages are decoded outside the lock and become Clean;
// those that are expected to be written are installed writable and give up their entry:
// that saves the write fault and costs an encoding if the write does not come. Pages are taken in hand BatchPages at a time, in the order given; ctx is asked between.
//
// ErrFatal and ErrGone are as for Evict.
func (p *Pager) Restore(ctx context.Context, pages []Touch) (int, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return 0, ErrClosed
	}
	if len(pages) == 0 {
		return 0, nil
	}
	total := 0
	err := p.workers.restore(ctx, func(w *worker) error {
		b := &w.batch
		for rest := pages; len(rest) > 0 && ctx.Err() == nil; {
			b.begin()
			b.n = copy(b.touches[:], rest)
			rest = rest[b.n:]
			slices.SortFunc(b.touches[:b.n], func(x, y Touch) int { return cmp.Compare(x.Frame, y.Frame) })
			for i, t := range b.touches[:b.n] {
				b.frames[i] = t.Frame
			}
			n, err := p.restoreBatch(w)
			total += n
			if err != nil {
				return err
			}
		}
		return ctx.Err()
	})
	if err != nil && !errors.Is(err, ErrFatal) && ctx.Err() == nil {
		err = fmt.Errorf("restore pages of sandbox %s: %w", p.name, err)
	}
	return total, err
}

// restoreBatch brings back the frames of the batch.
func (p *Pager) restoreBatch(w *worker) (int, error) {
	b := &w.batch
	start := time.Now()
	mapped, installed := 0, 0
	err := w.locked(p, func() (err error) {
		mapped, err = p.collect(w)
		return err
	})
	if err != nil {
		return mapped, err
	}
	defer func() {
		for i := range b.n {
			if b.fates[i] == fateEncoded {
				p.unref(b.before[i].ref())
			}
		}
	}()
	for i := range b.n {
		if b.fates[i] != fateEncoded {
			continue
		}
		if err := p.load(w.page(i), b.frames[i], b.before[i], w.codec); err != nil {
			p.abort(err)
			return mapped, p.Err()
		}
	}
	err = w.locked(p, func() (err error) {
		installed, err = p.installBatch(w)
		return err
	})
	if installed > 0 {
		p.stats.prefetch.recordN(time.Since(start), installed)
	}
	return mapped + installed, err
}

// collect notes the evicted frames of the batch, with a reference to their entries, and
// maps template and zero pages at once. Caller holds mu.
func (p *Pager) collect(w *worker) (mapped int, err error) {
	b := &w.batch
	if p.dead != nil {
		b.n = 0
		return 0, p.dead
	}
	for i := range b.n {
		b.fates[i] = fateSkip
		f := b.frames[i]
		if int(f) >= p.table.frames || i > 0 && f == b.frames[i-1] {
			continue
		}
		b.before[i] = p.table.load(f)
		switch b.before[i].tag() {
		case tagEvicted:
			if p.cohort.Ref(b.before[i].ref()) != nil {
				continue // damaged, or shared too often: a fault finds out which
			}
			b.fates[i] = fateEncoded
		case tagTemplate:
			b.fates[i] = fateEqual
			if p.image.Hole(f) {
				b.fates[i] = fateZero
			}
		case tagZero:
			b.fates[i] = fateZero
		case tagBusy, tagClean, tagKept, tagCount:
		}
	}
	for _, want := range [...]fate{fateEqual, fateZero} {
		runs := b.runs(w.runs[:0], func(i int) bool { return b.fates[i] == want })
		for _, r := range runs {
			extra := r.Pages
			mapped += p.mapRest(r.Start, r.Start+units.Frame(r.Pages), want == fateZero, &extra)
		}
	}
	return mapped, nil
}

// installBatch installs the decoded pages whose state did not change meanwhile. Our
// reference keeps the handle from being used again, so an equal word means equal content.
// Caller holds mu.
func (p *Pager) installBatch(w *worker) (installed int, err error) {
	b := &w.batch
	if p.dead != nil {
		return 0, p.dead
	}
	still := func(i int) bool {
		return b.fates[i] == fateEncoded && p.table.load(b.frames[i]) == b.before[i]
	}
	for i := 0; i < b.n; {
		if !still(i) {
			i++
			continue
		}
		j := i + 1
		write := b.touches[i].Write
		for j < b.n && b.frames[j] == b.frames[j-1]+1 && still(j) && b.touches[j].Write == write {
			j++
		}
		done, err := p.mem.Copy(b.frames[i], w.pages.Data[i*units.PageSize:j*units.PageSize], !write)
		for k := i; k < i+done; k++ {
			if write {
				p.table.store(b.frames[k], entryTemplate)
				p.release(b.before[k].ref())
				continue
			}
			p.table.store(b.frames[k], clean(b.before[k].ref()))
		}
		installed += done
		if err != nil {
			return installed, p.fail(p.installError(b.frames[i+done], b.before[i+done], err))
		}
		i = j
	}
	return installed, nil
}
