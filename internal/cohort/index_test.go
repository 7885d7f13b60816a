package cohort

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/sketch"
	"github.com/agentzip/agentzip/internal/units"
)

// A shelf is what an index points into: checksums by handle, as a pool has them.
type shelf struct {
	sums map[pool.Handle]uint32
	x    index
}

func newShelf() *shelf {
	s := &shelf{sums: map[pool.Handle]uint32{}}
	s.x.init()
	return s
}

func (s *shelf) sumOf(h pool.Handle) (uint32, bool) {
	sum, ok := s.sums[h]
	return sum, ok
}

func (s *shelf) add(h pool.Handle, sum uint32) {
	s.sums[h] = sum
	s.x.insert(sum, h, s.sumOf)
	s.x.grow(int64(len(s.sums)), s.sumOf)
}

// found returns which part of what is there the index finds, and how many other entries a
// lookup looks at.
func (s *shelf) found() (part, strangers float64) {
	n, other := 0, 0
	for h, sum := range s.sums {
		here := false
		for _, b := range buckets(*s.x.table.Load(), sum) {
			for i := range b {
				v := slot(b[i].Load())
				switch {
				case v.tagged(sum) && v.handle() == h:
					here = true
				case v.tagged(sum):
					other++
				}
			}
		}
		if here {
			n++
		}
	}
	all := float64(len(s.sums))
	return float64(n) / all, float64(other) / all
}

func TestTheIndexFindsNearlyAllAndLooksAtFewOthers(t *testing.T) {
	const entries = 60_000 / slow
	r, p := rand.New(rand.NewPCG(1, 1)), text(1)
	for name, sum := range map[string]func(i int) uint32{
		"any sums":         func(int) uint32 { return r.Uint32() },
		"sums in sequence": func(i int) uint32 { return uint32(i) },
		"pages that differ in a counter": func(i int) uint32 {
			binary.LittleEndian.PutUint64(p[2048:], uint64(i))
			return codec.Checksum(p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newShelf()
			for i := range entries {
				s.add(pool.Handle(i+1), sum(i))
			}
			part, strangers := s.found()
			t.Logf("%.2f %% found, %.2f strangers a lookup, %.1f B an entry", part*100, strangers, float64(s.x.size())/entries)
			if part < 0.99 {
				t.Errorf("%.2f %% of the entries are found, want 99 %%", part*100)
			}
			if strangers > 1 { // of 2 x 6 slots one in 16, if all are looked at
				t.Errorf("%.2f other entries are looked at for one, the tag should leave 0.75", strangers)
			}
			if perEntry := float64(s.x.size()) / entries; perEntry > 8.1 {
				t.Errorf("%.1f B an entry, want at most 8", perEntry)
			}
		})
	}
}

func TestTheIndexFindsNearlyAllOfACohortWhosePagesComeAndGo(t *testing.T) {
	s, r := newShelf(), rand.New(rand.NewPCG(2, 2))
	const n = 29_000 / slow // nearly as many as the table may hold
	for h := pool.Handle(1); h <= n; h++ {
		s.add(h, r.Uint32())
	}
	size := s.x.size()
	for range 10 * n { // a handle is given out anew, as pools do
		h := pool.Handle(1 + r.IntN(n))
		delete(s.sums, h)
		s.add(h, r.Uint32())
	}
	part, _ := s.found()
	t.Logf("%.1f %% found in a table that is %.0f %% full", part*100, 100*n*slotBytes/float64(size))
	if part < 0.94 {
		t.Errorf("%.1f %% of the entries are found after ten lives, want 94 %%", part*100)
	}
	if s.x.size() != size {
		t.Errorf("the index grew from %v to %v, the cohort did not", size, s.x.size())
	}
}

func TestDoublingKeepsEachSetInTheTwoThatFollow(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 3))
	for _, n := range []int{8, firstSlots, 1 << 21} {
		for range 20_000 {
			i, f := r.IntN(sketch.N), r.Uint32()
			if s, l := setAt(n, i, f), setAt(2*n, i, f); l/2 != s {
				t.Fatalf("feature %#x is in set %d of %d, and in %d of twice as many", f, s, n/ways, l)
			}
		}
	}
}

func TestTheSimilarityIndexFindsAfterItGrewWhatItFoundBefore(t *testing.T) {
	t.Parallel()
	var x similar
	x.init()
	r := rand.New(rand.NewPCG(4, 4))
	want := map[pool.Handle]sketch.Features{}
	add := func(h pool.Handle) {
		want[h] = sketch.Features{r.Uint32(), r.Uint32()}
		x.insert(want[h], h)
	}
	found := func() (n int) {
		for h, f := range want {
			for _, got := range x.find(f) {
				if got == h {
					n++
					break
				}
			}
		}
		return n
	}
	for h := pool.Handle(1); h <= firstRoom+1; h++ {
		add(h)
	}
	before, size := found(), x.size()
	x.grow(int64(len(want)), int64(len(want)))
	if x.size() != 2*size {
		t.Fatalf("size %v, want twice %v", x.size(), size)
	}
	if after := found(); after != before || before < len(want)*99/100 {
		t.Errorf("%d of %d were found before, %d after", before, len(want), after)
	}
}

func TestTheSimilarityIndexGrowsWithWhatIsThereNotWithWhatWas(t *testing.T) {
	t.Parallel()
	var x similar
	x.init()
	r := rand.New(rand.NewPCG(5, 5))
	const alive = 2000
	for i := range int64(200_000 / slow) {
		x.insert(sketch.Features{r.Uint32(), r.Uint32()}, pool.Handle(1+i%alive))
		x.grow(min(i+1, alive), i+1)
	}
	if most := units.Bytes(alive * sketch.N * slotBytes * 2 * emptyPart); x.size() > most {
		t.Errorf("%v for %d pages, want at most %v", x.size(), alive, most)
	}
	for i := range int64(3) { // and it does grow when they are there
		x.grow(alive<<(i+1), alive<<(i+1))
	}
	if least := units.Bytes(alive * 4 * sketch.N * slotBytes); x.size() < least {
		t.Errorf("%v for %d pages, want %v", x.size(), alive*8, least)
	}
}

func TestCandidatesThatTwoFeaturesNameComeFirstThenNewerOnes(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		files []sketch.Features // handles 1, 2, ...
		want  []pool.Handle
	}{
		"none":                 {nil, nil},
		"one":                  {[]sketch.Features{{1, 2}}, []pool.Handle{1}},
		"newer first":          {[]sketch.Features{{1, 9}, {1, 8}}, []pool.Handle{2, 1}},
		"two features win":     {[]sketch.Features{{1, 2}, {1, 8}}, []pool.Handle{1, 2}},
		"two of each":          {[]sketch.Features{{1, 2}, {1, 2}}, []pool.Handle{1, 2}}, // either is as good
		"one in each":          {[]sketch.Features{{1, 9}, {8, 2}}, []pool.Handle{1, 2}},
		"the oldest goes":      {[]sketch.Features{{1, 6}, {1, 7}, {1, 8}, {1, 9}, {1, 5}}, []pool.Handle{5, 4, 3, 2}},
		"four strangers":       {[]sketch.Features{{1, 7}, {1, 8}, {9, 2}, {7, 2}}, []pool.Handle{2, 4, 1, 3}},
		"two features, pushed": {[]sketch.Features{{1, 2}, {1, 8}, {9, 2}}, []pool.Handle{1, 2, 3}},
	} {
		var x similar
		x.init()
		for i, f := range tt.files {
			x.insert(f, pool.Handle(i+1))
		}
		got := x.find(sketch.Features{1, 2})
		for i, h := range append(tt.want, 0) {
			if got[i] != h {
				t.Errorf("%s: candidates %v, want %v", name, got, tt.want)
				break
			}
		}
	}
}

// A handle that is given out anew while it stands in the same set must be found by its
// new page.
func TestAHandleThatIsFiledAgainIsFoundByItsNewFeatures(t *testing.T) {
	t.Parallel()
	var x similar
	x.init()
	old := sketch.Features{0x10, 0x20}
	x.insert(old, 7)
	var next sketch.Features
	for i := range next { // another tag, the same set
		for f := old[i] + 1; ; f++ {
			if f&15 != old[i]&15 && setAt(firstSlots, i, f) == setAt(firstSlots, i, old[i]) {
				next[i] = f
				break
			}
		}
	}
	x.insert(next, 7)
	if got := x.find(next); got[0] != 7 {
		t.Errorf("candidates %v, want 7", got)
	}
}
