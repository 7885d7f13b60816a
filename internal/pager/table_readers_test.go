package pager

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// A reader that was led to a cell before it moved must not believe what it finds there
// after: once for the cell that goes, once for the one that takes its place.
func TestMovesCountsBothUsesOfACell(t *testing.T) {
	tab := openTable(t, 4096)
	for f, want := range map[units.Frame]uint32{0: 2, 8: 1} { // the other leaf moves; the last goes
		tab.store(0, entryZero)
		tab.store(8, entryZero)
		before := tab.moves.Load()
		tab.store(f, entryTemplate)
		if got := tab.moves.Load() - before; got != want {
			t.Errorf("moves counted %d, want %d", got, want)
		}
		tab.store(0, entryTemplate)
		tab.store(8, entryTemplate)
	}
}

// TestALoadThatIsOvertakenBeginsAgain has stores between the steps of a load.
func TestALoadThatIsOvertakenBeginsAgain(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tab := openTable(t, 4096)
		model := map[units.Frame]entry{}
		frame := rapid.Custom(func(rt *rapid.T) units.Frame {
			return units.Frame(8 * rapid.SampledFrom([]int{0, 1, 2, 16, 17, 256, 257, 300}).Draw(rt, "leaf"))
		})
		stores := func() (changed map[units.Frame]bool) {
			changed = map[units.Frame]bool{}
			for range rapid.IntRange(0, 4).Draw(rt, "stores") {
				f := frame.Draw(rt, "frame")
				model[f] = entryTemplate
				if rapid.Bool().Draw(rt, "evict") {
					model[f] = evicted(cohort.Ref(rapid.Uint32Range(1, refMask).Draw(rt, "handle")))
				}
				tab.store(f, model[f])
				changed[f] = true
			}
			return changed
		}
		stores()
		for range 8 {
			f := frame.Draw(rt, "load")
			right := map[entry]bool{model[f]: true}
			began, n, ok := tab.moves.Load(), uint32(f)>>rootShift, true
			var got entry
			for level := 0; ok; level++ {
				if stores()[f] {
					right[model[f]] = true
				}
				if level == wordTree.levels {
					got, ok = tab.read(f, n, began)
					break
				}
				if n, ok = tab.step(f, level, n, began); n == 0 {
					break
				}
			}
			if ok && !right[got] {
				rt.Fatalf("frame %d is %#x, want one of %v", f, uint32(got), right)
			}
		}
	})
}

// TestALoadIsOfItsFrameAndNotOlderThanItBegan has readers without the lock while leaves
// come, move and go. Version v of a frame's word is Template if v is odd.
func TestALoadIsOfItsFrameAndNotOlderThanItBegan(t *testing.T) {
	const (
		frames  = 1 << 13
		stride  = 40 // a leaf, and often a cell above it, for each frame
		watched = frames / stride
		readers = 3
		stores  = 200_000
	)
	tab := openTable(t, frames)
	var begun, done [watched]atomic.Uint32
	word := func(i int, v uint32) entry {
		if v%2 == 1 || v == 0 {
			return entryTemplate
		}
		return evicted(cohort.Ref(uint32(i)<<20 | v))
	}
	var stop atomic.Bool
	var loads atomic.Uint64
	var wg sync.WaitGroup
	for r := range readers {
		rng := rand.New(rand.NewPCG(1, uint64(r)))
		wg.Go(func() {
			for !stop.Load() {
				i := rng.IntN(watched)
				from := done[i].Load()
				e := tab.load(units.Frame(i * stride))
				to := begun[i].Load()
				ok := false
				for v := from; v <= to && !ok; v++ {
					ok = e == word(i, v)
				}
				if !ok {
					t.Errorf("frame %d is %#x, want a version of %d..%d", i*stride, uint32(e), from, to)
					return
				}
				loads.Add(1)
			}
		})
	}
	rng := rand.New(rand.NewPCG(2, 2))
	for range stores {
		i := rng.IntN(watched)
		v := begun[i].Add(1)
		tab.store(units.Frame(i*stride), word(i, v))
		done[i].Store(v)
		if rng.IntN(8) == 0 {
			tab.mark(units.Frame(rng.IntN(frames)), true)
		}
		if rng.IntN(512) == 0 {
			unmarkAll(tab)
		}
	}
	for loads.Load() == 0 && !t.Failed() {
		runtime.Gosched()
	}
	stop.Store(true)
	wg.Wait()
}
