package prefetch

import (
	"math/bits"

	"github.com/agentzip/agentzip/internal/units"
)

// A view is what is known before a call: of this sandbox's calls, of this kind of call in the
// cohort, and of the k-th call there.
type view struct {
	own, kind, any, number []cell
	known                  bool // the kind of call was seen before
	without                Sources
	cal                    calibration
}

// A place is a block in the three heatmaps; nil where it is not in one.
type place struct {
	block                  uint32
	own, kind, any, number *cell
}

// each visits the blocks that any heatmap has, in ascending order.
func (v *view) each(visit func(at place)) {
	maps := [...][]cell{v.own, v.kind, v.any, v.number}
	for {
		block := ^uint32(0)
		for _, m := range maps {
			if len(m) > 0 {
				block = min(block, m[0].block)
			}
		}
		if block == ^uint32(0) {
			return
		}
		var at [len(maps)]*cell
		for i := range maps {
			if len(maps[i]) > 0 && maps[i][0].block == block {
				at[i], maps[i] = &maps[i][0], maps[i][1:]
			}
		}
		visit(place{block: block, own: at[0], kind: at[1], any: at[2], number: at[3]})
	}
}

// warm returns the pages of the block that any heatmap has.
func (a *place) warm() uint64 { return a.own.warm() | a.kind.warm() | a.any.warm() | a.number.warm() }

// wrote returns the pages of the block that are written when they are touched, sometimes and
// surely: as the sandbox did, or else its siblings.
func (a *place) wrote() (sometimes, surely uint64) {
	rest := ^uint64(0)
	for _, c := range [...]*cell{a.own, a.kind, a.any, a.number} {
		some, sure := c.written()
		sometimes |= rest & c.warm() & some
		surely |= rest & c.warm() & sure
		rest &^= c.warm()
	}
	return sometimes, surely
}

// rank returns the block's place in the order of use: of this kind of call, or else of the
// sandbox's calls, or else of the cohort's.
func (a *place) rank() uint16 {
	for _, c := range [...]*cell{a.kind, a.own, a.any, a.number} {
		if c != nil && c.rank != unranked {
			return c.rank
		}
	}
	return unranked
}

// heats returns the indices of a page into the calibration.
func (v *view) heats(a *place, page uint) (own, kind, other, number int) {
	own, kind, other, number = a.own.heat(page), a.kind.heat(page), a.any.heat(page), a.number.heat(page)
	if v.without.Has(SourceRecent) {
		own = noHeat
	}
	if v.without.Has(SourceHotSet) {
		kind, other = noHeat, noHeat
	}
	return own, kind, other, number
}

// chance returns how likely it is that the call touches the page.
func (v *view) chance(a *place, page uint, c class) float32 {
	own, kind, other, number := v.heats(a, page)
	p := v.cal.any[c][own][other].p()
	if v.known {
		p = v.cal.kind[c][own][kind][band(other)].p()
	}
	if fresh(own, number) {
		p = max(p, v.cal.number[c][number][v.cohort(kind, other)].p())
	}
	return p
}

// fresh reports whether the k-th call of siblings is worth asking: where the sandbox has
// touched the page itself, that says more.
func fresh(own, number int) bool { return number > 0 && (own == 0 || own == noHeat) }

// cohort returns the band of what else the cohort says.
func (v *view) cohort(kind, other int) int {
	if v.known {
		return band(kind)
	}
	return band(other)
}

// note counts what became of a page of which it is known whether it was touched. With one that
// was left out on purpose, weight is how many were restored that it stands for.
func (v *view) note(s *score, a *place, page uint, c class, touched bool, weight uint32) {
	own, kind, other, number := v.heats(a, page)
	if v.known {
		s.kind[c][own][kind][band(other)].add(touched, 1) // all like it were treated alike
		s.any[c][own][other].add(touched, weight)
	} else {
		s.any[c][own][other].add(touched, 1)
	}
	if fresh(own, number) {
		s.number[c][number][v.cohort(kind, other)].add(touched, weight)
	}
}

// pages calls visit for each bit of a mask.
func pages(mask uint64, visit func(page uint)) {
	for ; mask != 0; mask &= mask - 1 {
		visit(uint(bits.TrailingZeros64(mask))) //nolint:gosec // G115: below 64
	}
}

// frame returns the frame of a page of a block.
func frame(block uint32, page uint) units.Frame {
	return units.Frame(block)<<blockShift + units.Frame(page)
}
