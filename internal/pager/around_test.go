package pager

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agentzip/agentzip/internal/units"
)

// settled waits until the counts hold still: neighbours come after the guest runs on.
func (r *rig) settled() Counts {
	r.t.Helper()
	old := r.pager.Counts()
	for range 100 {
		time.Sleep(10 * time.Millisecond)
		now := r.pager.Counts()
		if now == old {
			return now
		}
		old = now
	}
	r.t.Fatal("the counts never hold still")
	return old
}

var countsOnly = cmpopts.IgnoreFields(Counts{}, "Stall", "Ways")

func TestEvictedNeighboursComeWithThePageThatTheGuestWaitsFor(t *testing.T) {
	r := newRig(t, 64, 1, protectRestored, func(o *Options) { o.EvictedAround = 4 }).serve()
	for f := units.Frame(8); f < 20; f++ {
		r.write(f, textPage(uint64(f)))
	}
	r.write(14, zeroPage())
	r.evict()
	before := r.settled()
	r.poke(13, 1) // window 12..15, of which 14 is no evicted page
	want := Counts{Evicted: 1, Neighbours: 2}
	if d := cmp.Diff(want, r.settled().Sub(before), countsOnly); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
	got := [5]tag{r.state(11), r.state(12), r.state(13), r.state(15), r.state(16)}
	if want := [5]tag{tagEvicted, tagClean, tagTemplate, tagClean, tagEvicted}; got != want {
		t.Errorf("states %v, want %v", got, want)
	}
	touched := r.pager.DrainTouched(nil)
	wantLog := []Touch{{13, true, KindEvicted}, {12, false, KindNeighbour}, {15, false, KindNeighbour}}
	if d := cmp.Diff(wantLog, touched[max(0, len(touched)-3):]); d != "" {
		t.Errorf("the log's end (-want +got):\n%s", d)
	}
	if *r.read(12) != *textPage(12) || *r.read(15) != *textPage(15) {
		t.Error("a neighbour has another content")
	}
	r.poke(15, 1) // a sign of use
	r.evict()     // 12 goes without one
	want = Counts{Evicted: 1, Protected: 1, Neighbours: 2, NeighboursUsed: 1, NeighboursWasted: 1}
	if d := cmp.Diff(want, r.settled().Sub(before), countsOnly); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
}

func TestCountsTellWhatBecameOfPagesThatWereBroughtAhead(t *testing.T) {
	r := newRig(t, 64, 1, protectRestored, leaveUnmapped, func(o *Options) { o.FaultAround, o.EvictedAround = 1, 1 }).serve()
	for f := units.Frame(5); f < 13; f++ {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	before := r.settled()
	r.restore(Touch{Frame: 5}, Touch{Frame: 6}, Touch{Frame: 7, Write: true}, Touch{Frame: 8, Write: true}, // evicted
		Touch{Frame: 20, Write: true}, Touch{Frame: 21, Write: true}, Touch{Frame: 22}, Touch{Frame: 25}) // a hole, pages, a hole
	for _, f := range []units.Frame{5, 7, 21} {
		r.poke(f, 99)
	}
	want := Counts{Protected: 1, Restored: 4, Private: 2, Shared: 2, Used: 1}
	if d := cmp.Diff(want, r.settled().Sub(before), countsOnly); d != "" {
		t.Errorf("after the call (-want +got):\n%s", d)
	}
	r.evict()
	want.Used, want.Wasted = 3, 3
	got := r.settled().Sub(before)
	if d := cmp.Diff(want, got, countsOnly); d != "" {
		t.Errorf("after the pass (-want +got):\n%s", d)
	}
	ways := uint64(0)
	for _, n := range got.Ways {
		ways += n
	}
	if ways != 4 || got.Faults() != 1 {
		t.Errorf("%d pages decoded by way, %d faults, want 4 and 1", ways, got.Faults())
	}
	r.evict()
	if now := r.settled().Sub(before); now.Wasted != 3 {
		t.Errorf("the next pass counts again: %+v", now)
	}
}
