package pager

import (
	"errors"
	"math/bits"
	"os"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/invariant"
	"github.com/agentzip/agentzip/internal/pool"
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
	case tagCount:
	}
	return "unknown"
}

const (
	handleBits = 29
	handleMask = 1<<handleBits - 1
)

// An entry is the table's word of one page: tag and pool handle (Evicted, Clean) or the
// low bits of a checksum (Kept).
type entry uint32

func makeEntry(t tag, low uint32) entry { return entry(uint32(t)<<handleBits | low&handleMask) }
func evicted(h pool.Handle) entry       { return makeEntry(tagEvicted, uint32(h)) }
func clean(h pool.Handle) entry         { return makeEntry(tagClean, uint32(h)) }
func kept(sum uint32) entry             { return makeEntry(tagKept, sum) }
func (e entry) tag() tag                { return tag(e >> handleBits) }
func (e entry) handle() pool.Handle     { return pool.Handle(e & handleMask) }
func (e entry) hasHandle() bool         { return e.tag() == tagEvicted || e.tag() == tagClean }
func (e entry) keptSum(sum uint32) bool { return e == kept(sum) }
func (e entry) mayBeEncoded() bool {
	return e.tag() == tagTemplate || e.tag() == tagZero || e.tag() == tagKept
}

const (
	entryTemplate = entry(tagTemplate) << handleBits
	entryZero     = entry(tagZero) << handleBits
	entryBusy     = entry(tagBusy) << handleBits
)

// chunkFrames is how many frames share one page of the table's memory.
const chunkFrames = units.PageSize / 4

// A table is the page table of one sandbox: a memory file with a word for each frame,
// then a bit for each frame that was seen being touched, then one for each that was seen
// being written. Only the parts in use occupy
// memory; a look at a part that is not in use must not make it resident, hence the two
// chunk sets.
//
// Words are stored under Pager.mu and loaded from anywhere.
type table struct {
	file    *os.File         // immutable; what a restarted daemon will need
	mapping *hostmem.Mapping // immutable until close
	words   []byte           // immutable; part of mapping
	touched []byte           // part of mapping; guarded by Pager.mu
	written []byte           // part of mapping; guarded by Pager.mu; a subset of touched
	frames  int              // immutable

	used   []atomic.Uint64 // chunks whose words were ever stored; grows only
	marked []uint64        // chunks with touched bits; guarded by Pager.mu
}

func newTable(frames int) (*table, error) {
	chunks := (frames + chunkFrames - 1) / chunkFrames
	words := units.Bytes(chunks) * units.PageSize
	bitmap := (units.Bytes(frames/8+1) + units.PageSize - 1) &^ (units.PageSize - 1)
	file, err := hostmem.NewMemfd("agentzip-pages", words+2*bitmap)
	if err != nil {
		return nil, err
	}
	m, err := hostmem.MapShared(file, words+2*bitmap)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	sets := (chunks + 63) / 64
	return &table{
		file: file, mapping: m, frames: frames,
		words: m.Data[:words], touched: m.Data[words : words+bitmap], written: m.Data[words+bitmap:],
		used: make([]atomic.Uint64, sets), marked: make([]uint64, sets),
	}, nil
}

// load returns the word of a frame.
func (t *table) load(f units.Frame) entry {
	chunk := uint32(f) / chunkFrames
	if t.used[chunk/64].Load()&(1<<(chunk%64)) == 0 {
		return entryTemplate
	}
	return entry(t.word(f).Load())
}

// store sets the word of a frame. Caller holds Pager.mu.
func (t *table) store(f units.Frame, e entry) {
	if invariant.Enabled {
		invariant.Check(e.tag() < tagCount, "a word has a known tag")
		invariant.Check(e.hasHandle() == (e.hasHandle() && e.handle() != 0), "Evicted and Clean have a handle")
	}
	t.word(f).Store(uint32(e))
	chunk := uint32(f) / chunkFrames
	if set := &t.used[chunk/64]; set.Load()&(1<<(chunk%64)) == 0 {
		set.Or(1 << (chunk % 64))
	}
}

// each calls visit for every word that may not be Template, until it returns false.
func (t *table) each(visit func(f units.Frame, e entry) bool) {
	for i := range t.used {
		for set := t.used[i].Load(); set != 0; set &= set - 1 {
			first := (i*64 + bits.TrailingZeros64(set)) * chunkFrames
			for f := first; f < min(first+chunkFrames, t.frames); f++ {
				if e := entry(t.word(units.Frame(f)).Load()); e != entryTemplate && !visit(units.Frame(f), e) {
					return
				}
			}
		}
	}
}

// mark notes that a frame was seen being touched, or written. Caller holds Pager.mu.
func (t *table) mark(f units.Frame, write bool) {
	t.touched[f/8] |= 1 << (f % 8)
	if write {
		t.written[f/8] |= 1 << (f % 8)
	}
	chunk := uint32(f) / chunkFrames
	t.marked[chunk/64] |= 1 << (chunk % 64)
}

// drain appends the marked frames to dst in ascending order and unmarks them. Caller
// holds Pager.mu.
func (t *table) drain(dst []Touch) []Touch {
	for i, set := range t.marked {
		for ; set != 0; set &= set - 1 {
			first := (i*64 + bits.TrailingZeros64(set)) * chunkFrames / 8
			for at := first; at < min(first+chunkFrames/8, len(t.touched)); at++ {
				for b := t.touched[at]; b != 0; b &= b - 1 {
					bit := bits.TrailingZeros8(b)
					dst = append(dst, Touch{Frame: units.Frame(at*8 + bit), Write: t.written[at]&(1<<bit) != 0})
				}
				if t.touched[at] != 0 { // a look must not make an unused part resident
					t.touched[at], t.written[at] = 0, 0
				}
			}
		}
		t.marked[i] = 0
	}
	return dst
}

// resident returns what the table occupies: exact for its memory file, which nothing
// swaps on the hosts we run on.
func (t *table) resident() (units.Bytes, error) {
	n, err := hostmem.Allocated(t.file)
	return n + units.Bytes(16*len(t.used)), err
}

func (t *table) close() error { return errors.Join(t.mapping.Close(), t.file.Close()) }
