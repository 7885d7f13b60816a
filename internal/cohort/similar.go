package cohort

import (
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/sketch"
	"github.com/agentzip/agentzip/internal/units"
)

// similar finds entries by a feature of their page: for each feature a slot of its own, a few
// of which make a set, the newest first; a new one pushes the oldest out. It forgets, and four
// bits of tag let one stranger in sixteen through.
type similar struct {
	table atomic.Pointer[[]atomic.Uint32] // replaced when it grows, under Cohort.growing
	files atomic.Int64                    // pages filed since the start
	room  int64                           // pages for which the table is large enough; under Cohort.growing
}

// Sizes: 16-32 bytes a page that is there and filed: a third of the entries on captured gaps.
const (
	ways = 4

	// emptyPart: the table grows when 1/emptyPart of it is filled. After that half of its slots
	// are copies that belong into the other set, and push out what does belong: with full tables and
	// two ways it found 84 % of 12,000 pages with a relation, with four ways 86 %, half full 94 %.
	emptyPart = 2

	firstRoom = firstSlots / sketch.N / emptyPart
)

func (x *similar) init() {
	t := make([]atomic.Uint32, firstSlots)
	x.table.Store(&t)
	x.room = firstRoom
}

func (x *similar) size() units.Bytes { return units.Bytes(len(*x.table.Load())) * slotBytes }

// setAt returns the set of the i-th feature f in a table of slots. It is made of the high
// bits, so that a table twice as large has for each set two that follow each other.
func setAt(slots, i int, f uint32) int {
	h := (f ^ uint32(i)*0xd6e8feb9) * 0x9e3779b1
	return int(uint64(h) * uint64(slots/ways) >> 32)
}

// set returns its slots.
func set(t []atomic.Uint32, i int, f uint32) []atomic.Uint32 {
	at := setAt(len(t), i, f)
	return t[at*ways : (at+1)*ways]
}

// insert files h under each of its features.
func (x *similar) insert(f sketch.Features, h pool.Handle) {
	t := *x.table.Load()
	for i, v := range f {
		b := set(t, i, v)
		last := 0 // the slot that goes: that of h when it was another page's, or the oldest
		for last < ways-1 && slot(b[last].Load()).handle() != h {
			last++
		}
		for ; last > 0; last-- {
			b[last].Store(b[last-1].Load())
		}
		b[0].Store(uint32(makeSlot(h, v)))
	}
	x.files.Add(1)
}

// candidates are entries that may be similar, the best first; 0 ends them.
type candidates [sketch.N*ways + 1]pool.Handle

// find returns the candidates: those that two features name, then newer before older. Any of
// them may be gone or a stranger.
func (x *similar) find(f sketch.Features) (c candidates) {
	t := *x.table.Load()
	var feature [len(c)]int
	n := 0
	for j := range ways {
		for i, v := range f {
			s := slot(set(t, i, v)[j].Load())
			if !s.tagged(v) {
				continue
			}
			h, at := s.handle(), 0
			for at < n && c[at] != h {
				at++
			}
			switch {
			case at == n:
				c[n], feature[n] = h, i
				n++
			case feature[at] != i: // named again: to the front
				copy(c[1:at+1], c[:at])
				copy(feature[1:at+1], feature[:at])
				c[0], feature[0] = h, i
			}
		}
	}
	return c
}

// grow doubles the table when more pages are there that were filed than it has room for. Of
// those without a base, plain are there now and everPlain were put; what was filed is a part
// of them. The features of what is in the table are not known any more, so each slot goes to
// both sets that its own became.
func (x *similar) grow(plain, everPlain int64) {
	if files := x.files.Load(); files <= x.room || float64(files)*float64(plain) <= float64(x.room)*float64(everPlain) {
		return
	}
	old := *x.table.Load()
	t := make([]atomic.Uint32, 2*len(old))
	for i := range old {
		s, j := i/ways, i%ways
		v := old[i].Load()
		t[2*s*ways+j].Store(v)
		t[(2*s+1)*ways+j].Store(v)
	}
	x.table.Store(&t)
	x.room *= 2
}
