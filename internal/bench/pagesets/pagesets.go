// Package pagesets measures how small pages become and how fast, on page sets captured from
// real sandboxes, without VMs: each gap of each sibling goes through a cohort as it would
// in a pass of eviction, and in the end every page is loaded and compared.
//
//	capture --Gaps, in order of time--> replay: release what changed, store it --> account after each gap
//	                                    last gap: load every page of every sibling at random, compare
//
// A Row is one such replay with some ways of keeping pages turned off. Rows do not share
// anything, so each carries its own baseline: the private pages of the same gaps.
//
// The account of a gap is everything that is kept because of the siblings: the pool with its
// headers, tables and slack, both indexes, dictionaries and samples, the page tables, the
// library (counted once, as on a host that runs nothing else), and pages that did not
// shrink at their full size. Siblings that had no gap yet count neither here nor there.
//
// One goroutine replays; Run may be called from any, one at a time for honest timings.
package pagesets

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// A Set is a capture that is ready to be replayed any number of times.
type Set struct {
	capture *capture.Set
	image   *guestmem.Image
	root    *os.File
	library *library.Library
}

// Open prepares a capture. Close it.
func Open(ctx context.Context, dir string) (_ *Set, err error) {
	s := &Set{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.capture, err = capture.Open(dir); err != nil {
		return nil, err
	}
	if s.image, err = s.capture.Image(); err != nil {
		return nil, err
	}
	if s.root, err = s.capture.Root(); err != nil {
		return nil, err
	}
	if s.library, err = library.Build(ctx, s.image, s.root); err != nil {
		return nil, err
	}
	return s, nil
}

// Info describes the capture.
func (s *Set) Info() capture.Info { return s.capture.Info() }

// Close frees what Open made.
func (s *Set) Close() error {
	var errs []error
	if s.library != nil {
		errs = append(errs, s.library.Close())
	}
	if s.root != nil {
		errs = append(errs, s.root.Close())
	}
	if s.image != nil {
		errs = append(errs, s.image.Close())
	}
	return errors.Join(errs...)
}

// A replay is one run of a row.
type replay struct {
	set    *Set
	row    Row
	cohort *cohort.Cohort
	worker *cohort.Worker
	flat   *flat // instead of a cohort: each page for itself
	boxes  []*box
	res    *Result
	samples
}

// box is one sibling.
type box struct {
	memory *hostmem.Mapping // its pages as they were captured, at their frames
	tally  *pager.Tally
	pages  map[units.Frame]kept
	full   int // pages that did not shrink
	gaps   int // so far

	changed map[units.Frame]int // the gap in which a page changed last
}

// kept says where a private page is.
type kept struct {
	ref  cohort.Ref // 0: nowhere, or flat
	size int32      // flat: what it occupies
	full bool       // did not shrink
	soon bool       // it was expected to be touched by the next call
}

// Run replays the gaps of the first siblings (0: all) under a row.
func (s *Set) Run(ctx context.Context, row Row, siblings int) (_ *Result, err error) {
	if siblings <= 0 || siblings > len(s.Info().Siblings) {
		siblings = len(s.Info().Siblings)
	}
	r := &replay{set: s, row: row, res: &Result{Row: row.Name, Siblings: siblings}}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.open(siblings); err != nil {
		return nil, err
	}
	start := time.Now()
	err = s.capture.Gaps(func(g capture.Gap) error {
		if g.Sibling >= siblings {
			return ctx.Err()
		}
		if err := r.gap(ctx, g); err != nil {
			return fmt.Errorf("replay gap %d of sibling %d: %w", g.Call, g.Sibling, err)
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	if err := r.loadAll(ctx); err != nil {
		return nil, err
	}
	r.finish()
	r.res.Took = time.Since(start)
	return r.res, nil
}

func (r *replay) open(siblings int) (err error) {
	if r.row.flat != nil {
		r.flat = r.row.flat()
	} else {
		r.worker = cohort.NewWorker()
		r.cohort, err = cohort.New(cohort.Options{
			Library: r.set.library, Without: r.row.without, Isolation: r.row.isolation,
			Dictionary: dictionary.Options{DictSize: r.row.dictSize, AtStake: r.row.atStake},
		})
		if err != nil {
			return err
		}
	}
	for range siblings {
		b := &box{pages: map[units.Frame]kept{}, changed: map[units.Frame]int{}}
		r.boxes = append(r.boxes, b)
		if b.memory, err = hostmem.MapAnonymous(r.set.image.Size()); err != nil {
			return err
		}
		if b.tally, err = pager.NewTally(r.set.image.Frames()); err != nil {
			return err
		}
	}
	return nil
}

func (r *replay) close() error {
	var errs []error
	for _, b := range r.boxes {
		for _, k := range b.pages {
			if k.ref != 0 {
				errs = append(errs, r.cohort.Release(k.ref))
			}
		}
		if b.memory != nil {
			errs = append(errs, b.memory.Close())
		}
		if b.tally != nil {
			errs = append(errs, b.tally.Close())
		}
	}
	if r.cohort != nil {
		if n := r.cohort.Stats().Pool.Entries; n != 0 {
			errs = append(errs, fmt.Errorf("%d pool entries are left after every page was released", n))
		}
		r.worker.Close()
		errs = append(errs, r.cohort.Close())
	}
	if r.flat != nil {
		r.flat.close()
	}
	return errors.Join(errs...)
}

func (b *box) page(f units.Frame) *units.Page {
	return (*units.Page)(b.memory.Data[f.Offset() : f.Offset()+units.PageSize])
}

// gap brings one sibling to its state after a call.
func (r *replay) gap(ctx context.Context, g capture.Gap) error {
	b := r.boxes[g.Sibling]
	b.gaps++
	for _, f := range g.Gone {
		if err := r.forget(b, f); err != nil {
			return err
		}
		b.tally.Template(f)
	}
	for _, c := range g.Changed {
		if err := r.forget(b, c.Frame); err != nil {
			return err
		}
		*b.page(c.Frame) = *c.Page
	}
	for i, c := range g.Changed {
		if i%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		k, err := r.keep(b, c.Frame) //nolint:contextcheck // a store waits 5 ms at most
		if err != nil {
			return err
		}
		b.pages[c.Frame] = k
		b.changed[c.Frame] = b.gaps
	}
	if r.cohort != nil {
		r.cohort.TrainIfDue(ctx)
		start := time.Now()
		r.cohort.Compact(ctx, compactBudget)
		r.res.Compacting += time.Since(start)
	}
	return r.account()
}

// compactBudget is what the daemon gives a cohort at once.
const compactBudget = 4 * units.MiB

// hotGaps is for how many gaps a page that changed counts as one that the next call will
// touch. (The product's predictor needs to know the calls: internal/prefetch.)
const hotGaps = 4

// forget gives back what is kept of a page.
func (r *replay) forget(b *box, f units.Frame) error {
	k, ok := b.pages[f]
	if !ok {
		return nil
	}
	delete(b.pages, f)
	if k.full {
		b.full--
	}
	r.flatBytes -= int64(k.size)
	if k.ref == 0 {
		return nil
	}
	return r.cohort.Release(k.ref)
}

// keep stores one page as a pass would.
func (r *replay) keep(b *box, f units.Frame) (kept, error) {
	page := b.page(f)
	template := r.set.image.Page(f)
	start := time.Now()
	if codec.IsZero(page) {
		r.note(outZero, time.Since(start))
		b.tally.Zero(f)
		return kept{}, nil
	}
	if template != nil && *page == *template && r.row.template {
		r.note(outEqual, time.Since(start))
		b.tally.Template(f)
		return kept{}, nil
	}
	if r.flat != nil {
		n := r.flat.encode(page, template)
		r.note(outFlat, time.Since(start))
		r.flatBytes += int64(n)
		return kept{size: int32(n)}, nil //nolint:gosec // G115: at most a page and its entry
	}
	last, known := b.changed[f]
	soon := known && b.gaps-last <= hotGaps
	st, err := r.cohort.Store(r.worker, f, page, cohort.Hint{Soon: soon && !r.row.noCost})
	if err != nil {
		return kept{}, err
	}
	if st.Ref == 0 {
		r.note(outFull, time.Since(start))
		b.full++
		b.tally.Keep(f, codec.Checksum(page))
		return kept{full: true}, nil
	}
	r.note(out(st.Way), time.Since(start))
	r.wayBytes[st.Way] += int64(st.Size)
	b.tally.Evict(f, st.Ref)
	return kept{ref: st.Ref, soon: soon}, nil
}

// loadAll loads every page of every sibling in random order and compares it.
func (r *replay) loadAll(ctx context.Context) error {
	if r.cohort == nil {
		return nil
	}
	type at struct {
		b *box
		f units.Frame
		k kept
	}
	var all []at
	for _, b := range r.boxes {
		for f, k := range b.pages {
			if k.ref != 0 {
				all = append(all, at{b, f, k})
			}
		}
	}
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	w := cohort.NewLoader()
	defer w.Close()
	var dst units.Page
	for i, a := range all {
		if i%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		way, _, err := r.cohort.Way(w, a.k.ref)
		if err != nil {
			return err
		}
		start := time.Now()
		err = r.cohort.Load(w, &dst, a.k.ref)
		took := time.Since(start)
		if err != nil || dst != *a.b.page(a.f) {
			r.res.Wrong++
		}
		r.res.Loads++
		r.loads[way] = append(r.loads[way], took)
		if a.k.soon {
			r.hotLoads = append(r.hotLoads, took)
		}
	}
	return nil
}
