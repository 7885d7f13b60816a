package cohort

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/units"
)

// errInjected is what armed points return where no product error is meant.
var errInjected = errors.New("injected")

// pointsOf are the failure points that a random life runs into, with what callers must see.
var pointsOf = map[string]error{
	"cohort.put":      ErrFull,
	"cohort.mismatch": errInjected,
	"cohort.corrupt":  errInjected,
	"pool.grow":       ErrFull,
	"library.read":    errInjected,
}

// expected says which errors a life with armed points and a small pool may meet.
func expected(err error) bool {
	return errors.Is(err, ErrFull) || errors.Is(err, ErrVerify) || errors.Is(err, errInjected) || IsMissing(err)
}

func anyLife(t *rapid.T, m *template, o Options, faults bool) {
	c := m.cohort(t, o)
	var siblings []*holder
	for range rapid.IntRange(1, 3).Draw(t, "sandboxes") {
		h := &holder{t: t, c: c, w: NewWorker()}
		switch {
		case faults:
			h.report = expected
		case o.Limit != 0:
			h.report = func(err error) bool { return errors.Is(err, ErrFull) }
		}
		siblings = append(siblings, h)
	}
	sibling := func(t *rapid.T) *holder {
		h := siblings[rapid.IntRange(0, len(siblings)-1).Draw(t, "sandbox")]
		h.t = t
		return h
	}
	one := func(t *rapid.T) (*holder, int) {
		h := sibling(t)
		if len(h.pages) == 0 {
			t.Skip("nothing is held")
		}
		return h, rapid.IntRange(0, len(h.pages)-1).Draw(t, "page")
	}
	actions := map[string]func(*rapid.T){
		"store": func(t *rapid.T) {
			h := sibling(t)
			class, n := rapid.IntRange(0, classes-1).Draw(t, "class"), rapid.Uint64Range(0, 60).Draw(t, "n")
			hint := Hint{Soon: rapid.Bool().Draw(t, "soon"), Must: rapid.Bool().Draw(t, "must"), Fast: rapid.Bool().Draw(t, "fast")}
			for i := range uint64(rapid.IntRange(1, 12).Draw(t, "pages")) {
				f := units.Frame(n+i) % (frames + 3)
				st := h.store(f, cached(class, f, n+i), hint)
				checkStored(t, c, h.w, st)
				if o.Isolation == Strict && (st.Way == WayShared || st.Way == WayDict) {
					t.Fatalf("strict, and kept as %v", st.Way)
				}
			}
		},
		"load": func(t *rapid.T) { h, i := one(t); h.load(i) },
		"fork": func(t *rapid.T) {
			h, i := one(t)
			p, to := h.pages[i], sibling(t)
			if err := c.Ref(p.ref); err != nil {
				t.Fatal(err)
			}
			to.pages = append(to.pages, p)
		},
		"release": func(t *rapid.T) {
			for range rapid.IntRange(1, 8).Draw(t, "pages") {
				h, i := one(t)
				h.release(i)
			}
		},
		"end": func(t *rapid.T) { sibling(t).releaseAll() },
		"compact": func(t *rapid.T) {
			c.Compact(context.Background(), units.Bytes(rapid.SampledFrom([]int{0, 4096, 65536}).Draw(t, "budget")))
		},
		"train": func(t *rapid.T) {
			if err := c.Train(context.Background()); err != nil && !errors.Is(err, codec.ErrSamples) && !errors.Is(err, dictionary.ErrNoBetter) && o.Isolation != Strict {
				t.Fatal(err)
			}
		},
		"": func(t *rapid.T) {
			var refs []Ref
			for _, h := range siblings {
				for i := range h.pages {
					refs = append(refs, h.pages[i].ref)
				}
			}
			audit(t, c, refs)
		},
	}
	if faults {
		actions["arm"] = func(t *rapid.T) {
			name := rapid.SampledFrom(slices.Sorted(func(yield func(string) bool) {
				for n := range pointsOf {
					if !yield(n) {
						return
					}
				}
			})).Draw(t, "point")
			if err := fault.Arm(name, rapid.IntRange(0, 5).Draw(t, "after"), pointsOf[name]); err != nil {
				t.Fatal(err)
			}
			h := sibling(t)
			for n := range uint64(6) {
				h.store(1, cached(int(4+n%2), 1, n), Hint{}) // public pages: library.read
				h.store(1, cached(11, 1, n), Hint{})
			}
			for i := range h.pages {
				h.load(i)
			}
		}
	}
	t.Repeat(actions)
	for name := range pointsOf {
		fault.Disarm(name)
	}
	for _, h := range siblings {
		h.t, h.report = t, nil
		for i := range h.pages {
			h.load(i)
		}
		h.releaseAll()
		h.w.Close()
	}
	empty(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestEveryPageComesBackAndEveryReferenceIsCounted(t *testing.T) {
	m := newTemplate(t)
	for name, o := range map[string]Options{
		"shared":         {Dictionary: trainable()},
		"strict":         {Isolation: Strict},
		"no bases":       {Without: Ways(WaySimilar, WayDelta, WayBase), Dictionary: trainable()},
		"only bases":     {Without: Ways(WayPublic, WayShared, WayRLE, WayZstd, WayDict)},
		"nothing shared": {Without: Ways(WayPublic, WayShared), Dictionary: trainable()},
	} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { anyLife(t, m, o, false) })
		})
	}
}

func TestAFullPoolLosesNoReference(t *testing.T) {
	m := newTemplate(t)
	rapid.Check(t, func(t *rapid.T) {
		anyLife(t, m, Options{Limit: 160 * units.KiB, Dictionary: trainable()}, false)
	})
}

func TestNoFailureLosesAReferenceOrAPage(t *testing.T) {
	m := newTemplate(t)
	rapid.Check(t, func(t *rapid.T) {
		anyLife(t, m, Options{Limit: 300 * units.KiB, Dictionary: trainable()}, true)
	})
}

func TestEachFailureIsSaidAndKeepsNothing(t *testing.T) {
	m := newTemplate(t)
	for name, want := range map[string]error{
		"cohort.put": ErrFull, "cohort.mismatch": ErrVerify, "pool.grow": ErrFull, "cohort.corrupt": ErrDamaged, "library.read": ErrDamaged,
	} {
		t.Run(name, func(t *testing.T) {
			c, w := m.open(t, Options{})
			h := &holder{t: t, c: c, w: w}
			base := structs(1)
			h.store(1, base, Hint{})
			root := h.store(1, rootBlock(1), Hint{})
			before, hits := c.Stats().Pool, fault.Hits(name)
			if err := fault.Arm(name, 0, pointsOf[name]); err != nil {
				t.Fatal(err)
			}
			defer fault.Disarm(name)
			var err error
			if errors.Is(want, ErrDamaged) {
				var dst units.Page
				err = c.Load(w, &dst, root.Ref)
			} else {
				for n := uint64(0); err == nil && n < 2000; n++ { // until the pool has to grow
					st, failed := c.Store(w, 1, near(base, n, 40, false), Hint{})
					if err = failed; err == nil {
						defer c.Release(st.Ref) //nolint:errcheck // checked by what is left
						before = c.Stats().Pool
					} else if st != (Stored{}) {
						t.Errorf("stored as %+v beside %v", st, err)
					}
				}
			}
			if !errors.Is(err, want) || fault.Hits(name) != hits+1 {
				t.Errorf("%v, want %v", err, want)
			}
			if after := c.Stats().Pool; after.Entries != before.Entries || after.Live != before.Live {
				t.Errorf("%d entries of %v, %d of %v were there before", after.Entries, after.Live, before.Entries, before.Live)
			}
			for i := range h.pages {
				h.load(i)
			}
		})
	}
}

func TestAFullPoolGivesTheDictionaryBack(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{Dictionary: trainable(), Without: Ways(WaySimilar)})
	h := &holder{t: t, c: c, w: w}
	trainOnTexts(h)
	if st := h.store(5, text(1), Hint{}); st.Way != WayDict {
		t.Fatalf("stored as %+v, want with the dictionary", st)
	}
	if err := fault.Arm("pool.grow", 0, ErrFull); err != nil {
		t.Fatal(err)
	}
	defer fault.Disarm("pool.grow")
	refused := false
	for n := uint64(2); n < 300 && !refused; n++ {
		st, err := c.Store(w, 5, text(n), Hint{})
		if refused = errors.Is(err, ErrFull); err != nil && !refused {
			t.Fatal(err)
		} else if err == nil {
			h.pages = append(h.pages, held{st.Ref, text(n)})
		}
	}
	if !refused {
		t.Fatal("the pool never had to grow")
	}
	refs := []Ref{}
	for i := range h.pages {
		h.load(i)
		refs = append(refs, h.pages[i].ref)
	}
	audit(t, c, refs)
	h.releaseAll()
	empty(t, c)
}

// collision returns a page that is not p and has its checksum: a checksum is a remainder, so
// the divisor itself may be added anywhere.
func collision(p *units.Page, at int) *units.Page {
	const castagnoli = 1<<32 | 0x1EDC6F41 // the coefficients, x^32 first
	q := *p
	for i := range 33 {
		if castagnoli>>(32-i)&1 == 1 {
			q[at+i/8] ^= 1 << (i % 8)
		}
	}
	return &q
}

func TestPagesWithTheSameChecksumAreNotTheSame(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	h := &holder{t: t, c: c, w: w}
	for n, p := range []*units.Page{structs(1), text(1), words(1, 1), templatePage(1), rootBlock(1)} {
		q := collision(p, 100*n)
		if codec.Checksum(p) != codec.Checksum(q) || *p == *q {
			t.Fatal("that is no collision")
		}
		a, b := h.store(5, p, Hint{}), h.store(5, q, Hint{})
		if a.Ref != 0 && a.Ref == b.Ref || b.Way == WayShared || b.Way == WayPublic {
			t.Errorf("page %d is kept as %+v, another with its checksum as %+v", n, a, b)
		}
		if again := h.store(5, q, Hint{}); again.Ref != b.Ref {
			t.Errorf("page %d is kept as %+v, then as %+v: the collision hides it", n, b, again)
		}
	}
	for i := range h.pages {
		h.load(i)
	}
	h.releaseAll()
	empty(t, c)
}

// A slot of an index may lead to anything by now: it costs bytes, never content.
func TestIndexesFullOfLiesCostBytesAndNothingElse(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	h := &holder{t: t, c: c, w: w}
	f := &touchyMember{make(chan error, 1000)}
	c.Join(f)
	defer c.Leave(f)
	r := rand.New(rand.NewPCG(1, 1))
	for n := range uint64(40) {
		for class := range classes {
			for _, table := range []*atomic.Pointer[[]atomic.Uint32]{&c.equal.table, &c.similar.table} {
				slots := *table.Load()
				for range 200 { // handles of entries of all kinds, mostly, under any tag
					slots[r.IntN(len(slots))].Store(r.Uint32N(600 << tagBits))
				}
			}
			f := units.Frame(n)
			checkStored(t, c, w, h.store(f, cached(class, f, n%7), Hint{}))
		}
	}
	var refs []Ref
	for i := range h.pages {
		h.load(i)
		refs = append(refs, h.pages[i].ref)
	}
	audit(t, c, refs)
	h.releaseAll()
	empty(t, c)
	c.reports.Wait()
	if len(f.fail) != 0 {
		t.Errorf("a lie was taken for damage: %v", <-f.fail)
	}
}

// A touchyMember refers to everything.
type touchyMember struct{ fail chan error }

func (*touchyMember) Refers(func(Ref) bool) bool { return true }
func (m *touchyMember) Fail(err error)           { m.fail <- err }

// storm lets sandboxes live beside each other, Compact and Train.
func storm(t *testing.T, c *Cohort, sandboxes, steps int) {
	t.Helper()
	gifts := make(chan held, 64)
	stop := make(chan struct{})
	var beside, all sync.WaitGroup
	beside.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				c.Compact(context.Background(), 64*units.KiB)
				_ = c.Train(context.Background()) // too few samples, mostly
				c.Stats()
			}
		}
	})
	var mu sync.Mutex
	var left []*holder
	for s := range sandboxes {
		all.Go(func() {
			ft := &failer{T: t}
			h := &holder{t: ft, c: c, w: NewWorker(), report: func(err error) bool { return errors.Is(err, ErrFull) }}
			defer h.w.Close()
			r := rand.New(rand.NewPCG(uint64(s), 9))
			for i := 0; i < steps && !ft.failed; i++ {
				switch k := r.IntN(10); {
				case k < 5 || len(h.pages) == 0:
					f := units.Frame(r.IntN(frames + 2))
					h.store(f, cached(r.IntN(classes), f, r.Uint64N(100)), Hint{Soon: r.IntN(2) == 0})
				case k < 7:
					h.load(r.IntN(len(h.pages)))
				case k == 7:
					p := h.pages[r.IntN(len(h.pages))]
					if err := c.Ref(p.ref); err != nil {
						t.Error(err)
						return
					}
					select {
					case gifts <- p:
					default:
						h.pages = append(h.pages, p)
					}
					select {
					case g := <-gifts:
						h.pages = append(h.pages, g)
					default:
					}
				default:
					h.release(r.IntN(len(h.pages)))
					if len(h.pages) > 60 {
						for len(h.pages) > 20 {
							h.release(r.IntN(len(h.pages)))
						}
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			left = append(left, h)
		})
	}
	all.Wait()
	close(stop)
	beside.Wait()
	w := NewWorker()
	defer w.Close()
	close(gifts)
	for g := range gifts {
		left = append(left, &holder{pages: []held{g}, c: c})
	}
	var refs []Ref
	for _, h := range left {
		h.t, h.w = t, w
		for i := range h.pages {
			h.load(i)
			refs = append(refs, h.pages[i].ref)
		}
	}
	audit(t, c, refs)
	for _, h := range left {
		h.releaseAll()
	}
	empty(t, c)
}

// A failer is the test for a goroutine that is not the test's: Fatal ends the life, not the goroutine.
type failer struct {
	*testing.T
	failed bool
}

func (f *failer) Fatalf(format string, args ...any) { f.failed = true; f.Errorf(format, args...) }
func (f *failer) Fatal(args ...any)                 { f.failed = true; f.Error(args...) }

func TestSiblingsBesideEachOtherReadWhatTheyStored(t *testing.T) {
	m := newTemplate(t)
	for name, o := range map[string]Options{
		"shared": {Dictionary: trainable()},
		"full":   {Limit: 200 * units.KiB, Dictionary: trainable()},
		"strict": {Isolation: Strict},
	} {
		t.Run(name, func(t *testing.T) {
			c := m.cohort(t, o)
			storm(t, c, 4, 2000/slow)
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTheClassesOfPagesAreKeptInEveryWay(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{Dictionary: trainable()})
	h := &holder{t: t, c: c, w: w}
	ways := map[Way]int{}
	similar := 0
	fill := func(from uint64) {
		for n := from; n < from+80; n++ {
			for class := range classes {
				f := units.Frame(n+uint64(class)) % frames
				st := h.store(f, cached(class, f, n), Hint{})
				ways[st.Way]++
				if st.Ref != 0 && !st.Ref.Public() {
					similar += similarBaseOf(t, c, st.Ref)
				}
			}
		}
	}
	trainOnTexts(h)
	way, _, err := c.Way(w, h.pages[0].ref)
	if err != nil {
		t.Fatal(err)
	}
	ways[way]++
	fill(0)
	for _, way := range []Way{WayRLE, WayDelta, WayZstd, WayDict, WayBase, WayPublic, WayShared} {
		if ways[way] == 0 {
			t.Errorf("no page was kept as %v", way)
		}
	}
	if similar == 0 {
		t.Error("no page was kept against a page of the pool")
	}
	t.Log(fmt.Sprint(ways), "similar:", similar)
	h.releaseAll()
	empty(t, c)
}

// similarBaseOf is 1 if r is kept against another page of the pool.
func similarBaseOf(t testing.TB, c *Cohort, r Ref) int {
	t.Helper()
	reader := c.pool.NewReader()
	defer reader.Close()
	reader.Pin()
	defer reader.Unpin()
	enc, err := view(reader, r.handle())
	if err != nil {
		t.Fatal(err)
	}
	if enc.Kind.HasBase() && !Ref(enc.Operand).Public() {
		return 1
	}
	return 0
}
