// Package prefetch guesses which pages the coming tool call will touch.
//
// It is pure bookkeeping over frames: it restores nothing, and a wrong guess
// costs time, never a byte. One goroutine uses a predictor at a time.
package prefetch

import (
	"slices"

	"github.com/agentzip/agentzip/internal/units"
)

// keepCalls is for how many calls after its last observed touch a page is still
// predicted. A page restored ahead and only read cannot be seen being read (it
// is mapped), so forgetting it after one call would bring it back through a
// blocking fault every second call; four calls make that one in five. Doubled,
// pages of a test run are still restored for the greps that follow it.
const keepCalls = 4

// A Recent predicts that the pages of the last few calls are touched again: the
// shell, the interpreter and the kernel's own paths are the same in every call.
// (REAP, ASPLOS 2021, makes the same observation for function instances.)
type Recent struct {
	limit int // immutable; most frames predicted
	call  uint32
	seen  map[units.Frame]uint32 // frame -> call of its last observed touch
}

// NewRecent returns a predictor that never predicts more than limit frames.
func NewRecent(limit int) *Recent {
	return &Recent{limit: limit, seen: make(map[units.Frame]uint32)}
}

// Observe notes the frames that one finished call was seen touching: those it
// waited for and those it wrote to. Frames may repeat.
func (r *Recent) Observe(touched []units.Frame) {
	r.call++
	for _, f := range touched {
		r.seen[f] = r.call
	}
	for f, last := range r.seen {
		if r.call-last >= keepCalls {
			delete(r.seen, f)
		}
	}
}

// Predict appends to dst the frames to restore before the next call, in address
// order, so that neighbours are installed together. Above the limit the most
// recently touched win.
func (r *Recent) Predict(dst []units.Frame) []units.Frame {
	first := len(dst)
	for f := range r.seen {
		dst = append(dst, f)
	}
	got := dst[first:]
	if len(got) > r.limit {
		slices.SortFunc(got, func(a, b units.Frame) int {
			if d := int(r.seen[b]) - int(r.seen[a]); d != 0 {
				return d
			}
			return int(a) - int(b)
		})
		dst = dst[:first+r.limit]
		got = dst[first:]
	}
	slices.Sort(got)
	return dst
}
