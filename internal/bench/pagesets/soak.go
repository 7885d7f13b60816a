package pagesets

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// SoakOptions of Soak.
type SoakOptions struct {
	Rounds  int64 // pages to store and load
	Workers int
	Seed    uint64

	Progress func(SoakResult) // called about once a second; may be nil
}

// SoakResult counts what Soak did.
type SoakResult struct {
	Rounds  int64 // pages stored, loaded and compared
	Wrong   int64 // that came back different, or not at all
	Refused int64 // that do not shrink
	Ways    map[string]int64
	Took    time.Duration
}

const (
	// soakLive is how many pages a worker has in the pool at a time.
	soakLive = 4096
	// soakSource is how many captured pages are mutated.
	soakSource = 32 << 10
)

// A soak is one run of Soak.
type soak struct {
	set    *Set
	cohort *cohort.Cohort
	source *hostmem.Mapping
	frames []units.Frame
	left   atomic.Int64
	rounds atomic.Int64
	wrong  atomic.Int64
	refuse atomic.Int64
	ways   [cohort.NumWays]atomic.Int64
}

// Soak stores captured and mutated pages from several workers in one cohort, loads each
// later and compares all of its bytes, while dictionaries are trained and entries moved. It
// fails at the end if one page was wrong; ctx ends it early without an error.
func (s *Set) Soak(ctx context.Context, o SoakOptions) (res SoakResult, err error) {
	k := &soak{set: s}
	if err := k.collect(ctx); err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, k.source.Close()) }()
	k.cohort, err = cohort.New(cohort.Options{Library: s.library, Dictionary: dictionary.Options{AtStake: always}})
	if err != nil {
		return res, err
	}
	k.left.Store(o.Rounds)
	start := time.Now()
	back, stop := context.WithCancel(ctx)
	var tend, work sync.WaitGroup
	tend.Go(func() { _ = k.cohort.Run(back) }) // what a training says is in Stats
	tend.Go(func() { k.every(back, 50*time.Millisecond, func() { k.cohort.Compact(back, units.MiB) }) })
	if o.Progress != nil {
		tend.Go(func() { k.every(back, time.Second, func() { o.Progress(k.result(start)) }) })
	}
	failed := make([]error, o.Workers)
	for i := range o.Workers {
		work.Go(func() { failed[i] = k.run(ctx, rand.New(rand.NewPCG(o.Seed, uint64(i)))) }) //nolint:gosec // G115: small
	}
	work.Wait()
	stop()
	tend.Wait()
	res = k.result(start)
	errs := []error{errors.Join(failed...)}
	if n := k.cohort.Stats().Pool.Entries; n != 0 {
		errs = append(errs, fmt.Errorf("%d pool entries are left after every page was released", n))
	}
	errs = append(errs, k.cohort.Close())
	if res.Wrong > 0 {
		errs = append(errs, fmt.Errorf("%d of %d pages came back wrong", res.Wrong, res.Rounds))
	}
	return res, errors.Join(errs...)
}

func (k *soak) every(ctx context.Context, d time.Duration, fn func()) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			fn()
		}
	}
}

func (k *soak) result(start time.Time) SoakResult {
	r := SoakResult{Rounds: k.rounds.Load(), Wrong: k.wrong.Load(), Refused: k.refuse.Load(), Ways: map[string]int64{}, Took: time.Since(start)}
	for w := range k.ways {
		if n := k.ways[w].Load(); n > 0 {
			r.Ways[cohort.Way(w).String()] = n
		}
	}
	return r
}

// collect keeps a sample of the captured pages: the n-th replaces an earlier one with
// probability size / n.
func (k *soak) collect(ctx context.Context) error {
	m, err := hostmem.MapAnonymous(soakSource * units.PageSize)
	if err != nil {
		return err
	}
	k.source = m
	r, n := rand.New(rand.NewPCG(3, 3)), 0
	err = k.set.capture.Gaps(func(g capture.Gap) error {
		for _, c := range g.Changed {
			if codec.IsZero(c.Page) {
				continue
			}
			n++
			i := len(k.frames)
			if i == soakSource {
				if i = r.IntN(n); i >= soakSource {
					continue
				}
			} else {
				k.frames = append(k.frames, 0)
			}
			k.frames[i] = c.Frame
			*k.at(i) = *c.Page
		}
		return ctx.Err()
	})
	if err == nil && len(k.frames) == 0 {
		err = errors.New("the capture has no page that is not all zeros")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("collect pages: %w", err), m.Close())
	}
	return nil
}

func (k *soak) at(i int) *units.Page {
	return (*units.Page)(k.source.Data[i*units.PageSize : (i+1)*units.PageSize])
}

// held is a page that a worker has in the cohort, and what it must be.
type held struct {
	ref  cohort.Ref
	page units.Page
}

func (k *soak) run(ctx context.Context, r *rand.Rand) error {
	w := cohort.NewWorker()
	defer w.Close()
	live := make([]held, soakLive)
	var got units.Page
	settle := func(h *held) error {
		if h.ref == 0 {
			return nil
		}
		err := k.cohort.Load(w, &got, h.ref)
		if err != nil || got != h.page {
			k.wrong.Add(1)
		}
		k.rounds.Add(1)
		ref := h.ref
		h.ref = 0
		return errors.Join(err, k.cohort.Release(ref))
	}
	for k.left.Add(-1) >= 0 && ctx.Err() == nil {
		h := &live[r.IntN(soakLive)]
		if err := settle(h); err != nil {
			return err
		}
		f := k.mutate(r, &h.page)
		if codec.IsZero(&h.page) {
			k.rounds.Add(1) // nothing to keep, nothing to lose
			continue
		}
		st, err := k.cohort.Store(w, f, &h.page, cohort.Hint{Soon: r.IntN(4) == 0}) //nolint:contextcheck // waits 5 ms at most
		if err != nil {
			return err
		}
		if h.ref = st.Ref; st.Ref == 0 {
			k.refuse.Add(1)
			continue
		}
		k.ways[st.Way].Add(1)
	}
	for i := range live {
		if err := settle(&live[i]); err != nil {
			return err
		}
	}
	return nil
}

// mutate makes a page of captured ones: as it was, or with words, ranges or its place
// changed, or a public page with such changes.
func (k *soak) mutate(r *rand.Rand, page *units.Page) units.Frame {
	i := r.IntN(len(k.frames))
	f := k.frames[i]
	*page = *k.at(i)
	if r.IntN(16) == 0 {
		f = units.Frame(r.IntN(k.set.image.Frames())) //nolint:gosec // G115: a frame
		if t := k.set.image.Page(f); t != nil {
			*page = *t
		}
	}
	for range r.IntN(3) {
		at := r.IntN(units.PageSize)
		n := r.IntN(units.PageSize-at) + 1
		switch r.IntN(7) {
		case 0: // a few words
			for range r.IntN(24) + 1 {
				binary.LittleEndian.PutUint64(page[r.IntN(512)*8:], r.Uint64())
			}
		case 1: // a counter
			page[at]++
		case 2: // a part of another page
			copy(page[at:at+n], k.at(r.IntN(len(k.frames)))[at:])
		case 3: // moved
			old := *page
			copy(page[at:], old[:units.PageSize-at])
			copy(page[:at], old[units.PageSize-at:])
		case 4: // cleared
			clear(page[at : at+n])
		case 5: // noise, a little
			for j := range page[at : at+min(n, 64)] {
				page[at+j] = byte(r.Uint32()) //nolint:gosec // G115: a byte
			}
		case 6: // another frame
			f = k.frames[r.IntN(len(k.frames))]
		}
	}
	return f
}
