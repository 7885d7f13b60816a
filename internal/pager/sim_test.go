package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/pager/pagertest"
	"github.com/agentzip/agentzip/internal/units"
)

// A foreteller says which pages come next, from the faults; a prefetcher can be plugged in.
type foreteller interface{ Next(touched []Touch) []Touch }

// neighbours foretells the pages after each touched one, every third as written.
type neighbours struct{}

func (neighbours) Next(touched []Touch) (next []Touch) {
	for _, t := range touched {
		for i := range units.Frame(3) {
			next = append(next, Touch{Frame: t.Frame + 1 + i, Write: (t.Frame+i)%3 == 0})
		}
	}
	return next
}

const (
	simFrames  = 48
	simThreads = 3
)

// A world is one pager and a guest, on a fake memory: everything happens in the order that the
// random source says, in the middle of each other. A guest thread, or one that serves faults,
// restores or reports, takes a step wherever the pager asks its context whether to go on, and
// at each operation on the guest's memory; those who need the mutex only when it is free. One
// goroutine runs at a time, so one seed is one schedule.
type world struct {
	rng     *rand.Rand
	mem     *pagertest.Memory
	p       *Pager
	w       *faultWorker
	threads []*simThread
	next    foreteller

	want, other []units.Page // what a page contains, or (after a report) contains instead
	depth       int          // steps within steps
	cancel      func()       // of the pass that runs; nil: none
	fatal       chan error
	failed      error // what went wrong, once
	accesses    int
}

// A simThread is a thread of the guest with the access it makes or waits for.
type simThread struct {
	*pagertest.Thread
	f       units.Frame
	write   bool
	content *units.Page // nil: write one word
	pending bool
}

// simContext asks the world for a step whenever somebody asks whether to go on.
type simContext struct {
	context.Context //nolint:containedctx // it is one
	w               *world
}

func (c simContext) Err() error { c.w.step(); return c.Context.Err() }

// simPlace is what worlds share.
type simPlace struct {
	im      *guestmem.Image
	cohort  *cohort.Cohort
	w       *faultWorker
	workers *Workers
}

func newSimPlace(t *testing.T) *simPlace {
	t.Helper()
	pl := &simPlace{im: guestmemtest.Image(t, simFrames), w: &faultWorker{codec: cohort.NewLoader()}, workers: NewWorkers(4)}
	pl.workers.plain = true
	pl.cohort = newCohort(t, pl.im, cohort.Options{})
	t.Cleanup(func() {
		pl.w.codec.Close()
		if err := errors.Join(pl.cohort.Close(), pl.workers.Close()); err != nil {
			t.Error(err)
		}
	})
	return pl
}

func (pl *simPlace) newWorld(seed uint64) (*world, error) {
	s := &world{rng: rand.New(rand.NewPCG(seed, 7)), w: pl.w, next: neighbours{}, fatal: make(chan error, 1)}
	var err error
	if s.mem, err = pagertest.New(pl.im); err != nil {
		return nil, err
	}
	s.p, err = New(Options{
		Name: "sim", Guest: s.mem, Image: pl.im, Cohort: pl.cohort, Workers: pl.workers, OnFatal: func(err error) { s.fatal <- err },
		FaultAround: 1 << s.rng.IntN(5), EvictedAround: 1 << s.rng.IntN(4), LeaveUnmapped: s.rng.IntN(4) == 0, ProtectRestored: s.rng.IntN(3) == 0,
	})
	if err != nil {
		return nil, err
	}
	for f := range units.Frame(simFrames) {
		s.want = append(s.want, *guestmemtest.Base(f))
	}
	s.other = slices.Clone(s.want)
	for range simThreads {
		s.threads = append(s.threads, &simThread{Thread: s.mem.Thread()})
	}
	s.mem.Step, s.mem.Serve = s.step, s.serve
	return s, nil
}

func (s *world) close() error { return errors.Join(s.p.Close(), s.mem.Close()) }

func (s *world) fail(format string, args ...any) {
	if s.failed == nil {
		s.failed = fmt.Errorf(format, args...)
	}
}

// step lets something else happen, mostly nothing.
func (s *world) step() {
	if s.depth >= 2 || s.failed != nil {
		return
	}
	s.depth++
	defer func() { s.depth-- }()
	if s.rng.IntN(3) > 0 {
		return
	}
	s.guest()
	if !s.p.mu.TryLock() {
		return
	}
	s.p.mu.Unlock()
	s.act()
}

// act is what others do that need the mutex.
func (s *world) act() {
	switch s.rng.IntN(12) {
	case 0, 1, 2, 3, 4:
		s.serve()
	case 5, 6:
		s.restore()
	case 7:
		s.report()
	case 8:
		s.p.GiveUp(context.Background())
	case 9:
		if s.cancel != nil && s.rng.IntN(4) == 0 {
			s.cancel()
		}
	}
}

func (s *world) serve() { serveFaults(s.p, s.w) }

func (s *world) restore() {
	touched := s.p.DrainTouched(nil)
	pages := s.next.Next(touched)
	for range s.rng.IntN(4) {
		pages = append(pages, Touch{Frame: units.Frame(s.rng.IntN(simFrames + 1)), Write: s.rng.IntN(2) == 0})
	}
	s.p.Expect(pages)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if s.rng.IntN(8) == 0 {
		cancel()
	}
	_, err := s.p.Restore(simContext{ctx, s}, pages, Class(s.rng.IntN(2)))
	s.check("restore", err)
}

// check takes errors that are no failure of the test: the sandbox is dead, or ctx was ended.
func (s *world) check(what string, err error) {
	if err != nil && !errors.Is(err, context.Canceled) && s.p.Err() == nil {
		s.fail("%s: %w", what, err)
	}
}

// guest lets one thread try its access, a new one or that for which it waited.
func (s *world) guest() {
	t := s.threads[s.rng.IntN(len(s.threads))]
	if t.Waits() {
		return
	}
	if !t.pending {
		t.f, t.write, t.content = units.Frame(s.rng.IntN(simFrames)), s.rng.IntN(2) == 0, nil
		if s.rng.IntN(2) == 0 { // a working set
			t.f %= 8
		}
		if t.write && s.rng.IntN(3) > 0 {
			t.content = content(contentKinds[s.rng.IntN(len(contentKinds))], t.f, uint64(s.rng.IntN(50)+1))
		}
		t.pending = true
	}
	s.access(t)
}

func (s *world) access(t *simThread) {
	ok := t.Access(t.f, t.write, func(p *units.Page) {
		s.accesses++
		want, other := &s.want[t.f], &s.other[t.f]
		if *p != *want && *p != *other {
			s.fail("frame %d has another content (%v)", t.f, s.p.table.load(t.f).tag())
		}
		*want, *other = *p, *p
		switch {
		case t.content != nil:
			*p, *want, *other = *t.content, *t.content, *t.content
		case t.write:
			v := s.rng.Uint64()
			binary.NativeEndian.PutUint64(p[128:], v)
			*want, *other = *p, *p
		}
	})
	if ok {
		t.pending = false
	}
}

// report lets the guest report pages free that no thread uses.
func (s *world) report() {
	r := guestmem.Run{Start: units.Frame(s.rng.IntN(simFrames))}
	r.Pages = 1 + s.rng.IntN(min(16, simFrames-int(r.Start)))
	for i := range r.Pages {
		f := r.Start + units.Frame(i)
		used := slices.ContainsFunc(s.threads, func(t *simThread) bool { return t.pending && t.f == f })
		if used || s.want[f] != s.other[f] {
			return
		}
	}
	s.depth += 2 // the guest stands still
	err := s.p.discard(r, &s.w.discard)
	s.depth -= 2
	s.check("report", err)
	for i := range r.Pages {
		s.other[r.Start+units.Frame(i)] = units.Page{}
	}
}

// invariants checks rule 4 and rule 6 while nothing runs.
func (s *world) invariants() {
	for f := range units.Frame(simFrames) {
		mapped, isPrivate, protected, marker := s.mem.State(f)
		e := s.p.table.load(f)
		bad := marker
		switch e.tag() {
		case tagTemplate, tagZero:
			bad = bad || protected
		case tagKept, tagAhead, tagLoose:
			bad = bad || !isPrivate || protected
		case tagClean:
			bad = bad || !isPrivate || !protected
		case tagEvicted:
			bad = bad || mapped
		case tagBusy, tagCount:
			bad = true
		}
		if bad {
			s.fail("frame %d is %v, and mapped %v, private %v, protected %v, marker %v", f, e.tag(), mapped, isPrivate, protected, marker)
		}
		if marked, around := s.p.table.unmark(f); marked {
			if e.tag() != tagClean && e.tag() != tagLoose {
				s.fail("frame %d is %v and marked as brought ahead", f, e.tag())
			}
			s.p.table.mark(f, around)
		}
	}
}

// run plays a schedule of n rounds and reads everything at the end, twice.
func (s *world) run(rounds int) error {
	for range rounds {
		for range s.rng.IntN(30) {
			s.guest()
			if s.rng.IntN(3) == 0 {
				s.act()
			}
		}
		if s.rng.IntN(3) > 0 {
			s.evict()
		}
		if s.p.Err() != nil {
			return s.failed
		}
		if s.invariants(); s.failed != nil {
			return s.failed
		}
	}
	for range 2 {
		s.readAll()
		s.evict()
		if s.p.Err() == nil {
			s.invariants()
		}
		if s.failed != nil {
			return s.failed
		}
	}
	return s.failed
}

func (s *world) evict() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.cancel = cancel
	_, err := s.p.Evict(simContext{ctx, s})
	s.cancel = nil
	if !errors.Is(err, cohort.ErrFull) {
		s.check("evict", err)
	}
}

// readAll ends what threads wait for and reads all pages, with nothing in between.
func (s *world) readAll() {
	s.depth += 2
	defer func() { s.depth -= 2 }()
	finish := func(t *simThread) {
		for range 20 {
			if s.access(t); !t.pending || s.p.Err() != nil || s.failed != nil {
				return
			}
			s.serve()
		}
		s.fail("a thread waits for ever at frame %d (%v)", t.f, s.p.table.load(t.f).tag())
	}
	for _, t := range s.threads {
		if t.pending {
			finish(t)
		}
	}
	for f := range units.Frame(simFrames) {
		t := s.threads[0]
		t.f, t.write, t.content, t.pending = f, false, nil, true
		if finish(t); s.p.Err() != nil || s.failed != nil {
			return
		}
	}
}

// Thousands of schedules, each from its seed.
func TestMemoryEqualsAPlainArrayInEverySchedule(t *testing.T) {
	seeds := uint64(800)
	if raceEnabled || testing.Short() {
		seeds = 150
	}
	pl := newSimPlace(t)
	accesses, faults := 0, Counts{}
	for seed := range seeds {
		s, err := pl.newWorld(seed)
		if err != nil {
			t.Fatal(err)
		}
		err = s.run(4)
		if err == nil {
			err = s.p.Err()
		}
		accesses += s.accesses
		c := s.p.Counts()
		faults.Evicted += c.Evicted
		faults.Protected += c.Protected
		faults.Private += c.Private
		faults.Neighbours += c.Neighbours
		faults.Restored += c.Restored
		faults.Used += c.Used
		faults.Wasted += c.Wasted
		if err := errors.Join(err, s.close()); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if n := pl.cohort.Stats().Pool.Entries; n != 0 {
			t.Fatalf("seed %d: %d pool entries were not given back", seed, n)
		}
	}
	t.Logf("%d schedules, %d accesses, %+v", seeds, accesses, faults)
	if min(faults.Evicted, faults.Protected, faults.Private, faults.Neighbours, faults.Restored, faults.Used, faults.Wasted) < seeds/2 {
		t.Errorf("the schedules did not reach everything: %+v", faults)
	}
}

// Whatever operation fails, with whatever error: the guest never sees a wrong page, and either
// goes on or is dead with a reason that was told.
func TestWhicheverOperationFailsThePagesAreRightOrTheSandboxIsDead(t *testing.T) {
	pl := newSimPlace(t)
	errs := []error{guestmem.ErrExists, guestmem.ErrGone, errInjected}
	for shift := range errs { // each operation fails with each error in one of them
		for n := 0; ; n++ {
			injected := errs[(n+shift)%len(errs)]
			start := time.Now()
			reached, err := pl.runFailing(1, n, injected)
			if err != nil {
				t.Fatalf("operation %d fails with %v: %v", n, injected, err)
			}
			if d := time.Since(start); d > 2*time.Second { // 1 s and a busy machine
				t.Errorf("operation %d fails with %v: it took %v", n, injected, d)
			}
			if !reached {
				break
			}
			if raceEnabled {
				n += 10
			}
		}
	}
}

// runFailing plays a schedule whose n-th operation fails.
func (pl *simPlace) runFailing(seed uint64, n int, injected error) (reached bool, err error) {
	s, err := pl.newWorld(seed)
	if err != nil {
		return false, err
	}
	ops, failed := 0, ""
	s.mem.Fail = func(op string) error {
		if ops++; ops == n+1 {
			failed = op
			return fmt.Errorf("%s: %w", op, injected)
		}
		return nil
	}
	// A pass that fails without harm says so; the sandbox lives on.
	err = s.run(2)
	dead := s.p.Err()
	if errors.Is(err, injected) && dead == nil {
		s.failed, err = nil, nil
		s.mem.Fail = nil
		if s.readAll(); s.failed != nil {
			err = s.failed
		}
	}
	if dead != nil && !errors.Is(dead, guestmem.ErrGone) {
		select {
		case <-s.fatal:
		case <-time.After(5 * time.Second):
			err = errors.Join(err, errors.New("nobody was told that the sandbox is dead"))
		}
	}
	if dead != nil && failed == "" {
		err = errors.Join(err, fmt.Errorf("the sandbox is dead though nothing failed: %w", dead))
	}
	err = errors.Join(err, s.close())
	if left := pl.cohort.Stats().Pool.Entries; left != 0 {
		err = errors.Join(err, fmt.Errorf("%d pool entries were not given back", left))
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", failed, err)
	}
	return failed != "", err
}
