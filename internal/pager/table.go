package pager

import (
	"errors"
	"os"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/invariant"
	"github.com/agentzip/agentzip/internal/units"
)

// A tag is a page's state. The values are stored in the table: never renumber.
type tag uint32

const (
	tagTemplate tag = iota // 0, so that a page of the table that was never touched says so
	tagZero
	tagBusy
	tagEvicted
	tagClean
	tagKept
	tagAhead
	tagLoose
	tagCount
)

func (t tag) String() string {
	switch t {
	case tagTemplate:
		return "template"
	case tagZero:
		return "zero"
	case tagBusy:
		return "busy"
	case tagEvicted:
		return "evicted"
	case tagClean:
		return "clean"
	case tagKept:
		return "kept"
	case tagAhead:
		return "ahead"
	case tagLoose:
		return "loose"
	case tagCount:
	}
	return "unknown"
}

const (
	refBits = cohort.RefBits
	refMask = 1<<refBits - 1
)

// An entry is the table's word of one page: tag and the cohort's Ref (Evicted, Clean, Loose) or the
// low bits of a checksum (Kept, Ahead).
type entry uint32

func makeEntry(t tag, low uint32) entry { return entry(uint32(t)<<refBits | low&refMask) }
func evicted(r cohort.Ref) entry        { return makeEntry(tagEvicted, uint32(r)) }
func clean(r cohort.Ref) entry          { return makeEntry(tagClean, uint32(r)) }
func kept(sum uint32) entry             { return makeEntry(tagKept, sum) }
func ahead(sum uint32) entry            { return makeEntry(tagAhead, sum) }
func loose(r cohort.Ref) entry          { return makeEntry(tagLoose, uint32(r)) }
func (e entry) tag() tag                { return tag(e >> refBits) }
func (e entry) ref() cohort.Ref         { return cohort.Ref(e & refMask) }
func (e entry) keptSum(sum uint32) bool { return e == kept(sum) }
func (e entry) hasRef() bool {
	return e.tag() == tagEvicted || e.tag() == tagClean || e.tag() == tagLoose
}

func (e entry) mayBeEncoded() bool {
	switch e.tag() {
	case tagTemplate, tagZero, tagKept, tagAhead, tagLoose:
		return true
	case tagBusy, tagEvicted, tagClean, tagCount:
	}
	return false
}

const (
	entryTemplate = entry(tagTemplate) << refBits
	entryZero     = entry(tagZero) << refBits
	entryBusy     = entry(tagBusy) << refBits
)

// The table's memory is an arena of cells of 32 bytes for each region of 1 GiB of guest
// memory, so that a cell's number has 16 bits. Small cells, because private pages lie
// scattered: the 7,675 private pages of a clone at the end of a session (mean of 16; 4,631
// have a word, the others are as in the template) lie in 22 parts of 1,024 frames, 204
// of 64, 338 of 32, 576 of 16 and 986 of 8. In leaves of so many frames the words take 89,
// 52, 43, 37 and 32 KB; leaves of 4 win nothing, for what leads to them. Leaves that hold
// their words by rank below a bitmap would come to 30 KB in all, where this comes to 41, but
// in many sizes.
const (
	cellWords  = 8 // of 32 bits: the words of 8 frames, or marks of 128 frames
	slotShift  = 4
	slots      = 1 << slotShift // numbers of cells in a cell that leads to others
	leafShift  = 3              // frames of a cell of words, as a power of two
	nodeShift  = 7              // frames of a cell of marks, and of what the lowest cell above words leads to
	midShift   = 11             // of what a slot of a root cell leads to
	rootShift  = 15             // frames of a root cell
	rootCells  = 8
	frameShift = 18 // frames of a region
)

// A page of an arena has 120 cells and, where the last 8 would be, the number of the
// owner of each of them: the cell that leads to it. So cell n begins at n*32, and the
// numbers n of which n%128 >= 120 name no cell.
const (
	pageWords  = units.PageSize / 4
	pageStride = pageWords / cellWords
	pageCells  = 120
	ownersAt   = pageCells * cellWords  // word of a page
	endAt      = ownersAt + pageCells/2 // word of page 0: number of the next new cell; 0 while there is none
	backedAt   = endAt + 1              // word of page 0: pages that may be resident
	firstCell  = 2 * rootCells          // the lowest number of a cell that comes and goes
)

// To give a page back and to have it again takes 7 and 10 us at best, and 45 us with a busy
// neighbour. So a store, which a fault may wait for, gives back four pages at a time. tidy,
// which comes once a pass, gives back all but what 32 new cells need: without them, a page
// might come and go with each leaf.
const (
	storeSlack = 4 * pageStride
	tidySlack  = 32
)

// A tree leads from a region's root cells to its leaves: cells without a child.
type tree struct {
	root   uint32 // its first root cell
	levels int    // cells on the way from the root to a leaf, the root's included
}

var (
	wordTree = tree{root: 0, levels: 3}
	markTree = tree{root: rootCells, levels: 2}
)

// shift returns how many frames a slot of a cell at a level stands for, as a power of two.
func shift(level int) int { return midShift - slotShift*level }

// leafFrames returns how many frames share a leaf.
func (tr tree) leafFrames() units.Frame { return 1 << shift(tr.levels-1) }

// An arena is the memory of one region. Cells 0..7 are the root of the words, 8..15 that
// of the marks. The others in use have neighbouring numbers, without a gap: the last one
// moves into the place of one that goes. A cell that is not in use is all zeros.
//
// Callers of its methods hold Pager.mu; load has step and read instead.
type arena []atomic.Uint32

// half and setHalf access the i-th 16 bits from word at on.
func (a arena) half(at, i uint32) uint32 { return a[at+i/2].Load() >> (i % 2 * 16) & 0xffff }

func (a arena) setHalf(at, i, v uint32) {
	word, by := &a[at+i/2], i%2*16
	word.Store(word.Load()&^(0xffff<<by) | v<<by)
}

// slot returns the number of the cell below cell n, which is at a level, on the way to f; 0: there is none.
func (a arena) slot(n uint32, f units.Frame, level int) uint32 {
	return a.half(n*cellWords, uint32(f)>>shift(level)%slots)
}

func (a arena) setSlot(n uint32, f units.Frame, level int, child uint32) {
	a.setHalf(n*cellWords, uint32(f)>>shift(level)%slots, child)
}

func (a arena) owner(n uint32) uint32 {
	return a.half(n/pageStride*pageWords+ownersAt, n%pageStride)
}

func (a arena) setOwner(n, owner uint32) {
	a.setHalf(n/pageStride*pageWords+ownersAt, n%pageStride, owner)
}

// cell returns the words of a cell.
func (a arena) cell(n uint32) []atomic.Uint32 { return a[n*cellWords : (n+1)*cellWords] }

func (a arena) empty(n uint32) bool {
	for i := range a.cell(n) {
		if a[n*cellWords+uint32(i)].Load() != 0 {
			return false
		}
	}
	return true
}

// end returns the number of the next new cell.
func (a arena) end() uint32 { return max(a[endAt].Load(), firstCell) }

// add takes a new cell into use, below owner.
func (a arena) add(owner uint32) uint32 {
	n := a.end()
	next := n + 1
	if next%pageStride == pageCells {
		next += pageStride - pageCells
	}
	a[endAt].Store(next)
	a[backedAt].Store(max(a[backedAt].Load(), n/pageStride+1))
	a.setOwner(n, owner)
	return n
}

// find returns the leaf of a frame; 0: there is none, and none for any frame before next.
func (a arena) find(tr tree, f units.Frame) (n uint32, next units.Frame) {
	n = tr.root + uint32(f)>>rootShift%rootCells
	for level := range tr.levels {
		if n = a.slot(n, f, level); n == 0 {
			return 0, (f>>shift(level) + 1) << shift(level)
		}
	}
	return n, (f/tr.leafFrames() + 1) * tr.leafFrames()
}

// grow returns the leaf of a frame, and makes it if there is none.
func (a arena) grow(tr tree, f units.Frame) uint32 {
	n := tr.root + uint32(f)>>rootShift%rootCells
	for level := range tr.levels {
		below := a.slot(n, f, level)
		if below == 0 {
			below = a.add(n)
			a.setSlot(n, f, level, below)
		}
		n = below
	}
	return n
}

// leads reports whether cell n leads to others.
func (a arena) leads(n uint32) bool {
	depth := 0
	for ; n >= firstCell; n = a.owner(n) {
		depth++
	}
	if n < rootCells {
		return depth < wordTree.levels
	}
	return depth < markTree.levels
}

// A table is the page table of one sandbox: for each frame a word, and a mark if it was
// brought ahead of its use. It is a memory file whose pages come with what is stored
// and go when the words are Template again and the marks removed: about 9 bytes a word, as
// pages lie in a clone. Beside that file there is nothing that a restarted daemon would need.
//
// All is done under Pager.mu, but for load, which may be called from anywhere: a pass asks
// whether a page is still Busy before it encodes it (evictBatch), all others hold the
// mutex. A stale answer would only cost an encoding in vain, or cancel one (publish looks
// again, under the mutex); that load never gives another frame's word, and so can be
// relied on by whoever comes next, is owed to moves. A cell is overwritten only after
//
//	nothing leads to it any more, then moves was incremented
//
// Who came to the cell before the first step and reads it after the second finds that
// moves has changed since it began, and begins again. It follows no number before it has
// looked at moves, because what it read as a number may be a word. All accesses are
// atomic, hence in one order.
type table struct {
	file    *os.File         // immutable; what a restarted daemon will need
	mapping *hostmem.Mapping // immutable until close
	arena   arena            // immutable; the mapping: the arenas of all regions
	frames  int              // immutable
	moves   atomic.Uint32    // incremented under Pager.mu before a cell is used for something else
}

// arenaWords returns the size of the arena of so many frames, if all have words and marks.
func arenaWords(frames int) int {
	up := func(n, d int) int { return (n + d - 1) / d }
	cells := firstCell + up(frames, 1<<leafShift) + 2*up(frames, 1<<nodeShift) + 2*up(frames, 1<<midShift)
	return up(cells, pageCells) * pageWords
}

// regionWords is arenaWords(1<<frameShift).
const regionWords = (firstCell + 1<<(frameShift-leafShift) + 2<<(frameShift-nodeShift) + 2<<(frameShift-midShift) + pageCells - 1) / pageCells * pageWords

// newTable returns the table of a guest with so many frames, all Template.
func newTable(frames int) (*table, error) {
	size := units.Bytes(frames>>frameShift*regionWords) * 4
	if rest := frames & (1<<frameShift - 1); rest > 0 {
		size += units.Bytes(arenaWords(rest)) * 4
	}
	file, err := hostmem.NewMemfd("agentzip-pages", size)
	if err != nil {
		return nil, err
	}
	m, err := hostmem.MapShared(file, size)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &table{file: file, mapping: m, arena: words(m.Data), frames: frames}, nil
}

// region returns the arena of a frame's region, and the offset of that arena in words.
func (t *table) region(f units.Frame) (a arena, at int) {
	at = int(f>>frameShift) * regionWords
	return t.arena[at:min(at+regionWords, len(t.arena))], at
}

// load returns the word of a frame. It may be called from anywhere.
func (t *table) load(f units.Frame) entry {
	if invariant.Enabled {
		invariant.Check(int(f) < t.frames, "a word is loaded of a frame of the guest")
	}
	for {
		began := t.moves.Load()
		if e, ok := t.walk(f, began); ok {
			return e
		}
	}
}

// walk is load, and fails if a cell was freed since began.
func (t *table) walk(f units.Frame, began uint32) (e entry, ok bool) {
	n := uint32(f) >> rootShift % rootCells
	for level := range wordTree.levels {
		if n, ok = t.step(f, level, n, began); !ok || n == 0 {
			return entryTemplate, ok
		}
	}
	return t.read(f, n, began)
}

// step returns the number of the cell below cell n.
func (t *table) step(f units.Frame, level int, n, began uint32) (below uint32, ok bool) {
	i := uint32(f) >> shift(level) % slots
	pair := t.arena[int(f>>frameShift)*regionWords+int(n*cellWords+i/2)].Load()
	return pair >> (i % 2 * 16) & 0xffff, t.moves.Load() == began
}

// read returns the word of a frame in its leaf n.
func (t *table) read(f units.Frame, n, began uint32) (e entry, ok bool) {
	e = entry(t.arena[int(f>>frameShift)*regionWords+int(n*cellWords+uint32(f)%cellWords)].Load())
	return e, t.moves.Load() == began
}

// store sets the word of a frame. Caller holds Pager.mu.
func (t *table) store(f units.Frame, e entry) {
	if invariant.Enabled {
		invariant.Check(int(f) < t.frames, "a word is stored for a frame of the guest")
		invariant.Check(e.tag() < tagCount, "a word has a known tag")
		invariant.Check(!e.hasRef() || e.ref() != 0, "Evicted, Clean and Loose have a ref")
	}
	a, _ := t.region(f)
	if e != entryTemplate {
		a[a.grow(wordTree, f)*cellWords+uint32(f)%cellWords].Store(uint32(e))
		return
	}
	n, _ := a.find(wordTree, f)
	if n == 0 {
		return
	}
	a[n*cellWords+uint32(f)%cellWords].Store(uint32(e))
	if a.empty(n) {
		t.prune(wordTree, f, storeSlack)
	}
}

// each calls visit for every word that is not Template, in ascending order, until it
// returns false. visit may store. Caller holds Pager.mu.
func (t *table) each(visit func(f units.Frame, e entry) bool) {
	for f := units.Frame(0); int(f) < t.frames; {
		a, _ := t.region(f)
		n, next := a.find(wordTree, f)
		for ; n != 0 && f < next && int(f) < t.frames; f++ {
			if e := t.load(f); e != entryTemplate && !visit(f, e) {
				return
			}
		}
		f = next
	}
}

// prune frees the empty leaf of a frame and what leads to nothing without it, and lets
// the arena keep memory for so many cells more than it has.
func (t *table) prune(tr tree, f units.Frame, slack uint32) {
	a, at := t.region(f)
	var path [4]uint32
	path[0] = tr.root + uint32(f)>>rootShift%rootCells
	for level := range tr.levels {
		path[level+1] = a.slot(path[level], f, level)
	}
	first := tr.levels
	for level := tr.levels - 1; level >= 0; level-- {
		a.setSlot(path[level], f, level, 0)
		first = level + 1
		if !a.empty(path[level]) {
			break
		}
	}
	gone := path[first : tr.levels+1]
	for range gone { // the highest first: then none of the others moves
		high := 0
		for i := range gone {
			if gone[i] > gone[high] {
				high = i
			}
		}
		t.free(a, gone[high])
		gone[high] = 0
	}
	t.trim(a, at, slack)
}

// free ends the use of a cell that is empty and that nothing leads to: the last one
// takes its place.
func (t *table) free(a arena, n uint32) {
	last := a.end() - 1
	if last%pageStride >= pageCells {
		last -= pageStride - pageCells
	}
	t.moves.Add(1)
	if last != n {
		t.move(a, last, n)
	}
	a[endAt].Store(last)
}

// move moves a cell to a number that is not in use.
func (t *table) move(a arena, from, to uint32) {
	source, target := a.cell(from), a.cell(to)
	for i := range source {
		target[i].Store(source[i].Load())
	}
	if a.leads(from) {
		for i := range uint32(slots) {
			if below := a.half(to*cellWords, i); below != 0 {
				a.setOwner(below, to)
			}
		}
	}
	owner := a.owner(from)
	a.setOwner(to, owner)
	for i := range uint32(slots) {
		if a.half(owner*cellWords, i) == from {
			a.setHalf(owner*cellWords, i, to)
			break
		}
	}
	t.moves.Add(1)
	for i := range source {
		source[i].Store(0)
	}
}

// trim gives back the pages of an arena that hold no cell, if there are more than are
// needed for so many new cells. at is the arena's offset in words.
func (t *table) trim(a arena, at int, slack uint32) {
	end, backed := a.end(), a[backedAt].Load()
	if (end+slack+pageStride-1)/pageStride >= backed {
		return
	}
	keep := (end + tidySlack + pageStride - 1) / pageStride
	// To the end: a load that lost a race may have made a page beyond resident.
	off := int64(keep) * units.PageSize
	if hostmem.PunchHole(t.file, int64(at)*4+off, int64(len(a))*4-off) == nil { // else counted, and tried again
		a[backedAt].Store(keep)
	}
}

// resident returns what the table occupies, exactly: its memory file, which nothing swaps
// on the hosts we run on, and its part of the Go heap.
func (t *table) resident() (units.Bytes, error) {
	n, err := hostmem.Allocated(t.file)
	return n + goSide, err
}

func (t *table) close() error { return errors.Join(t.mapping.Close(), t.file.Close()) }
