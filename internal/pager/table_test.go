package pager

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

const testFrames = 1 << 17 // 512 MiB, as the demo's guests

func openTable(t testing.TB, frames int) *table {
	t.Helper()
	tab, err := newTable(frames)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tab.close(); err != nil {
			t.Error(err)
		}
	})
	return tab
}

func occupied(t testing.TB, tab *table) units.Bytes {
	t.Helper()
	n, err := tab.resident()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// checkTable looks at the structure: each cell in use has one owner, leads to something or
// holds something, and the memory behind the last one is zeros and given back. wantWords
// and wantMarks are how many leaves there must be.
func checkTable(tab *table, wantWords, wantMarks int) error {
	words, marks := 0, 0
	for at := 0; at < len(tab.arena); at += regionWords {
		a := tab.arena[at:min(at+regionWords, len(tab.arena))]
		var seen []uint32
		var walk func(tr tree, n uint32, level int) error
		walk = func(tr tree, n uint32, level int) error {
			if n >= firstCell {
				seen = append(seen, n)
				if a.empty(n) {
					return fmt.Errorf("cell %d at level %d is empty", n, level)
				}
				if got := a.leads(n); got != (level < tr.levels) {
					return fmt.Errorf("cell %d at level %d leads to others: %v", n, level, got)
				}
			}
			if level == tr.levels {
				if tr == wordTree {
					words++
				} else {
					marks++
				}
				return nil
			}
			for i := range uint32(slots) {
				below := a.half(n*cellWords, i)
				if below == 0 {
					continue
				}
				if a.owner(below) != n {
					return fmt.Errorf("cell %d below %d has the owner %d", below, n, a.owner(below))
				}
				if err := walk(tr, below, level+1); err != nil {
					return err
				}
			}
			return nil
		}
		for _, tr := range []tree{wordTree, markTree} {
			for i := range uint32(rootCells) {
				if err := walk(tr, tr.root+i, 0); err != nil {
					return err
				}
			}
		}
		slices.Sort(seen)
		want := uint32(firstCell)
		for _, n := range seen {
			if n != want {
				return fmt.Errorf("cell %d is in use, want %d", n, want)
			}
			if want++; want%pageStride == pageCells {
				want += pageStride - pageCells
			}
		}
		if a.end() != want {
			return fmt.Errorf("cells end at %d, want %d", a.end(), want)
		}
		backed := a[backedAt].Load()
		for n := want; n < backed*pageStride; n++ {
			if n%pageStride < pageCells && !a.empty(n) {
				return fmt.Errorf("cell %d is not in use and not empty", n)
			}
		}
		if keep := (want + storeSlack + pageStride - 1) / pageStride; backed > keep {
			return fmt.Errorf("%d pages for cells up to %d", backed, want)
		}
	}
	if words != wantWords || marks != wantMarks {
		return fmt.Errorf("%d leaves of words and %d of marks, want %d and %d", words, marks, wantWords, wantMarks)
	}
	return nil
}

// A tableModel is a table beside what it must contain.
type tableModel struct {
	*table
	words map[units.Frame]entry
	marks map[units.Frame]bool // by a fault around
	frame *rapid.Generator[units.Frame]
	word  *rapid.Generator[entry]
}

func newTableModel(t *testing.T, rt *rapid.T) *tableModel {
	t.Helper()
	frames := rapid.SampledFrom([]int{1, 100, 5000, testFrames, 1<<frameShift + 77, 2 << frameShift}).Draw(rt, "frames")
	places := rapid.SliceOfN(rapid.IntRange(0, frames-1), 1, 6).Draw(rt, "places")
	return &tableModel{
		table: openTable(t, frames), words: map[units.Frame]entry{}, marks: map[units.Frame]bool{},
		frame: rapid.Custom(func(rt *rapid.T) units.Frame {
			near := rapid.SampledFrom(places).Draw(rt, "near") + rapid.SampledFrom([]int{0, 1, 2, 7, 8, 120, 128, 2048, 1 << 15}).Draw(rt, "by")
			return units.Frame(min(near, frames-1))
		}),
		word: rapid.Custom(func(rt *rapid.T) entry {
			tag := tag(rapid.IntRange(0, int(tagCount)-1).Draw(rt, "tag"))
			if tag == tagTemplate || tag == tagZero || tag == tagBusy {
				return makeEntry(tag, 0)
			}
			return makeEntry(tag, uint32(rapid.IntRange(1, refMask).Draw(rt, "low")))
		}),
	}
}

func (m *tableModel) put(f units.Frame, e entry) {
	m.store(f, e)
	if m.words[f] = e; e == entryTemplate {
		delete(m.words, f)
	}
}

func (m *tableModel) checkMark(rt *rapid.T, f units.Frame) {
	around, want := m.marks[f]
	if marked, by := m.unmark(f); marked != want || by != around {
		rt.Fatalf("frame %d is marked %v, %v, want %v, %v", f, marked, by, want, around)
	}
	delete(m.marks, f)
}

func (m *tableModel) checkMarks(rt *rapid.T) {
	for _, f := range slices.Sorted(maps.Keys(m.marks)) {
		m.checkMark(rt, f)
	}
	m.tidy()
}

func (m *tableModel) checkEach(rt *rapid.T, forget bool) {
	got := map[units.Frame]entry{}
	last := -1
	m.each(func(f units.Frame, e entry) bool {
		if int(f) <= last {
			rt.Fatalf("frame %d after %d", f, last)
		}
		got[f], last = e, int(f)
		if forget {
			m.store(f, entryTemplate)
		}
		return true
	})
	if d := cmp.Diff(m.words, got); d != "" {
		rt.Fatalf("words (-want +got):\n%s", d)
	}
	if forget {
		clear(m.words)
	}
}

func (m *tableModel) checkStructure(rt *rapid.T) {
	wordLeaves, markLeaves := map[units.Frame]bool{}, map[units.Frame]bool{}
	for f := range m.words {
		wordLeaves[f>>leafShift] = true
	}
	for f := range m.marks {
		markLeaves[f>>nodeShift] = true
	}
	if err := checkTable(m.table, len(wordLeaves), len(markLeaves)); err != nil {
		rt.Fatal(err)
	}
}

func TestTheTableIsAMapOfWords(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newTableModel(t, rt)
		rt.Repeat(map[string]func(*rapid.T){
			"store":    func(rt *rapid.T) { m.put(m.frame.Draw(rt, "frame"), m.word.Draw(rt, "word")) },
			"template": func(rt *rapid.T) { m.put(m.frame.Draw(rt, "frame"), entryTemplate) },
			"run": func(rt *rapid.T) {
				f, e := m.frame.Draw(rt, "frame"), m.word.Draw(rt, "word")
				for i := range rapid.IntRange(1, 300).Draw(rt, "pages") {
					if int(f)+i < m.frames {
						m.put(f+units.Frame(i), e)
					}
				}
			},
			"mark": func(rt *rapid.T) {
				f, around := m.frame.Draw(rt, "frame"), rapid.Bool().Draw(rt, "around")
				m.mark(f, around)
				m.marks[f] = around
			},
			"load": func(rt *rapid.T) {
				f := m.frame.Draw(rt, "frame")
				if got, want := m.load(f), m.words[f]; got != want { // no word: 0, Template
					rt.Fatalf("frame %d is %#x, want %#x", f, uint32(got), uint32(want))
				}
			},
			"unmark":     func(rt *rapid.T) { m.checkMark(rt, m.frame.Draw(rt, "frame")) },
			"unmark all": m.checkMarks,
			"each":       func(rt *rapid.T) { m.checkEach(rt, false) },
			"forget all": func(rt *rapid.T) { m.checkEach(rt, true) },
			"":           m.checkStructure,
		})
		m.checkEach(rt, true)
		m.checkMarks(rt)
		m.checkStructure(rt)
		regions := (m.frames + 1<<frameShift - 1) >> frameShift
		if got := occupied(t, m.table); got > units.Bytes(regions)*units.PageSize+goSide {
			rt.Fatalf("without words and marks it occupies %d bytes", got)
		}
	})
}

func TestATableOfAllFramesFitsIntoItsMemory(t *testing.T) {
	for _, frames := range []int{1, 127, 8*pageCells + 3, 1<<frameShift + 2049} {
		tab := openTable(t, frames)
		for f := range units.Frame(frames) {
			tab.mark(f, true)
			tab.store(f, evicted(cohort.Ref(f+1)))
		}
		if err := checkTable(tab, (frames+7)/8, (frames+127)/128); err != nil {
			t.Errorf("%d frames: %v", frames, err)
		}
		if got := unmarkAll(tab); got != frames {
			t.Errorf("%d of %d marks", got, frames)
		}
		perFrame := float64(occupied(t, tab)-goSide-2*units.PageSize) / float64(frames)
		if perFrame > 4.7 {
			t.Errorf("%d frames take %.2f bytes each", frames, perFrame)
		}
	}
}

// scatter returns frames with words as they lie in a clone at the end of a session: 4,631
// words (means of 16 siblings: table.go) in runs of 4.7 frames, which lie in 120 of the parts
// of 128 frames, and those in 22 of the parts of 1,024.
func scatter(rng *rand.Rand, frames int) []units.Frame {
	const parts, blocks, words = 22, 120, 4631
	var chosen []int
	for _, part := range rng.Perm(frames / 1024)[:parts] {
		for _, block := range rng.Perm(8)[:(blocks+parts-1)/parts] {
			chosen = append(chosen, part*8+block)
		}
	}
	rng.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	chosen = chosen[:blocks]
	set := map[units.Frame]bool{}
	for len(set) < words {
		// Some parts are full, others have a few words.
		block := chosen[int(float64(blocks)*rng.Float64()*rng.Float64())]
		at := rng.IntN(128)
		for i := range 1 + int(rng.ExpFloat64()*4.5) {
			if at+i < 128 && len(set) < words {
				set[units.Frame(block*128+at+i)] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// privatePages is how many private pages a clone with the words of scatter has: those
// equal to the template have no word.
const privatePages = 7675

func TestTheTableOfAScatteredCloneIsSmall(t *testing.T) {
	for seed := range uint64(4) {
		tab := openTable(t, testFrames)
		frames := scatter(rand.New(rand.NewPCG(seed, 1)), testFrames)
		leaves := map[units.Frame]bool{}
		for _, f := range frames {
			leaves[f/8] = true
			tab.mark(f, true)
			tab.store(f, entryBusy)
		}
		marked := occupied(t, tab)
		unmarkAll(tab)
		for i, f := range frames {
			tab.store(f, evicted(cohort.Ref(i+1)))
		}
		got := occupied(t, tab)
		share := float64(got) / float64(privatePages*units.PageSize)
		t.Logf("%d words in %d leaves: %d bytes, %.3f %% of the private pages; with marks %d", len(frames), len(leaves), got, 100*share, marked)
		if len(leaves) < 940 || len(leaves) > 1040 {
			t.Errorf("%d leaves: not as in a clone, 986", len(leaves))
		}
		if share > 0.0015 { // 47 KB; a tenth above what it takes
			t.Errorf("it occupies %d bytes, %.3f %% of the private pages", got, 100*share)
		}
		if marked > got+8*units.KiB { // marks of all of 120 parts: 4 KB and their way
			t.Errorf("with marks it occupies %d bytes, without %d", marked, got)
		}
	}
}

func TestAHistoryOfWordsLeavesNoTrace(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	tab := openTable(t, testFrames)
	fresh := occupied(t, tab)
	frames := scatter(rng, testFrames)
	for _, f := range frames {
		tab.store(f, evicted(1))
	}
	before := occupied(t, tab)
	for range 3 { // elsewhere, in any order
		other := scatter(rng, testFrames)
		rng.Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
		for _, f := range other {
			tab.store(f, entryBusy)
			tab.mark(f, false)
		}
		unmarkAll(tab)
		rng.Shuffle(len(other), func(i, j int) { other[i], other[j] = other[j], other[i] })
		for _, f := range other {
			tab.store(f, entryTemplate)
		}
	}
	for _, f := range frames {
		tab.store(f, evicted(2))
	}
	unmarkAll(tab)
	if got := occupied(t, tab); got > before+units.PageSize {
		t.Errorf("the same frames occupy %d bytes, %d before", got, before)
	}
	for _, f := range frames {
		tab.store(f, entryTemplate)
	}
	if got := occupied(t, tab); got > fresh+5*units.PageSize {
		t.Errorf("without words it occupies %d bytes before it is tidied, fresh %d", got, fresh)
	}
	unmarkAll(tab)
	if got := occupied(t, tab); got > fresh+units.PageSize {
		t.Errorf("without words it occupies %d bytes, fresh %d", got, fresh)
	}
	for range 3 { // a look at a hole must not make it resident
		for f := range units.Frame(testFrames) {
			tab.load(f)
		}
	}
	if got := occupied(t, tab); got > fresh+units.PageSize {
		t.Errorf("looked at it occupies %d bytes, fresh %d", got, fresh)
	}
}

func TestAFaultAllocatesNothingInTheTable(t *testing.T) {
	tab := openTable(t, testFrames)
	frames := scatter(rand.New(rand.NewPCG(3, 3)), testFrames)
	pass := func() {
		for _, f := range frames {
			tab.mark(f, true)
			tab.store(f, evicted(1))
			tab.load(f)
		}
		for _, f := range frames {
			tab.store(f, entryTemplate)
		}
		unmarkAll(tab)
	}
	pass()
	if n := testing.AllocsPerRun(3, pass); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestTheGoSideOfTheTableIsCounted(t *testing.T) {
	const tables = 500
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	held := make([]*table, tables)
	before := heap()
	for i := range held {
		var err error
		if held[i], err = newTable(testFrames); err != nil {
			t.Fatal(err)
		}
	}
	per := int64(heap()-before) / tables
	t.Logf("%d bytes a table, counted %d", per, goSide)
	if per > int64(goSide)+64 || per < int64(goSide)-128 {
		t.Errorf("a table takes %d bytes of the heap, counted %d", per, goSide)
	}
	for _, tab := range held {
		if err := tab.close(); err != nil {
			t.Fatal(err)
		}
	}
}

// unmarkAll removes all marks and tidies the table.
func unmarkAll(t *table) (n int) {
	for f := units.Frame(0); int(f) < t.frames; {
		a, _ := t.region(f)
		leaf, next := a.find(markTree, f)
		for ; leaf != 0 && f < next && int(f) < t.frames; f++ {
			if marked, _ := t.unmark(f); marked {
				n++
			}
		}
		f = next
	}
	t.tidy()
	return n
}
