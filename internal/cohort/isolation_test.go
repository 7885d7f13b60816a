package cohort

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// private are pages that two sandboxes of different tenants may both have, and nothing public.
func private(n uint64) []*units.Page {
	var pages []*units.Page
	for i := range n {
		pages = append(pages, cached(1, 0, i), cached(7, 0, i), cached(11, 0, i), cached(12, 0, i), cached(0, 0, i))
	}
	return pages
}

func storeAll(t *testing.T, h *holder, pages []*units.Page) (stored []Stored) {
	t.Helper()
	for i, p := range pages {
		stored = append(stored, h.store(units.Frame(i%frames), p, Hint{}))
	}
	return stored
}

// What a cohort does with its pages must not depend on what another one has: else the sizes
// and times of one would tell of the pages of the other.
func TestACohortSeesNothingOfAnother(t *testing.T) {
	m := newTemplate(t)
	alone, w := m.open(t, Options{})
	want := storeAll(t, &holder{t: t, c: alone, w: w}, private(40))

	first, _ := m.open(t, Options{})
	second, _ := m.open(t, Options{})
	// One worker for both, as a host has it.
	one, two := &holder{t: t, c: first, w: w}, &holder{t: t, c: second, w: w}
	got := [2][]Stored{}
	for i, p := range private(40) {
		got[0] = append(got[0], one.store(units.Frame(i%frames), p, Hint{}))
		got[1] = append(got[1], two.store(units.Frame(i%frames), p, Hint{}))
	}
	for i := range want {
		for c := range got {
			if got[c][i] != want[i] {
				t.Fatalf("page %d is kept as %+v beside another cohort, alone as %+v", i, got[c][i], want[i])
			}
		}
	}
	a, b := first.Stats(), second.Stats()
	if a.Pool.Live != b.Pool.Live || a.Pool.Entries != b.Pool.Entries || a.Pool.Live != alone.Stats().Pool.Live {
		t.Errorf("the same pages are %v and %v, alone %v", a.Pool.Live, b.Pool.Live, alone.Stats().Pool.Live)
	}
	for _, h := range []*holder{one, two} {
		for i := range h.pages {
			h.load(i)
		}
	}
}

// A ref that came to the wrong cohort is an error there, or names a page of that cohort.
func TestARefMeansNothingInAnotherCohort(t *testing.T) {
	m := newTemplate(t)
	mine, w := m.open(t, Options{})
	other, _ := m.open(t, Options{})
	a, b := &holder{t: t, c: mine, w: w}, &holder{t: t, c: other, w: w}
	secret := map[units.Page]bool{}
	for n := range uint64(300) {
		if st := a.store(1, words(n, 77), Hint{}); st.Ref != 0 {
			t.Fatal("noise shrank")
		}
		p := near(text(n), n, 30, false)
		secret[*p] = true
		a.store(1, p, Hint{})
	}
	own := map[units.Page]bool{}
	for n := range uint64(50) {
		p := structs(9000 + n)
		own[*p] = true
		b.store(1, p, Hint{})
	}
	served := 0
	for _, p := range a.pages {
		var dst units.Page
		switch err := other.Load(w, &dst, p.ref); {
		case err == nil && (secret[dst] || !own[dst] && !p.ref.Public()):
			t.Fatalf("ref %#x of one cohort brought its page, or a stranger's, in another", p.ref)
		case err == nil:
			served++
		case !errors.Is(err, ErrDamaged):
			t.Fatalf("load of a foreign ref: %v", err)
		}
	}
	if served > 50 {
		t.Errorf("%d foreign refs named a page of a cohort of 50", served)
	}
	for i := range b.pages {
		b.load(i)
	}
}

func TestStrictPagesReferToNothingButTheTemplate(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{Isolation: Strict, Dictionary: trainable()})
	siblings := [2]*holder{{t: t, c: c, w: w}, {t: t, c: c, w: w}}
	r := rand.New(rand.NewPCG(1, 1))
	size := c.Stats().Index
	sizes := map[units.Page]Stored{}
	for n := range uint64(120) {
		for class := range classes {
			p, f := cached(class, 1, n), units.Frame(1)
			st := siblings[r.IntN(2)].store(f, p, Hint{})
			switch {
			case st.Way == WayShared || st.Way == WayDict:
				t.Fatalf("class %d is kept as %v", class, st.Way)
			case st.Ref != 0 && !st.Ref.Public() && similarBaseOf(t, c, st.Ref) != 0:
				t.Fatalf("class %d is kept against a page of the pool", class)
			}
			// Whatever was stored before, it is kept in the same way.
			st.Ref = 0
			if before, ok := sizes[*p]; ok && before != st {
				t.Fatalf("class %d is kept as %+v, was as %+v before", class, st, before)
			}
			sizes[*p] = st
		}
	}
	if err := c.Train(t.Context()); err == nil {
		t.Error("a dictionary was trained of the pages of strict siblings")
	}
	if got := c.Stats(); got.Index != size || got.Dictionaries != 0 {
		t.Errorf("indexes of %v (empty: %v) and dictionaries of %v that nobody may use", got.Index, size, got.Dictionaries)
	}
}

func TestWordsOfConfigurationFilesNameIsolations(t *testing.T) {
	t.Parallel()
	for _, i := range []Isolation{Shared, Strict} {
		if got, err := ParseIsolation(i.String()); got != i || err != nil {
			t.Errorf("%v: %v, %v", i, got, err)
		}
	}
	if _, err := ParseIsolation("both"); err == nil {
		t.Error("an unknown word was taken")
	}
}
