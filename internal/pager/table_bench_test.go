package pager

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// BenchmarkTable has the table of a clone at the end of a session (scatter).
func BenchmarkTable(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	frames := scatter(rng, testFrames)
	rng.Shuffle(len(frames), func(i, j int) { frames[i], frames[j] = frames[j], frames[i] })
	filled := func(b *testing.B) *table {
		b.Helper()
		tab := openTable(b, testFrames)
		for _, f := range frames {
			tab.store(f, evicted(1))
		}
		return tab
	}
	perFrame := func(b *testing.B, visit func(tab *table, f units.Frame)) {
		b.Helper()
		tab := filled(b)
		i := 0
		for b.Loop() {
			visit(tab, frames[i])
			if i++; i == len(frames) {
				i = 0
			}
		}
	}
	var sum entry
	b.Run("load", func(b *testing.B) {
		perFrame(b, func(tab *table, f units.Frame) { sum ^= tab.load(f) })
	})
	b.Run("load of template", func(b *testing.B) {
		perFrame(b, func(tab *table, f units.Frame) { sum ^= tab.load(f ^ 1<<16) })
	})
	b.Run("store", func(b *testing.B) {
		perFrame(b, func(tab *table, f units.Frame) { tab.store(f, clean(1)) })
	})
	b.Run("mark", func(b *testing.B) {
		perFrame(b, func(tab *table, f units.Frame) { tab.mark(f, true) })
	})
	b.Run("come and go", func(b *testing.B) { // leaves too
		tab := openTable(b, testFrames)
		n := 0
		for b.Loop() {
			for _, f := range frames {
				tab.store(f, evicted(1))
			}
			for _, f := range frames {
				tab.store(f, entryTemplate)
			}
			n += 2 * len(frames)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/store")
	})
	b.Run("each", func(b *testing.B) {
		tab := filled(b)
		for b.Loop() {
			tab.each(func(_ units.Frame, e entry) bool { sum ^= e; return true })
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(frames)), "ns/word")
	})
	for _, n := range []int{0, 100, len(frames)} {
		b.Run(fmt.Sprintf("mark and unmark %d", n), func(b *testing.B) {
			tab := filled(b)
			for b.Loop() {
				for _, f := range frames[:n] {
					tab.mark(f, true)
				}
				unmarkAll(tab)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(max(n, 1)), "ns/mark+unmark")
		})
	}
}
