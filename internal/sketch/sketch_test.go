package sketch

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func wordPage(r *rand.Rand) *units.Page {
	p := new(units.Page)
	for i := 0; i < units.PageSize; i += 8 {
		binary.LittleEndian.PutUint64(p[i:], r.Uint64())
	}
	return p
}

// shared counts the features that two pages have in common.
func shared(a, b *units.Page) int {
	fa, okA := Of(a)
	fb, okB := Of(b)
	if !okA || !okB {
		return 0
	}
	n := 0
	for i := range fa {
		if fa[i] == fb[i] {
			n++
		}
	}
	return n
}

func TestPagesWithFewChangedWordsShareFeaturesAndOthersDoNot(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	const tries = 400
	found, strangers := 0, 0
	for range tries {
		p := wordPage(r)
		q := *p
		for range 20 { // of 512 words
			binary.LittleEndian.PutUint64(q[r.IntN(512)*8:], r.Uint64())
		}
		if shared(p, &q) > 0 {
			found++
		}
		if shared(p, wordPage(r)) > 0 {
			strangers++
		}
	}
	if found < tries*9/10 {
		t.Errorf("of %d pages with 4 %% other words %d share a feature, want 90 %%", tries, found)
	}
	if strangers > 2 {
		t.Errorf("of %d strangers %d share a feature", tries, strangers)
	}
}

func TestMovedWordsKeepTheFeatures(t *testing.T) {
	t.Parallel()
	p := wordPage(rand.New(rand.NewPCG(3, 4)))
	var q units.Page
	copy(q[:], p[512:])
	copy(q[units.PageSize-512:], p[:512])
	if n := shared(p, &q); n != N {
		t.Errorf("a rotated page shares %d features, want all %d", n, N)
	}
}

func TestPagesOfAlmostNothingHaveNoSketch(t *testing.T) {
	t.Parallel()
	var zero, one, same units.Page
	one[100] = 7
	for i := 0; i < units.PageSize; i += 8 {
		binary.LittleEndian.PutUint64(same[i:], 0xffff888012345678)
	}
	for name, p := range map[string]*units.Page{"zeros": &zero, "one byte": &one, "one word over and over": &same} {
		if f, ok := Of(p); ok {
			t.Errorf("%s: %v", name, f)
		}
	}
}

func BenchmarkOf(b *testing.B) {
	p := wordPage(rand.New(rand.NewPCG(5, 6)))
	for b.Loop() {
		if _, ok := Of(p); !ok {
			b.Fatal("no sketch")
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N), "ns/page")
}
