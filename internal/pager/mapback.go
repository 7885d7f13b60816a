package pager

import (
	"context"
	"math/bits"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// Shared pages are mapped back. A page that a pass dropped because it equals the template's
// page, or zeros, costs nothing while that page is mapped: it is shared, or the kernel's zero
// page. So the pass maps it again, and the next call reads it without a fault; a write is a
// copy inside the kernel, without an event. Of 3,120 pages that were dropped in a gap of the
// main job 60 % are such pages, and 302 of a call's 1,027 faults were on them.
//
// Where a pass drops a page for the first time in a region, it also maps the shared pages
// around, once: the guest works there, and the page of the kernel's page table that they need
// is there already. Regions where the guest never had a page of its own stay unmapped: their
// page tables would be 4 KiB for each 2 MiB of guest memory.
//
//	region: untouched --a pass drops a page--> wanted --end of the pass--> mapped
//	        mapped --pages reported free are dropped--> wanted
//
// Rule 5 holds: words are looked at, and pages mapped, under one hold of the mutex.

// regionPages is how many pages one page of the kernel's page table maps.
const regionPages = 512

// regions says which regions are to be mapped. Guarded by Pager.mu.
type regions struct {
	wanted []uint64 // bit: shared pages are to be mapped at the end of the next pass
	mapped []uint64 // bit: they were
}

func newRegions(frames int) regions {
	words := (frames + regionPages*64 - 1) / (regionPages * 64)
	return regions{wanted: make([]uint64, words), mapped: make([]uint64, words)}
}

// dropped notes that a pass dropped a page.
func (r *regions) dropped(f units.Frame) {
	n := f / regionPages
	if bit := uint64(1) << (n % 64); r.mapped[n/64]&bit == 0 {
		r.wanted[n/64] |= bit
	}
}

// discarded notes that pages that were reported free were dropped in a region.
func (r *regions) discarded(f units.Frame) {
	n := f / regionPages
	r.wanted[n/64] |= 1 << (n % 64)
}

// take returns a region that is wanted and makes it mapped.
func (r *regions) take() (start units.Frame, ok bool) {
	for i, w := range r.wanted {
		if w != 0 {
			bit := w & -w
			r.wanted[i] &^= bit
			r.mapped[i] |= bit
			return units.Frame(i*64+bits.TrailingZeros64(w)) * regionPages, true
		}
	}
	return 0, false
}

// mapsBack reports whether the shared page (zero: the zero page) is to be mapped at f. A page
// that will be written is left to Restore, which installs it writable: the call then pays
// neither a fault nor the first touch of new memory (20 us here). Caller holds mu.
func (p *Pager) mapsBack(f units.Frame, zero bool) bool {
	return p.mappable(f, zero) && !p.expectedWrite(f)
}

// mapBack maps the shared pages in place of those that the batch dropped. Those that were
// written meanwhile are mapped: the kernel skips them. Caller holds mu.
func (p *Pager) mapBack(w *worker) {
	b := &w.batch
	for _, zero := range [...]bool{false, true} {
		runs := b.runs(w.runs[:0], func(i int) bool {
			return (b.fates[i] == fateZero || b.fates[i] == fateEqual) && p.mapsBack(b.frames[i], zero)
		})
		for _, r := range runs {
			p.mapShared(r, zero)
		}
	}
}

// mapShared maps a run. An error is left to the fault that
// will come. Caller holds mu.
func (p *Pager) mapShared(r guestmem.Run, zero bool) {
	extra := r.Pages
	mapped := p.mapRest(r.Start, r.Start+units.Frame(r.Pages), zero, &extra)
	p.stats.mappedBack.Add(uint64(mapped))
}

// populate maps the shared pages of the regions that are wanted, until ctx ends.
func (p *Pager) populate(ctx context.Context, w *worker) error {
	for ctx.Err() == nil {
		more := false
		err := w.locked(p, func() error {
			if p.dead != nil {
				return p.dead
			}
			var start units.Frame
			if start, more = p.regions.take(); more {
				p.populateRegion(w, start)
			}
			return p.dead
		})
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// populateRegion maps what it may of a region. Caller holds mu, which faults may have in
// between.
func (p *Pager) populateRegion(w *worker, f units.Frame) {
	end := min(f+regionPages, units.Frame(p.table.frames))
	for f < end {
		zero := p.mapsBack(f, true)
		if !zero && !p.mapsBack(f, false) {
			f++
			continue
		}
		last := f + 1
		for last < end && last-f < BatchPages && p.mapsBack(last, zero) {
			last++
		}
		p.mapShared(guestmem.Run{Start: f, Pages: int(last - f)}, zero)
		f = last
		if w.makeWay(p); p.dead != nil {
			return
		}
	}
}
