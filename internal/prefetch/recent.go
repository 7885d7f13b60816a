package prefetch

import (
	"cmp"
	"slices"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// keepCalls is for how many calls after its last observed touch a page is still
// predicted. A page restored ahead cannot be seen being read, nor being written
// if it was installed writable, so forgetting it after one call would bring it
// back through a blocking fault every second call; four calls make that one in
// five. Doubled, pages of a test run are still restored for the greps that
// follow it.
const keepCalls = 4

// A Recent predicts that the pages of the last few calls are touched again, and
// written if they were: the shell, the interpreter and the kernel's own paths
// are the same in every call. (REAP, ASPLOS 2021, makes the same observation for
// function instances.)
type Recent struct {
	limit int // immutable; most pages predicted
	call  uint32
	seen  map[units.Frame]sighting
}

// A sighting is the last observed touch of a page.
type sighting struct {
	call  uint32
	write bool
}

// NewRecent returns a predictor that never predicts more than limit pages.
func NewRecent(limit int) *Recent {
	return &Recent{limit: limit, seen: make(map[units.Frame]sighting)}
}

// Observe notes the pages that one finished call was seen touching: those it
// waited for and those it wrote to.
func (r *Recent) Observe(touched []pager.Touch) {
	r.call++
	for _, t := range touched {
		r.seen[t.Frame] = sighting{call: r.call, write: t.Write}
	}
	for f, s := range r.seen {
		if r.call-s.call >= keepCalls {
			delete(r.seen, f)
		}
	}
}

// Predict appends to dst the pages to restore before the next call, in address
// order, so that neighbours are installed together. Above the limit the most
// recently touched win.
func (r *Recent) Predict(dst []pager.Touch) []pager.Touch {
	first := len(dst)
	for f, s := range r.seen {
		dst = append(dst, pager.Touch{Frame: f, Write: s.write})
	}
	got := dst[first:]
	if len(got) > r.limit {
		slices.SortFunc(got, func(a, b pager.Touch) int {
			return cmp.Or(cmp.Compare(r.seen[b.Frame].call, r.seen[a.Frame].call), cmp.Compare(a.Frame, b.Frame))
		})
		dst = dst[:first+r.limit]
		got = dst[first:]
	}
	slices.SortFunc(got, func(a, b pager.Touch) int { return cmp.Compare(a.Frame, b.Frame) })
	return dst
}
