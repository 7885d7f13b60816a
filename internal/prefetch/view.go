package prefetch

import (
	"math/bits"

	"github.com/agentzip/agentzip/internal/units"
)

// A view is what is known before a call: of this sandbox's calls, of this kind of call in the
// cohort, and of the k-th call there.
type view struct {
	own, kind, number []cell
	known             bool // the kind of call was seen before
	without           Sources
	cal               calibration
}

// A place is a block in the three heatmaps; nil where it is not in one.
type place struct {
	block             uint32
	own, kind, number *cell
}

// each visits the blocks that any heatmap has, in ascending order.
func (v *view) each(visit func(at place)) {
	maps := [...][]cell{v.own, v.kind, v.number}
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
		visit(place{block: block, own: at[0], kind: at[1], number: at[2]})
	}
}

// warm returns the pages of the block that any heatmap has.
func (a *place) warm() uint64 { return a.own.warm() | a.kind.warm() | a.number.warm() }

// wrote returns the pages of the block that are written when they are touched: as the
// sandbox did last, or else its siblings.
func (a *place) wrote() uint64 {
	own, kind := a.own.warm(), a.kind.warm()
	w := own & a.own.written()
	w |= kind &^ own & a.kind.written()
	return w | a.number.written()&^own&^kind
}

// rank returns the block's place in the order of use: of this kind of call, or else of the
// sandbox's calls, or else of the k-th call.
func (a *place) rank() uint16 {
	for _, c := range [...]*cell{a.kind, a.own, a.number} {
		if c != nil && c.rank != unranked {
			return c.rank
		}
	}
	return unranked
}

// levels returns the indices of a page into the calibration.
func (v *view) levels(a *place, page uint) (own, kind, number int) {
	own, kind, number = a.own.heat(page), a.kind.heat(page), a.number.heat(page)
	if v.without.Has(SourceRecent) {
		own = noHeat
	}
	if !v.known || v.without.Has(SourceHotSet) {
		kind = noHeat
	}
	return own, kind, number
}

// chance returns how likely it is that the call touches the page.
func (v *view) chance(a *place, page uint, c class) float32 {
	own, kind, number := v.levels(a, page)
	p := v.cal.joint[c][own][kind].p()
	if number > 0 {
		p = max(p, v.cal.number[c][number].p())
	}
	return p
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
