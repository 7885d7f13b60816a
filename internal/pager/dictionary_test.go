package pager

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/units"
)

// dialectPage is a page of distinct fragments that its siblings have too: nothing repeats
// within it, and a dictionary of its dialect knows all of it.
func dialectPage(dialect, seed uint64) *units.Page {
	const size = 128
	p := new(units.Page)
	r := rand.New(rand.NewPCG(seed, 7))
	for i, fragment := range r.Perm(256)[:units.PageSize/size] {
		copy(p[i*size:(i+1)*size], randomPage(dialect<<32 | uint64(fragment))[:size])
	}
	return p
}

func TestPagesKeepTheDictionaryThatEncodedThemUntilTheLastIsGone(t *testing.T) {
	const frames = 500
	r := newRig(t, frames, 1)
	// Without bases: the pages of a dialect are made of each other.
	r.useCohort(cohort.Options{
		Dictionary: dictionary.Options{Samples: 200, AtStake: func() units.Bytes { return units.GiB }},
		Without:    cohort.Ways(cohort.WaySimilar),
	})
	r.serve()
	train := func(dialect uint64) codec.DictID {
		t.Helper()
		for try := 0; ; try++ {
			for f := range units.Frame(frames) {
				r.write(f, dialectPage(dialect, uint64(f)+uint64(try)*frames))
			}
			r.evict()
			if err := r.cohort.Train(context.Background()); err == nil {
				return r.cohort.Stats().Dictionary.Current
			} else if t.Logf("training %d: %v", try, err); try == 5 {
				t.Fatalf("no dictionary: %v", err)
			}
		}
	}
	first := train(1)
	want := map[units.Frame]*units.Page{}
	for f := range units.Frame(200) {
		want[f] = dialectPage(1, uint64(f)+99)
		r.write(f, want[f])
	}
	r.evict()
	w := cohort.NewLoader()
	defer w.Close()
	if way, _, err := r.cohort.Way(w, r.pager.table.load(7).ref()); way != cohort.WayDict || err != nil {
		t.Fatalf("frame 7 is kept as %v (%v), want with dictionary %d", way, err, first)
	}
	for f := units.Frame(200); f < frames; f++ {
		r.write(f, zeroPage()) // the second training needs other pages than the first
	}
	r.evict()
	second := first
	for try := uint64(0); second == first && try < 12; try++ {
		for f := units.Frame(200); f < frames; f++ {
			r.write(f, dialectPage(2, uint64(f)+try*frames))
		}
		r.evict()
		if err := r.cohort.Train(context.Background()); err == nil {
			second = r.cohort.Stats().Dictionary.Current
		}
	}
	if second == first {
		t.Fatal("no second dictionary was trained")
	}
	if !slices.Contains(r.cohort.Stats().Dictionary.IDs, first) {
		t.Fatal("the first dictionary went while pages name it")
	}
	for f, p := range want {
		if *r.read(f) != *p {
			t.Fatalf("frame %d has another content", f)
		}
	}
	for f := range want {
		r.poke(f, 1)
	}
	for f := units.Frame(200); f < frames; f++ {
		r.write(f, zeroPage())
	}
	r.pager.GiveUp(context.Background()) // their entries go
	if slices.Contains(r.cohort.Stats().Dictionary.IDs, first) {
		t.Error("the first dictionary is still there although no page names it")
	}
	r.unharmed()
}
