package pager

import (
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/invariant"
	"github.com/agentzip/agentzip/internal/units"
)

// A mark says that a page was brought before the guest asked for it and has shown no sign of
// use since. The second bit says who brought it: a fault in its neighbourhood, not a Restore.

// markLeaf returns the words of the marks of a frame's leaf, and the frame's bit in each.
func (a arena) markLeaf(n uint32, f units.Frame) (ahead, around *atomic.Uint32, bit uint32) {
	i := uint32(f) % (cellWords / 2 * 32)
	leaf := a.cell(n)
	return &leaf[i/32], &leaf[cellWords/2+i/32], 1 << (i % 32)
}

// mark notes that a frame was brought ahead. Caller holds Pager.mu.
func (t *table) mark(f units.Frame, around bool) {
	if invariant.Enabled {
		invariant.Check(int(f) < t.frames, "a frame of the guest is marked")
	}
	a, _ := t.region(f)
	first, second, bit := a.markLeaf(a.grow(markTree, f), f)
	first.Store(first.Load() | bit)
	if around {
		second.Store(second.Load() | bit)
		return
	}
	second.Store(second.Load() &^ bit)
}

// unmark removes the mark of a frame and says whether, and which, there was. Caller holds
// Pager.mu.
func (t *table) unmark(f units.Frame) (marked, around bool) {
	a, _ := t.region(f)
	n, _ := a.find(markTree, f)
	if n == 0 {
		return false, false
	}
	first, second, bit := a.markLeaf(n, f)
	marked, around = first.Load()&bit != 0, second.Load()&bit != 0
	if !marked {
		return false, false
	}
	first.Store(first.Load() &^ bit)
	second.Store(second.Load() &^ bit)
	if a.empty(n) {
		t.prune(markTree, f, storeSlack)
	}
	return marked, around
}

// tidy gives back all memory but what a few new cells need. Caller holds Pager.mu.
func (t *table) tidy() {
	for f := 0; f < t.frames; f += 1 << frameShift {
		a, at := t.region(units.Frame(f))
		t.trim(a, at, tidySlack)
	}
}
