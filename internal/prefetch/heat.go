package prefetch

import (
	"slices"

	"github.com/agentzip/agentzip/internal/units"
)

// blockPages is how many neighbouring pages share a cell. Pages that are used together lie
// together: of the pages of a call's hot set 3 in 64 are touched, of the zero pages that a
// call writes 20 in 64.
const (
	blockPages = 1 << blockShift
	blockShift = 6
)

// maxHeat is the highest heat of a page.
const maxHeat = 7

// rise is by how much a touch heats a page; a call that is known not to have touched it
// cools it by one. With 3 a page of every third call stays warm; with 2 pages that the
// guest uses in turns go cold between, with 4 they never do.
const rise = 3

// fallHeld is by how much more a page cools that was expected, left out and not touched: for
// each such page there are HoldOut like it of which nothing was seen.
const fallHeld = 3

// riseWritten is rise for being written: a page that is written every other time it is touched
// counts as one that is written.
const riseWritten = 2

// unranked is the rank of a block of which no order is known.
const unranked = 1<<16 - 1

// A cell is the heat of the pages of one block: three bit planes, so that 64 pages are
// heated and cooled at once, and a page costs 5 bits.
type cell struct {
	block uint32
	rank  uint16    // when in the call the block was first touched, when that was last seen
	level [3]uint64 // heat 0..7 of each page
	wrote [2]uint64 // 0..3 for each page: how surely it is written when it is touched
}

// cellBytes is what a cell occupies.
const cellBytes = 48

// heat returns the heat of one page. A nil cell is cold.
func (c *cell) heat(page uint) int {
	if c == nil {
		return 0
	}
	return int(c.level[0]>>page&1 | c.level[1]>>page&1<<1 | c.level[2]>>page&1<<2)
}

// warm returns the pages that have any heat.
func (c *cell) warm() uint64 {
	if c == nil {
		return 0
	}
	return c.level[0] | c.level[1] | c.level[2]
}

// written returns the pages that are written when they are touched: sometimes, and surely.
func (c *cell) written() (sometimes, surely uint64) {
	if c == nil {
		return 0, 0
	}
	return c.wrote[0] | c.wrote[1], c.wrote[0] & c.wrote[1]
}

// up adds one to the numbers of the pages of the mask, one number a page, one bit plane for each
// binary digit. The highest number stays.
func up(planes []uint64, mask uint64) {
	full := mask
	for _, p := range planes {
		full &= p
	}
	mask &^= full
	for i := range planes {
		planes[i], mask = planes[i]^mask, planes[i]&mask
	}
}

// down takes one from the numbers of the pages of the mask. 0 stays.
func down(planes []uint64, mask uint64) {
	some := uint64(0)
	for _, p := range planes {
		some |= p
	}
	mask &= some
	for i := range planes {
		planes[i], mask = planes[i]^mask, ^planes[i]&mask
	}
}

// A heatmap is the pages of one guest, or of one kind of call, that were touched before.
// It holds at most so many cells; when it is full the coldest go.
type heatmap struct {
	cells []cell // ascending by block
	limit int    // most cells
	calls uint8  // that it has learned from, saturating
}

// learn takes over what one call was seen doing.
func (h *heatmap) learn(o *outcome) {
	if h.calls < 255 {
		h.calls++
	}
	idle := uint64(0) // pages that are known untouched in blocks without an entry
	if o.found {
		idle = ^idle
	}
	fresh, at := 0, 0
	for i := range o.blocks {
		b := &o.blocks[i]
		touched := b.touched()
		for at < len(h.cells) && h.cells[at].block < b.block {
			down(h.cells[at].level[:], idle)
			at++
		}
		if at == len(h.cells) || h.cells[at].block != b.block {
			if touched != 0 {
				fresh++
			}
			continue
		}
		h.cells[at].learn(b, o.found)
		at++
	}
	for ; at < len(h.cells); at++ {
		down(h.cells[at].level[:], idle)
	}
	h.cells = slices.DeleteFunc(h.cells, func(c cell) bool { return c.warm() == 0 })
	if fresh > 0 {
		h.add(o, fresh)
	}
}

func (c *cell) learn(b *blockOutcome, found bool) {
	touched, known := b.touched(), b.known(found)
	for range rise {
		up(c.level[:], touched)
	}
	down(c.level[:], known&^touched|b.unused(found))
	for range fallHeld {
		down(c.level[:], b.held&known&^touched)
	}
	for range riseWritten {
		up(c.wrote[:], b.wrote())
	}
	down(c.wrote[:], b.notWritten(found))
	if b.rank != unranked {
		c.rank = b.rank
	}
}

// add makes the cells of blocks that were touched for the first time.
func (h *heatmap) add(o *outcome, fresh int) {
	merged := make([]cell, 0, len(h.cells)+fresh)
	at := 0
	for i := range o.blocks {
		b := &o.blocks[i]
		if b.touched() == 0 {
			continue
		}
		for at < len(h.cells) && h.cells[at].block < b.block {
			merged = append(merged, h.cells[at])
			at++
		}
		if at < len(h.cells) && h.cells[at].block == b.block {
			continue
		}
		c := cell{block: b.block, rank: unranked}
		c.learn(b, o.found)
		merged = append(merged, c)
	}
	h.cells = append(merged, h.cells[at:]...)
	h.shrink()
}

// shrink drops the coldest cells above the limit.
func (h *heatmap) shrink() {
	for level := 1; len(h.cells) > h.limit && level <= maxHeat; level++ {
		h.cells = slices.DeleteFunc(h.cells, func(c cell) bool { return c.hottest() <= level })
	}
	if len(h.cells) > h.limit {
		h.cells = h.cells[:h.limit]
	}
}

// hottest returns the highest heat in the block.
func (c *cell) hottest() int {
	hot := 0
	mask := ^uint64(0)
	for i := len(c.level) - 1; i >= 0; i-- {
		if c.level[i]&mask != 0 {
			hot |= 1 << i
			mask &= c.level[i]
		}
	}
	return hot
}

// footprint returns what the cells occupy.
func (h *heatmap) footprint() units.Bytes { return units.Bytes(cap(h.cells) * cellBytes) }
