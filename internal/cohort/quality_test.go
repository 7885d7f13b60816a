package cohort

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

func TestEqualPagesCostNothing(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	a, b := &holder{t: t, c: c, w: w}, &holder{t: t, c: c, w: NewWorker()}
	defer b.w.Close()
	b.w.reader(c)
	for n := range uint64(50) {
		a.store(1, structs(n), Hint{})
	}
	before := c.Stats()
	for n := range uint64(50) {
		if st := b.store(units.Frame(n), structs(n), Hint{}); st.Way != WayShared || st.Size != 0 {
			t.Fatalf("a sibling's page is kept as %+v", st)
		}
	}
	for f := range units.Frame(frames) {
		if p := templatePage(f); p != nil {
			if st := b.store(f+1, p, Hint{}); st.Way != WayPublic || st.Size != 0 {
				t.Fatalf("page %d of the template, at another frame, is kept as %+v", f, st)
			}
		}
	}
	for n := range int64(blocks) {
		if st := b.store(1, rootBlock(n), Hint{}); st.Way != WayPublic || st.Size != 0 {
			t.Fatalf("block %d of the root image is kept as %+v", n, st)
		}
	}
	if after := c.Stats(); after.Pool.Live != before.Pool.Live || after.Pool.Entries != before.Pool.Entries || after.Footprint != before.Footprint {
		t.Errorf("the cohort grew from %+v to %+v by pages that were there", before, after)
	}
}

func TestNearCopiesOfASiblingsPageAreSmall(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	h := &holder{t: t, c: c, w: w}
	const tries, changed = 100, 512 / 20
	for name, tt := range map[string]struct {
		page func(n uint64) *units.Page
		near func(p *units.Page, n uint64) *units.Page
		most int // bytes, on average
	}{
		"5 % of the words, anywhere":  {structs, func(p *units.Page, n uint64) *units.Page { return near(p, n, changed, false) }, 400},
		"5 % of the words, in a part": {structs, func(p *units.Page, n uint64) *units.Page { return near(p, n, changed, true) }, 300},
		"one word of a text":          {text, func(p *units.Page, n uint64) *units.Page { return near(p, n, 1, true) }, 120},
		"moved by 256 bytes":          {structs, func(p *units.Page, n uint64) *units.Page { return shifted(p, 256) }, 200},
	} {
		t.Run(name, func(t *testing.T) {
			sum, against := 0, 0
			for n := range uint64(tries) {
				p := tt.page(uint64(len(name))<<20 | n)
				if st := h.store(1, p, Hint{}); st.Size < 2*tt.most {
					t.Fatalf("the page itself has %d bytes: the test proves nothing", st.Size)
				}
				st := h.store(2, tt.near(p, n), Hint{})
				sum += st.Size
				against += similarBaseOf(t, c, st.Ref)
			}
			t.Logf("%d B on average, %d of %d against the sibling's", sum/tries, against, tries)
			if sum/tries > tt.most {
				t.Errorf("%d B on average, want at most %d", sum/tries, tt.most)
			}
		})
	}
}

// families stores nFamilies pages, then members of each, and returns what part of those
// that brute force would keep against a relation was.
func families(t *testing.T, c *Cohort, w *Worker, nFamilies, members, words int, release bool) (recall float64) {
	t.Helper()
	h := &holder{t: t, c: c, w: w}
	r := rand.New(rand.NewPCG(uint64(nFamilies), uint64(words)))
	found, all := 0, 0
	for n := range nFamilies {
		h.store(1, structs(uint64(n)<<8), Hint{})
	}
	for m := range members {
		for n := range nFamilies {
			p := near(structs(uint64(n)<<8), uint64(n*members+m), 1+r.IntN(words), false)
			st := h.store(1, p, Hint{})
			if release && st.Ref != 0 { // as a page that is dirtied again at once
				h.release(len(h.pages) - 1)
			}
			all++
			if st.Size < 1100 { // alone it has 1,800 B
				found++
			}
		}
	}
	for len(h.pages) > 0 {
		h.release(len(h.pages) - 1)
	}
	return float64(found) / float64(all)
}

func TestMostSimilarPagesAreFound(t *testing.T) {
	m := newTemplate(t)
	for _, tt := range []struct {
		name     string
		n, words int
		release  bool
		least    float64
	}{
		{"4 % of the words changed", 200, 20, false, 0.95},
		{"10 % of the words changed", 200, 50, false, 0.90},
		{"copies that go at once", 200, 20, true, 0.95},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, w := m.open(t, Options{})
			recall := families(t, c, w, tt.n, 4, tt.words, tt.release)
			t.Logf("recall %.1f %%", recall*100)
			if recall < tt.least {
				t.Errorf("%.1f %% of the similar pages are kept against a relation, want %.0f %%", recall*100, tt.least*100)
			}
		})
	}
}

func TestGrowthLosesFewSimilarPages(t *testing.T) {
	m := newTemplate(t)
	const n = 1600 / slow
	grown, w := m.open(t, Options{})
	grown.similar.room = firstRoom / slow
	small := grown.similar.size()
	is := families(t, grown, w, n, 3, 20, false)
	large, w := m.open(t, Options{})
	table := make([]atomic.Uint32, 64*firstSlots) // without the need to grow
	large.similar.table.Store(&table)
	large.similar.room = 1 << 40
	could := families(t, large, w, n, 3, 20, false)
	t.Logf("recall %.1f %%, without growth %.1f %%; index of %v", is*100, could*100, grown.similar.size())
	if grown.similar.size() < 8*small {
		t.Errorf("the index grew from %v to %v: the test proves nothing", small, grown.similar.size())
	}
	if is < 0.95*could {
		t.Errorf("recall %.1f %% in an index that grew, %.1f %% in one that need not", is*100, could*100)
	}
}

// The newest page of a family is often gone: the guest has written to it again. It must not
// hide the others.
func TestACandidateThatIsGoneDoesNotHideTheOthers(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{Without: Ways(WayDelta, WayBase)}) // so that each is a base
	h := &holder{t: t, c: c, w: w}
	found := 0
	const tries = 50
	for n := range uint64(tries) {
		family := structs(n)
		h.store(1, family, Hint{})
		h.store(1, near(family, n, 3, true), Hint{})
		h.release(len(h.pages) - 1)
		c.without = 0
		found += similarBaseOf(t, c, h.store(1, near(family, n+1000, 3, true), Hint{}).Ref)
		c.without = Ways(WayDelta, WayBase)
	}
	if found < tries*9/10 {
		t.Errorf("%d of %d pages found the relation that is there", found, tries)
	}
}

// Hot pages take cheap encoders, within reason.
func TestPagesOfTheHotSetAreQuickerToDecodeAndNotMuchLarger(t *testing.T) {
	m := newTemplate(t)
	micros, size := [2]float64{}, [2]int{}
	for i, soon := range []bool{false, true} {
		c, w := m.open(t, Options{})
		h := &holder{t: t, c: c, w: w}
		for n := range uint64(60) {
			for class := range classes {
				st := h.store(units.Frame(n), cached(class, units.Frame(n), n), Hint{Soon: soon})
				if st.Ref == 0 || st.Way == WayPublic || st.Way == WayShared {
					continue
				}
				size[i] += st.Size
				micros[i] += decodeTime[st.Way]
				if similarBaseOf(t, c, st.Ref) != 0 {
					micros[i] += baseEntry
				}
			}
		}
	}
	t.Logf("decode %.0f us, soon %.0f us; %d B, soon %d B", micros[0], micros[1], size[0], size[1])
	if micros[1] >= micros[0] {
		t.Errorf("hot pages take %.0f us to decode, others %.0f", micros[1], micros[0])
	}
	if size[1] > size[0]*3/2 {
		t.Errorf("hot pages take %d B, others %d", size[1], size[0])
	}
}

func TestAFullPoolUsesTheRoomThatReleasedPagesLeft(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{Limit: units.MiB, Without: Ways(WaySimilar)})
	var refs []Ref
	fill := func(seed uint64) int {
		for n := range 20_000 {
			st, err := c.Store(w, 1, text(seed<<32|uint64(n)), Hint{}) //nolint:gosec // G115: small
			if errors.Is(err, ErrFull) {
				return n
			}
			if err != nil {
				t.Fatal(err)
			}
			if st.Ref != 0 {
				refs = append(refs, st.Ref)
			}
		}
		t.Fatal("the pool was never full")
		return 0
	}
	first := fill(7)
	kept := refs[:0]
	for i, r := range refs {
		if i%2 == 1 {
			kept = append(kept, r)
		} else if err := c.Release(r); err != nil {
			t.Fatal(err)
		}
	}
	refs = kept
	// Each time that the pool is full a little room is made, as for each pass.
	again := 0
	for pass := range uint64(8) {
		again += fill(8 + pass)
	}
	if again < first*2/5 {
		t.Errorf("%d pages filled the pool; after half of them were released it took only %d more", first, again)
	}
	for _, r := range refs {
		if err := c.Release(r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAPageThatMustBeKeptIsKeptAndShared(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	h := &holder{t: t, c: c, w: w}
	random := words(1, 99)
	if st := h.store(1, random, Hint{}); st.Ref != 0 {
		t.Fatalf("a random page is kept as %v in %d bytes", st.Way, st.Size)
	}
	for _, fast := range []bool{false, true} {
		if st := h.store(1, words(1, 99+uint64(len(h.pages))), Hint{Must: true, Fast: fast}); st.Way != WayRaw || st.Size != codec.MaxData {
			t.Errorf("fast %v: a page that must be kept is kept as %v in %d bytes", fast, st.Way, st.Size)
		}
	}
	if st := h.store(2, random, Hint{Must: true}); st.Way != WayShared {
		t.Errorf("the same page again is kept as %v", st.Way)
	}
	if st := h.store(1, structs(5), Hint{Fast: true, Must: true}); st.Way == WayZstd {
		t.Error("in a hurry a block is tried")
	}
	for i := range h.pages {
		h.load(i)
	}
	h.releaseAll()
	empty(t, c)
}
