package pager

import (
	"context"
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

func TestCleanPagesThatGiveUpTheirEntriesTakeWritesWithoutAFault(t *testing.T) {
	for _, protect := range []bool{false, true} {
		testGivingUp(t, protect)
	}
}

func testGivingUp(t *testing.T, protect bool) {
	t.Helper()
	r := newRig(t, 256, 1, func(o *Options) { o.ProtectRestored = protect }).serve()
	defer r.close()
	for f := range units.Frame(100) {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	for f := range units.Frame(80) {
		r.read(f)
	}
	r.settled()
	want := 0
	for f := range units.Frame(100) {
		if got := r.state(f); got == tagLoose || got == tagClean {
			want++
		}
	}
	if got := r.pager.GiveUp(context.Background()); got != want || want < 80 {
		t.Errorf("%d entries were given up, want %d", got, want)
	}
	if u, err := r.pager.Usage(); err != nil || u.Kept != 100-want {
		t.Errorf("usage %+v, %v, want the other entries kept", u, err)
	}
	faults := r.pager.Faults()
	for f := range units.Frame(80) {
		r.write(f, textPage(uint64(f)+1000))
	}
	if n := r.pager.Faults() - faults; n != 0 {
		t.Errorf("%d faults", n)
	}
	r.evict()
	for f := range units.Frame(80) {
		if *r.read(f) != *textPage(uint64(f) + 1000) {
			t.Errorf("frame %d lost a write", f)
		}
	}
	if got := r.pager.GiveUp(context.Background()); got == 0 {
		t.Error("nothing was given up the second time")
	}
	r.unharmed()
}

// half is a page that shrinks to about 2 KiB.
func half(seed uint64) *units.Page {
	p := randomPage(seed)
	clear(p[2048:])
	return p
}

// A sandbox whose call runs has read what fills the pool; its sibling has to be evicted.
func TestAFullPoolTakesTheEntriesOfCleanPagesFirst(t *testing.T) {
	const frames = 512
	server := runServer(t)
	running, idle := newRig(t, frames, 1), newRig(t, frames, 1)
	running.useCohort(cohort.Options{Limit: units.MiB})
	if err := idle.cohort.Close(); err != nil {
		t.Fatal(err)
	}
	idle.shared = true
	idle.cohort, idle.pager.cohort = running.cohort, running.cohort
	running.cohort.Join(idle.pager)
	for _, r := range []*rig{running, idle} {
		r.server = server
		r.serve()
	}
	for f := range units.Frame(frames) {
		running.write(f, half(uint64(f)))
	}
	if _, err := running.pager.Evict(context.Background()); !errors.Is(err, cohort.ErrFull) {
		t.Fatalf("the pool is not full: %v", err)
	}
	for f := range units.Frame(frames) {
		running.read(f)
	}
	for f := range units.Frame(100) {
		idle.write(f, half(1000+uint64(f)))
	}
	res, err := idle.pager.Evict(context.Background())
	if err != nil || res.Encoded != 100 {
		t.Errorf("pass %+v, %v: want 100 pages encoded", res, err)
	}
	if n := running.pager.Stats().GivenUp; n == 0 {
		t.Error("the sibling gave up nothing")
	}
	for f := range units.Frame(frames) {
		if *running.read(f) != *half(uint64(f)) {
			t.Fatalf("frame %d of the sibling has another content", f)
		}
	}
	for f := range units.Frame(100) {
		if *idle.read(f) != *half(1000 + uint64(f)) {
			t.Fatalf("frame %d has another content", f)
		}
	}
	running.unharmed()
	idle.unharmed()
}
