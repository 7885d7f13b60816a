package pager

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// A page that came back is written without a fault, and if it is not, goes without encoding.
func TestAPageThatCameBackTakesWritesWithoutAFaultAndKeepsItsEntryUntilThen(t *testing.T) {
	r := newRig(t, 64, 1, func(o *Options) { o.EvictedAround = 1 }).serve()
	r.write(6, textPage(6))
	r.write(7, textPage(7))
	r.evict()
	refs := [2]cohort.Ref{r.pager.table.load(6).ref(), r.pager.table.load(7).ref()}
	r.read(6)
	r.restore(Touch{Frame: 7})
	before := r.pager.Faults()
	r.poke(7, 99)
	if n := r.pager.Faults() - before; n != 0 {
		t.Errorf("%d faults", n)
	}
	r.pager.DrainTouched(nil)
	if err := failArmed(t, "cohort.put", func() { // reached only by encoding
		r.pager.Expect(nil)
		r.write(7, textPage(7)) // and back: nobody can tell
		if got := r.evict(); got.Clean != 2 || got.Dropped != 2 || got.Encoded != 0 {
			t.Errorf("pass %+v, want both dropped without encoding", got)
		}
	}); err != nil {
		t.Error(err)
	}
	if got := [2]cohort.Ref{r.pager.table.load(6).ref(), r.pager.table.load(7).ref()}; got != refs {
		t.Errorf("refs %v, want those of before, %v", got, refs)
	}
	r.read(6)
	r.restore(Touch{Frame: 7})
	r.poke(7, 99)
	r.pager.DrainTouched(nil)
	if got := r.evict(); got.Clean != 1 || got.Encoded != 1 {
		t.Errorf("pass %+v, want one dropped without encoding and one encoded", got)
	}
	if d := cmp.Diff([]Touch{{7, true, KindPrivate}}, r.pager.DrainTouched(nil)); d != "" {
		t.Errorf("the pass tells (-want +got):\n%s", d)
	}
	want := textPage(7)
	binary.NativeEndian.PutUint64(want[64:], 99)
	if *r.read(6) != *textPage(6) || *r.read(7) != *want {
		t.Error("a page has another content")
	}
	if u, err := r.pager.Usage(); err != nil || u.Kept != 2 {
		t.Errorf("usage %+v, %v, want 2 pages kept", u, err)
	}
}

// The entry of a page in memory is damaged: the guest does not need it.
func TestADamagedEntryOfAPageInMemoryHarmsNobody(t *testing.T) {
	r := newRig(t, 64, 1, func(o *Options) { o.EvictedAround = 1 }).serve()
	r.write(7, textPage(1))
	r.evict()
	r.read(7)
	r.flipBit(7)
	if got := r.evict(); got.Encoded != 1 || got.Dropped != 1 {
		t.Errorf("pass %+v, want the page encoded anew", got)
	}
	checkThroughEviction(t, r, units.Frame(7), textPage(1))
}
