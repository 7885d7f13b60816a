package pager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

// snapshot makes one of a rig whose threads stand still.
func (r *rig) snapshot() *Snapshot {
	r.t.Helper()
	s, err := r.pager.Snapshot(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// fork starts another VM whose memory is the snapshot's. Its cohort is r's, which ends last.
func (r *rig) fork(s *Snapshot, n int) *rig {
	r.t.Helper()
	c := &rig{t: r.t, im: r.im, cohort: r.cohort, server: r.server, shared: true}
	c.vm = guestmemtest.Start(r.t, r.im, n, "FAKEVMM_NICE=15")
	// What a VMM touches before it is watched must be forgotten.
	for _, f := range []units.Frame{0, 1, 2, 3} {
		c.write(f, textPage(uint64(f)+999))
	}
	for _, f := range []units.Frame{8, 9, 10} {
		c.read(f)
	}
	var err error
	if c.guest, err = guestmem.Attach(c.vm.Shim, c.vm.PID, c.im); err != nil {
		r.t.Fatal(err)
	}
	if c.pager, err = New(Options{Name: "fork", Guest: c.guest, Image: c.im, Cohort: c.cohort, From: s}); err != nil {
		r.t.Fatal(err)
	}
	return c.serve()
}

// clone copies a model that nobody changes meanwhile.
func (m *model) clone() *model {
	c := newModel(len(m.pages))
	copy(c.pages, m.pages)
	copy(c.other, m.other)
	return c
}

// readAll compares all of a guest's memory with the model.
func (m *model) readAll(r *rig) error {
	for f := range units.Frame(len(m.pages)) {
		if err := m.run(r, r.vm.Channels[0], op{Kind: "read", Frame: f}); err != nil {
			return err
		}
	}
	return nil
}

// play runs a script for each channel of a rig, side by side.
func (m *model) play(r *rig, scripts [][]op) error {
	errs := make([]error, len(scripts))
	var wg sync.WaitGroup
	for i, script := range scripts {
		wg.Go(func() {
			for k, o := range script {
				if err := m.run(r, r.vm.Channels[i], o); err != nil {
					errs[i] = fmt.Errorf("thread %d, step %d, %+v: %w", i, k, o, err)
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func drawScripts(t *rapid.T, name string, frames, threads int) [][]op {
	scripts := make([][]op, threads)
	for i := range scripts {
		scripts[i] = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) op { return drawOp(t, frames) }), 5, 40).Draw(t, fmt.Sprintf("%s, thread %d", name, i))
	}
	return scripts
}

// A guest lives, is snapshotted and lives on beside its forks, of which one is snapshotted and
// forked again after its parent has ended.
func TestForksAreEqualToPlainArraysWhateverEachDoes(t *testing.T) {
	const frames, threads = 96, 2
	server := runServer(t)
	rapid.Check(t, func(rt *rapid.T) {
		r := newRig(t, frames, threads)
		defer r.close()
		r.server = server
		r.serve()
		m := newModel(frames)
		must := func(err error) {
			if err != nil {
				rt.Fatal(err)
			}
		}
		must(m.play(r, drawScripts(rt, "before", frames, threads)))
		if rapid.Bool().Draw(rt, "kept before") {
			_, err := r.pager.Keep(t.Context())
			must(err)
		}
		// A report leaves it open what a page is: the snapshot must not.
		must(m.readAll(r))
		s := r.snapshot()
		first := r.fork(s, threads)
		defer first.close()
		ofFirst := m.clone()
		if rapid.Bool().Draw(rt, "snapshot ends early") {
			must(s.Close())
		}
		// Both at once.
		parents, children := drawScripts(rt, "parent", frames, threads), drawScripts(rt, "first fork", frames, threads)
		var err error
		done := make(chan struct{})
		go func() {
			defer close(done)
			err = m.play(r, parents)
		}()
		must(ofFirst.play(first, children))
		<-done
		must(err)
		must(m.readAll(r))
		must(ofFirst.readAll(first))

		again := first.snapshot()
		must(again.Err())
		ofSecond := ofFirst.clone()
		first.close()
		second := r.fork(again, threads)
		defer second.close()
		must(again.Close())
		must(ofSecond.play(second, drawScripts(rt, "second fork", frames, threads)))
		must(ofSecond.readAll(second))
		must(m.readAll(r))
		must(s.Close())
		must(errors.Join(r.pager.Err(), second.pager.Err()))
	})
}

func TestASnapshotKeepsPagesThatDoNotShrinkAndLeavesThemMapped(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	for f := range units.Frame(20) {
		r.write(f, randomPage(uint64(f)+1))
	}
	for f := units.Frame(20); f < 40; f++ {
		r.write(f, textPage(uint64(f)))
	}
	r.write(41, zeroPage())
	r.evict()
	if got := r.state(3); got != tagKept {
		t.Fatalf("a random page is %v after a pass, want Kept", got)
	}
	s := r.snapshot()
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if got := r.state(3); got != tagClean {
		t.Errorf("a random page is %v after a snapshot, want Clean", got)
	}
	u, err := s.Usage()
	if err != nil || u.Kept != 40 || u.Encoded < 20*4095 || u.PageTable == 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	stall := r.pager.Faults()
	if *r.read(3) != *randomPage(4) || r.pager.Faults() != stall {
		t.Error("a page that stayed mapped is wrong or faulted")
	}
	fork := r.fork(s, 1)
	defer fork.close()
	for f := range units.Frame(64) {
		if *fork.read(f) != *r.read(f) {
			t.Errorf("frame %d differs", f)
		}
	}
}

func TestASnapshotOfAGuestThatRunsIsRefused(t *testing.T) {
	var h hooked
	r := newRig(t, 64, 1, hook(&h)).serve()
	r.write(3, textPage(1))
	scans := 0
	h.everyScan = func() {
		if scans++; scans%2 == 1 { // the scan of a pass; that of the check comes next, under the mutex
			r.write(units.Frame(5+scans), textPage(1))
		}
	}
	if _, err := r.pager.Snapshot(t.Context()); !errors.Is(err, ErrIncomplete) {
		t.Errorf("got %v, want ErrIncomplete", err)
	}
	h.everyScan = nil
	if err := r.snapshot().Close(); err != nil {
		t.Error(err)
	}
}

func TestASnapshotInAFullPoolLeavesTheGuestAsItWas(t *testing.T) {
	r := newRig(t, 512, 1)
	r.useCohort(cohort.Options{Limit: 300 * units.KiB})
	r.serve()
	for f := range units.Frame(400) {
		r.write(f, randomPage(uint64(f)+1))
	}
	if s, err := r.pager.Snapshot(t.Context()); !errors.Is(err, cohort.ErrFull) || s != nil {
		t.Fatalf("got %v, want ErrFull", err)
	}
	for f := range units.Frame(400) {
		if *r.read(f) != *randomPage(uint64(f) + 1) {
			t.Fatalf("frame %d is damaged", f)
		}
	}
}

func TestASnapshotOfDamagedPagesIsNotAdopted(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.leaky = true
	r.write(7, textPage(7))
	r.evict()
	s := r.snapshot()
	defer s.Close() //nolint:errcheck // the entry is damaged
	r.flipBit(7)
	go func() { _ = r.vm.Channels[0].Poke(7, 0, 1) }() // the sandbox meets it, and dies
	if len(r.fatals(1)) == 0 {
		t.Fatal("the damage was not met")
	}
	for range 500 {
		if s.Err() != nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := s.Err(); !errors.Is(err, ErrIntegrity) {
		t.Fatalf("the snapshot says %v, want ErrIntegrity", err)
	}
	vm := guestmemtest.Start(t, r.im, 1)
	guest, err := guestmem.Attach(vm.Shim, vm.PID, r.im)
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close() //nolint:errcheck // ends with the test
	if _, err := New(Options{Name: "fork", Guest: guest, Image: r.im, Cohort: r.cohort, From: s}); !errors.Is(err, ErrIntegrity) {
		t.Errorf("adopting it: %v, want ErrIntegrity", err)
	}
	vm.Kill()
}

func TestASnapshotIsForItsOwnImageAndCohortOnly(t *testing.T) {
	r, other := newRig(t, 64, 1).serve(), newRig(t, 64, 1).serve()
	s := r.snapshot()
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	for name, o := range map[string]Options{
		"another cohort": {Guest: other.guest, Image: other.im, Cohort: other.cohort, From: s},
	} {
		if _, err := New(o); !errors.Is(err, ErrMismatch) {
			t.Errorf("%s: %v, want ErrMismatch", name, err)
		}
	}
}

func TestCountersGoOnInTheNextPagerOfASandbox(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(3, textPage(1))
	faults := r.pager.Faults()
	if faults == 0 {
		t.Fatal("no fault was counted")
	}
	s := r.snapshot()
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	vm := guestmemtest.Start(t, r.im, 1)
	defer vm.Kill()
	guest, err := guestmem.Attach(vm.Shim, vm.PID, r.im)
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close() //nolint:errcheck // ends with the test
	next, err := New(Options{Name: "test", Guest: guest, Image: r.im, Cohort: r.cohort, From: s, Before: r.pager})
	if err != nil {
		t.Fatal(err)
	}
	if next.Faults() != faults {
		t.Errorf("%d faults, want %d", next.Faults(), faults)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}
