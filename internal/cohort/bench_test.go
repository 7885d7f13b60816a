package cohort

import (
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// A case is a way of keeping pages: what is there before, and pages that are kept so.
type benchCase struct {
	name string
	way  Way
	base bool // against a page of the pool
	o    Options
	make func(h *holder) (frame units.Frame, pages []*units.Page)
}

const benchPages = 64

func pagesOf(make func(n uint64) *units.Page) (pages []*units.Page) {
	for n := range uint64(benchPages) {
		pages = append(pages, make(n))
	}
	return pages
}

func benchCases() []benchCase {
	family := structs(5)
	none := func(make func(n uint64) *units.Page) func(*holder) (units.Frame, []*units.Page) {
		return func(*holder) (units.Frame, []*units.Page) { return 5, pagesOf(make) }
	}
	return []benchCase{
		{name: "public template", way: WayPublic, make: none(func(n uint64) *units.Page { return templatePage(units.Frame(n%16) * 6) })},
		{name: "public block", way: WayPublic, make: none(func(n uint64) *units.Page { return rootBlock(int64(n % blocks)) })},
		{name: "shared", way: WayShared, make: func(h *holder) (units.Frame, []*units.Page) {
			for _, p := range pagesOf(structs) {
				h.store(5, p, Hint{})
			}
			return 5, pagesOf(structs)
		}},
		{name: "rle", way: WayRLE, make: none(func(n uint64) *units.Page { return near(new(units.Page), n, 4, true) })},
		{name: "delta template", way: WayDelta, make: none2(1, func(n uint64) *units.Page { return near(templatePage(1), n, 4, true) })},
		{name: "zstd-base template", way: WayBase, make: none2(0, func(n uint64) *units.Page { return near(shifted(templatePage(0), 40), n, 4, true) })},
		{name: "delta similar", way: WayDelta, base: true, make: func(h *holder) (units.Frame, []*units.Page) {
			h.store(5, family, Hint{})
			return 5, pagesOf(func(n uint64) *units.Page { return near(family, n, 4, true) })
		}},
		{name: "zstd-base similar", way: WayBase, base: true, make: func(h *holder) (units.Frame, []*units.Page) {
			h.store(5, family, Hint{})
			return 5, pagesOf(func(n uint64) *units.Page { return near(shifted(family, 64), n, 4, true) })
		}},
		{name: "zstd", way: WayZstd, o: Options{Without: Ways(WaySimilar)}, make: none(text)},
		{name: "zstd-dict", way: WayDict, o: Options{Without: Ways(WaySimilar), Dictionary: trainable()}, make: func(h *holder) (units.Frame, []*units.Page) {
			trainOnTexts(h)
			return 5, pagesOf(text)
		}},
		{name: "noise", way: 0, make: none(func(n uint64) *units.Page { return words(n, 8) })},
	}
}

func none2(f units.Frame, make func(n uint64) *units.Page) func(*holder) (units.Frame, []*units.Page) {
	return func(*holder) (units.Frame, []*units.Page) { return f, pagesOf(make) }
}

// prepared returns a holder with the case's surroundings, and fails if its pages are kept in
// another way than it says.
func (bc *benchCase) prepared(tb testing.TB, m *template) (*holder, units.Frame, []*units.Page) {
	tb.Helper()
	c, w := m.open(tb, bc.o)
	h := &holder{t: tb, c: c, w: w}
	f, pages := bc.make(h)
	right := 0
	for _, p := range pages {
		st := h.store(f, p, Hint{})
		if st.Way == bc.way && (st.Ref == 0 || st.Ref.Public() || st.Way == WayShared || bc.base == (similarBaseOf(tb, c, st.Ref) == 1)) {
			right++
		}
		if st.Ref != 0 {
			h.release(len(h.pages) - 1)
		}
	}
	if right < len(pages)*9/10 {
		tb.Fatalf("%s: %d of %d pages are kept so", bc.name, right, len(pages))
	}
	return h, f, pages
}

func BenchmarkStore(b *testing.B) {
	m := newTemplate(b)
	for _, bc := range benchCases() {
		b.Run(bc.name, func(b *testing.B) {
			h, f, pages := bc.prepared(b, m)
			b.ReportAllocs()
			i, bytes := 0, 0
			for b.Loop() {
				st, err := h.c.Store(h.w, f, pages[i%len(pages)], Hint{})
				if err != nil {
					b.Fatal(err)
				}
				bytes += st.Size
				i++
				if st.Ref != 0 {
					if err := h.c.Release(st.Ref); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(bytes)/float64(i), "B/page")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(i), "ns/page")
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	m := newTemplate(b)
	for _, bc := range benchCases() {
		if bc.way == 0 || bc.way == WayShared {
			continue
		}
		b.Run(bc.name, func(b *testing.B) {
			h, f, pages := bc.prepared(b, m)
			from := len(h.pages)
			for _, p := range pages {
				h.store(f, p, Hint{})
			}
			kept := h.pages[from:]
			b.ReportAllocs()
			i := 0
			var dst units.Page
			for b.Loop() {
				if err := h.c.Load(h.w, &dst, kept[i%len(kept)].ref); err != nil {
					b.Fatal(err)
				}
				i++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(i), "ns/page")
		})
	}
}
