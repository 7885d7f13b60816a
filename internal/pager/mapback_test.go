package pager

import (
	"context"
	"encoding/binary"
	"testing"

	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

// After a pass, what it dropped as equal or zeros, and shared pages around, take no fault,
// whether they are read or written; and no page is private because of it.
func TestSharedPagesAreMappedBackAfterAPass(t *testing.T) {
	const frames = 4 * regionPages
	r := newRig(t, frames, 1).serve()
	want := map[units.Frame]*units.Page{}
	for f := range units.Frame(96) {
		want[f] = guestmemtest.Base(f)
		switch f % 3 {
		case 0:
			want[f] = zeroPage()
		case 1:
			want[f] = textPage(uint64(f)) // evicted: stays away
		}
		r.poke(f, 1)
		r.write(f, want[f])
	}
	r.evict()
	if u, err := r.pager.Usage(); err != nil || u.Resident != 0 {
		t.Errorf("usage %+v, %v: want nothing private", u, err)
	}
	s := r.pager.Stats()
	if s.MappedBack < 64 || s.MappedBack > regionPages-32 {
		t.Errorf("%d pages mapped back, want those dropped and those around in the region", s.MappedBack)
	}
	for f := range units.Frame(regionPages) {
		p := want[f]
		if f < 96 && f%3 == 1 {
			continue
		}
		if p == nil {
			p = guestmemtest.Base(f)
		}
		if *r.read(f) != *p {
			t.Errorf("frame %d has another content", f)
		}
		r.poke(f, uint64(f)+1)
		want[f] = new(units.Page)
		*want[f] = *p
		binary.NativeEndian.PutUint64(want[f][64:], uint64(f)+1)
	}
	if n := r.pager.Faults() - s.Faults; n != 0 {
		t.Errorf("%d faults on shared pages, want none", n)
	}
	r.pager.DrainTouched(nil)
	r.evict()
	private := r.pager.DrainTouched(nil)
	for _, got := range private {
		if got.Kind != KindPrivate || want[got.Frame] == nil {
			t.Errorf("%+v, want only pages that were written", got)
		}
	}
	if len(private) != regionPages-32 {
		t.Errorf("%d pages were found private, want the %d that were written without an event", len(private), regionPages-32)
	}
	for f, p := range want {
		if *r.read(f) != *p {
			t.Errorf("frame %d has another content after the next pass", f)
		}
	}
	r.unharmed()
}

func TestAPageThatIsExpectedToBeWrittenIsLeftToRestore(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(6, zeroPage())
	r.write(7, zeroPage())
	r.pager.Expect([]Touch{{Frame: 6, Write: true}, {Frame: 7}})
	r.evict()
	if got := r.restore(Touch{Frame: 6, Write: true}, Touch{Frame: 7, Write: true}); got.Private != 1 || got.Present != 1 {
		t.Errorf("restore %+v: want frame 6 installed and 7 there already", got)
	}
}

// A pass that was cancelled leaves regions for the next one.
func TestACancelledPassMapsNothingBack(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 1, hook(h)).serve()
	r.write(6, zeroPage())
	ctx, cancel := context.WithCancel(context.Background())
	h.beforeDrop = cancel
	if _, err := r.pager.Evict(ctx); err == nil {
		t.Error("the pass was not cancelled")
	}
	if s := r.pager.Stats(); s.MappedBack > 1 {
		t.Errorf("%d pages were mapped", s.MappedBack)
	}
	r.evict()
	if s := r.pager.Stats(); s.MappedBack < 32 {
		t.Errorf("%d pages were mapped by the next pass", s.MappedBack)
	}
}

// A region of which pages were dropped because the guest reported them free is mapped again.
func TestARegionWithReportedPagesIsMappedAgain(t *testing.T) {
	r := newRig(t, regionPages, 1).serve()
	for f := range units.Frame(128) {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	for f := range units.Frame(128) {
		r.poke(f, 1)
	}
	if a, err := r.vm.Channels[0].Discard(0, 128); err != nil || a.Bad != 0 {
		t.Fatalf("report: %v, errno %d", err, a.Bad)
	}
	r.evict()
	before := r.pager.Faults()
	for f := range units.Frame(128) {
		if *r.read(f) != *zeroPage() {
			t.Errorf("frame %d is not zeros", f)
		}
	}
	if n := r.pager.Faults() - before; n != 0 {
		t.Errorf("%d faults", n)
	}
}
