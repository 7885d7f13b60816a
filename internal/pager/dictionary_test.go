package pager

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
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
	r := newRig(t, frames, 1, func(o *Options) { o.Cohort = dictionary.New(dictionary.Options{Samples: 200}) })
	r.cohort.Close()
	r.cohort = r.pager.cohort
	r.serve()
	train := func(dialect uint64) codec.DictID {
		t.Helper()
		for try := 0; ; try++ {
			for f := range units.Frame(frames) {
				r.write(f, dialectPage(dialect, uint64(f)+uint64(try)*frames))
			}
			r.evict()
			if err := r.cohort.Train(context.Background()); err == nil {
				return r.cohort.Dictionary().ID()
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
	if enc := r.pool.View(r.pager.table.load(7).handle()); enc.Kind != codec.KindZstdDict || enc.Dict != first {
		t.Fatalf("frame 7 was encoded with %v, dictionary %d, want dictionary %d", enc.Kind, enc.Dict, first)
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
			second = r.cohort.Dictionary().ID()
		}
	}
	if second == first {
		t.Fatal("no second dictionary was trained")
	}
	if r.cohort.Lookup(first) == nil {
		t.Fatal("the first dictionary went while pages name it")
	}
	for f, p := range want {
		if *r.read(f) != *p {
			t.Fatalf("frame %d has another content", f)
		}
	}
	for f := range want {
		r.poke(f, 1) // Clean no longer: its entry goes
	}
	for f := units.Frame(200); f < frames; f++ {
		r.write(f, zeroPage())
	}
	if r.cohort.Lookup(first) != nil {
		t.Error("the first dictionary is still there although no page names it")
	}
	r.unharmed()
}
