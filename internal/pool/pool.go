// Package pool keeps encoded pages in memory that the garbage collector never
// scans: a memory file (memfd), mapped once, addressed by offset.
//
//	arena   = 64 KiB segments, up to 8 GiB; a segment belongs to one size class or to none
//	segment = 16 B head, then slots of the class's size
//	slot    = one entry: header of 10 B (14 with a dictionary), then the encoded bytes
//
// An entry is in one state, and its reference count says which:
//
//	absent (0) --Put--> stored (1) --Ref--> stored (n) --Release, n times--> absent
//
// A segment is in one state, its class says which:
//
//	free (class none, no page in memory) --Put needs one--> of class c --last entry released--> punched, free
//
// Everything that restores a page lies in the arena and refers to it by offset:
// the class is in the segment's head, the count in the entry's header. The
// tables on the Go heap (which slots are used) can be built again from a scan
// of the arena; no page is found through them.
//
// Lock order: class.mu, then Pool.mu, then nothing. View, Ref and Release of a
// reference that is not the last take no lock. Trim punches holes, which do not
// block, with class.mu held for one segment.
//
// All methods may be called from any goroutine. A handle that names no entry is
// a broken invariant of the caller and panics, always: going on would hand one
// sandbox another's bytes.
package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// ErrFull: storing the page would exceed the limit. Nothing was stored.
var ErrFull = errors.New("pool is full")

// Handle names an entry: its offset in the arena divided by 16. 0 is none;
// always below 1<<29.
type Handle uint32

// The entry header. The kind is in the high 4 bits of the length's word.
//
//	0 references (4, atomic) | 4 checksum (4) | 8 length and kind (2) | [10 dictionary (4)] | bytes
//
// All but the count are written before the first reference exists and never
// again until the last is gone.
const (
	offRefs    = 0
	offSum     = 4
	offLength  = 8
	offDict    = 10
	header     = 10
	headerDict = 14

	lengthBits = 12 // codec.MaxData is 1<<12 - 1
	lengthMask = 1<<lengthBits - 1
)

const (
	granule   = 16
	arenaSize = granule << 29
)

const (
	_ = uint(lengthMask - codec.MaxData) // a length fits
	_ = uint(15 - codec.KindZstdDict)    // a kind fits
)

// growPoint makes the arena refuse to grow, as at the limit.
var growPoint = fault.NewPoint("pool.grow")

// Options of a Pool.
type Options struct {
	// Limit is the most that Footprint may become. 0, or more than the arena:
	// the arena's 8 GiB.
	Limit units.Bytes
}

// Pool is safe for concurrent use. Use New.
type Pool struct {
	limit int64            // immutable
	file  *os.File         // immutable
	arena *hostmem.Mapping // immutable until Close
	mem   []byte           // immutable until Close; arena.Data

	entries atomic.Int64
	live    atomic.Int64 // encoded bytes of the entries
	headers atomic.Int64 // bytes of their headers

	resident atomic.Int64 // arena pages in memory, in bytes
	tables   atomic.Int64 // bytes outside the arena: segment tables, page tables
	used     atomic.Int64 // resident + tables; reserved before it is used, never above limit

	classes  [numClasses]class
	segments [maxSegments / chunkLen]atomic.Pointer[[chunkLen]segment]

	mu    sync.Mutex
	fresh int   // guarded by mu; segments from here on were never used
	free  []int // guarded by mu; segments below fresh that belong to no class, none of it in memory
}

// New creates an empty pool. It reserves 8 GiB of address space; memory is used
// as entries come.
func New(o Options) (*Pool, error) {
	file, err := hostmem.NewMemfd("agentzip-pool", arenaSize)
	if err != nil {
		return nil, fmt.Errorf("create pool: %w", err)
	}
	arena, err := hostmem.MapShared(file, arenaSize)
	if err != nil {
		return nil, fmt.Errorf("create pool: %w", errors.Join(err, file.Close()))
	}
	if err := plainPages(arena.Data); err != nil {
		return nil, fmt.Errorf("create pool: %w", errors.Join(err, arena.Close(), file.Close()))
	}
	if o.Limit <= 0 || o.Limit > arenaSize {
		o.Limit = arenaSize
	}
	p := &Pool{limit: int64(o.Limit), file: file, arena: arena, mem: arena.Data}
	for i := range p.classes {
		p.classes[i].init(i)
	}
	return p, nil
}

// Put stores a copy of enc with one reference. It fails with ErrFull at the
// limit; then nothing was stored, and releasing entries (and Trim) makes room.
func (p *Pool) Put(enc codec.Encoded) (Handle, error) {
	if len(enc.Data) > codec.MaxData || enc.Kind > 15 {
		return 0, fmt.Errorf("put entry of %d bytes of %v in pool: longer than a page or of no known kind", len(enc.Data), enc.Kind)
	}
	head := header
	if enc.Kind == codec.KindZstdDict {
		head = headerDict
	}
	need := head + len(enc.Data)
	off, err := p.alloc(need)
	if err != nil {
		return 0, fmt.Errorf("put entry of %d bytes in pool of %v: %w", len(enc.Data), units.Bytes(p.limit), err)
	}
	e := p.mem[off : off+need]
	binary.LittleEndian.PutUint32(e[offSum:], enc.Sum)
	binary.LittleEndian.PutUint16(e[offLength:], uint16(enc.Kind)<<lengthBits|uint16(len(enc.Data)))
	if head == headerDict {
		binary.LittleEndian.PutUint32(e[offDict:], uint32(enc.Dict))
	}
	copy(e[head:], enc.Data)
	p.entries.Add(1)
	p.live.Add(int64(len(enc.Data)))
	p.headers.Add(int64(head))
	refs(p.mem, off+offRefs).Store(1)
	return Handle(off / granule), nil
}

// View returns the entry; Data aliases the arena and is valid while the
// caller's reference lives. It must not be written to.
func (p *Pool) View(h Handle) codec.Encoded {
	off, _ := p.check(h)
	return p.read(h, off)
}

// read decodes the header at off and checks that the entry lies in its slot.
func (p *Pool) read(h Handle, off int) codec.Encoded {
	word := binary.LittleEndian.Uint16(p.mem[off+offLength:])
	enc := codec.Encoded{
		Kind: codec.Kind(word >> lengthBits),
		Sum:  binary.LittleEndian.Uint32(p.mem[off+offSum:]),
	}
	head := header
	if enc.Kind == codec.KindZstdDict {
		head = headerDict
		enc.Dict = codec.DictID(binary.LittleEndian.Uint32(p.mem[off+offDict:]))
	}
	end := head + int(word&lengthMask)
	if end > p.segment(off/segmentSize).slotSize() {
		panic(fmt.Sprintf("pool: entry %#x says it is %d bytes long, longer than its slot: the arena was overwritten", uint32(h), end))
	}
	enc.Data = p.mem[off+head : off+end : off+end]
	return enc
}

// Ref adds a reference to an entry the caller already holds one of.
func (p *Pool) Ref(h Handle) {
	off, n := p.check(h)
	r := refs(p.mem, off+offRefs)
	for !r.CompareAndSwap(n, n+1) {
		if n = r.Load(); n == 0 {
			panicHandle(h, "was released while it was being referenced")
		}
	}
	if n+1 == 0 {
		panicHandle(h, "has 1<<32 references")
	}
}

// Release gives a reference back. freed: it was the last; dict is the
// dictionary the entry named (0 if none), for the caller to release.
func (p *Pool) Release(h Handle) (freed bool, dict codec.DictID) {
	off, n := p.check(h)
	enc := p.read(h, off) // before the count falls: then the slot is another's
	r := refs(p.mem, off+offRefs)
	for !r.CompareAndSwap(n, n-1) {
		if n = r.Load(); n == 0 {
			panicHandle(h, "was released twice")
		}
	}
	if n > 1 {
		return false, 0
	}
	head := header
	if enc.Kind == codec.KindZstdDict {
		head = headerDict
	}
	p.entries.Add(-1)
	p.live.Add(-int64(len(enc.Data)))
	p.headers.Add(-int64(head))
	p.release(off)
	return true, enc.Dict
}

// check returns the offset of h and its reference count, or panics.
func (p *Pool) check(h Handle) (off int, n uint32) {
	off = int(h) * granule
	if h == 0 || off >= arenaSize {
		panicHandle(h, "is out of range")
	}
	s := p.segment(off / segmentSize)
	if s == nil {
		panicHandle(h, "names a segment that was never used")
	}
	size := s.slotSize()
	if size == 0 {
		panicHandle(h, "names a free segment")
	}
	at := off%segmentSize - segmentHead
	if at < 0 || at%size != 0 || at+size > segmentSize-segmentHead {
		panicHandle(h, "is not the start of a slot")
	}
	if n = refs(p.mem, off+offRefs).Load(); n == 0 {
		panicHandle(h, "names no entry: it was released")
	}
	return off, n
}

func panicHandle(h Handle, what string) {
	panic(fmt.Sprintf("pool: handle %#x %s", uint32(h), what))
}

// reserve notes n bytes more of arena or tables, or fails at the limit.
func (p *Pool) reserve(n int64) error {
	if err := growPoint.Err(); err != nil {
		return err
	}
	for {
		u := p.used.Load()
		if u+n > p.limit {
			return ErrFull
		}
		if p.used.CompareAndSwap(u, u+n) {
			return nil
		}
	}
}

// pages returns how many bytes the pages of a bit set are.
func pageBytes(set uint16) int64 { return int64(bits.OnesCount16(set)) * units.PageSize }

// Stats is an account of a pool. Footprint = Live + Meta + Slack.
type Stats struct {
	Entries   int64
	Live      units.Bytes // encoded bytes
	Meta      units.Bytes // entry headers, segment heads and tables, this process's page tables of the arena
	Slack     units.Bytes // arena memory that is neither: rounding to slots, free slots
	Resident  units.Bytes // arena pages in memory: what fstat(2) says of the memory file
	Footprint units.Bytes // Resident and the tables outside the arena
}

// Stats returns the account: exact while no call is changing the pool, else each
// figure is right for some moment of the call.
func (p *Pool) Stats() Stats {
	s := Stats{
		Entries:  p.entries.Load(),
		Live:     units.Bytes(p.live.Load()),
		Resident: units.Bytes(p.resident.Load()),
	}
	tables := units.Bytes(p.tables.Load())
	s.Footprint = s.Resident + tables
	p.mu.Lock()
	heads := units.Bytes(p.fresh-len(p.free)) * segmentHead
	p.mu.Unlock()
	s.Meta = units.Bytes(p.headers.Load()) + heads + tables
	s.Slack = s.Footprint - s.Live - s.Meta
	return s
}

// Footprint returns the memory held because of the pool: what the limit limits.
func (p *Pool) Footprint() units.Bytes {
	return units.Bytes(p.resident.Load() + p.tables.Load())
}

// Close unmaps the arena and frees its memory. No other call may be running or
// come after, and no View may be in use.
func (p *Pool) Close() error {
	if err := errors.Join(p.arena.Close(), p.file.Close()); err != nil {
		return fmt.Errorf("close pool: %w", err)
	}
	return nil
}
