// Package pool keeps the encoded pages of one cohort in memory that the garbage
// collector never scans: a memory file (memfd), mapped once, addressed by offset.
//
//	file    = handle table (2 GiB of addresses), then the arena (4 GiB)
//	table   = 8 B a handle: where the entry lies, and how many references it has
//	arena   = 64 KiB segments, each filled from its start
//	entry   = header of 6 B (10 with an operand), the encoded bytes, at most 1 B of rounding
//
// A handle is an index into the table, so entries can be moved. An entry is in
// one state, and its reference count says which:
//
//	absent --Put--> stored (1) --Ref, TryRef--> stored (n) --Release, n times--> absent
//	                stored (n) --Compact--> stored (n) at another place
//
// A segment is in one state:
//
//	free (no page in memory) --a Put or Compact needs one--> open
//	open --full--> sealed --last entry released--> limbo --readers gone--> open, or punched: free
//	sealed --Compact takes it--> victim --all moved--> limbo
//	victim --some could not be moved--> sealed
//
// From being opened to limbo, no place of a segment is written twice: room that a
// released entry leaves is dead until its whole segment is, or until Compact has
// moved the rest out. That makes a Release a handful of atomic operations,
// whatever the size, and lets an entry that was moved or released be read until
// its readers are gone. The alternative, slots of 80 to 100 size classes that
// Puts fill again, lost 2-3 % to rounding and half a page for each class, which
// was a tenth of a small cohort's pool.
//
// Segments in limbo are filled again by the next Put or Compact that needs one;
// only Trim and Compact, and a Put that meets the limit, return memory to the
// system. Who released much (a sandbox ended) calls Trim, or Compact if siblings
// live on.
//
// # Readers
//
// A Reader belongs to one goroutine. Between its Pin and Unpin every View stays
// as it was, whoever releases or moves the entry meanwhile. Pin notes the pool's
// epoch in the reader. A segment that goes to limbo advances the epoch; it may be
// punched once each reader is unpinned or has pinned at that epoch or later:
// such a reader loaded its handle's word after it had ceased to point here.
//
// # Damage
//
// Memory can go bad. Each single flipped bit of the file ends in ErrDamaged, in a
// checksum that does not match the decoded page, or in a leak, and harms no other
// entry: counts lie beside their complement, places and lengths carry parity,
// and the checksum is stored mixed with handle, kind, length and operand, so
// that bytes that were written for another handle never pass for this one's. No
// method panics on what it finds in the file or on a handle that names no entry:
// several sandboxes share a pool, and the one that met the damage is to be
// killed by its pager, not the daemon. What a damaged entry occupied is lost
// until Close, and stays in the accounts.
//
// # Locks
//
// Lock order: Pool.compacting, then Pool.mu, then nothing. View, Pin, Unpin, Ref,
// TryRef and Release take no lock and call no system, so that a thread a guest
// waits for never waits for another; the dead that Release leaves are collected by
// the next Put, Trim or Compact. mu is held for one entry, for at most 64
// segments or a table page of 512 handles, or for a look through the book of the
// handle table (4 B for 512 handles), never across a system call or a copy.
// Trim punches holes with no lock held, Compact does and waits for readers with
// none but compacting.
//
// All methods may be called from any goroutine, those of Reader by its owner.
package pool

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// Errors that callers branch on.
var (
	// ErrFull: storing the page would exceed the limit. Nothing was stored.
	// Releasing entries, then Compact, makes room.
	ErrFull = errors.New("pool is full")
	// ErrShared: the entry has MaxRefs references. None was added; the caller
	// stores another copy.
	ErrShared = errors.New("pool entry has as many references as can be counted")
	// ErrDamaged: what lies in the file cannot be what Put wrote, or the handle
	// names no entry. Nothing was changed. The caller ends the sandbox that
	// holds the handle; the others go on.
	ErrDamaged = errors.New("pool entry is damaged")
)

// Each wraps ErrDamaged; made once, so that the fault path does not allocate.
var (
	errNoEntry = fmt.Errorf("handle names no entry: %w", ErrDamaged)
	errWord    = fmt.Errorf("word of the handle table fails its check: %w", ErrDamaged)
	errHeader  = fmt.Errorf("header fails its check: %w", ErrDamaged)
)

// Handle names an entry: an index into the handle table. 0 is none.
type Handle uint32

const (
	// MaxHandle is the highest Handle: 28 bits.
	MaxHandle Handle = 1<<28 - 1
	// MaxRefs is how many references an entry can have.
	MaxRefs = 1<<16 - 1
)

const (
	tableSize = (int64(MaxHandle) + 1) * wordSize
	arenaSize = int64(1) << placeBits * unit
)

// Points at which tests make the pool fail.
var (
	growPoint  = fault.NewPoint("pool.grow")  // refuse to grow, as at the limit
	punchPoint = fault.NewPoint("pool.punch") // fail to give memory back
)

// Options of a Pool.
type Options struct {
	// Limit is the most that Footprint may become. 0, or more than the pool can
	// address: what it can address. The last workRoom of it is for Compact.
	Limit units.Bytes
}

// workRoom is what Puts leave below the limit, so that Compact can make room in a
// full pool: a segment to move to, and tables. With less, Compact could not
// empty a segment that is nearly full.
const workRoom = segmentSize + 4*units.PageSize

// Pool is safe for concurrent use. Use New.
type Pool struct {
	limit   int64                               // immutable
	file    *os.File                            // immutable
	mapping *hostmem.Mapping                    // immutable until Close
	table   []byte                              // immutable until Close; the handle table
	arena   []byte                              // immutable until Close; the segments
	punch   func(mem []byte, at, n int64) error // immutable; frees [at, at+n) of table or arena

	entries atomic.Int64
	live    atomic.Int64 // encoded bytes of the entries
	headers atomic.Int64 // bytes of their headers

	inArena atomic.Int64 // arena pages in memory, in bytes
	inTable atomic.Int64 // handle table pages in memory, in bytes
	tables  atomic.Int64 // bytes outside the file: tables on the Go heap, page tables
	used    atomic.Int64 // inArena + inTable + tables; reserved before it is used, never above limit

	epoch       atomic.Uint64 // from 1; advanced under mu when segments go to limbo
	deadSegment atomic.Int32  // stack, through segment.next, of segments without live bytes; 1 + index, 0 none
	deadHandle  atomic.Uint32 // stack, through the places of their words, of handles that were released

	segments atomic.Pointer[[]*segmentChunk] // the slice is immutable; replaced under mu
	present  atomic.Pointer[[]atomic.Uint64] // a bit for each table page in memory; replaced, and its bits changed, under mu
	strayed  atomic.Bool                     // a page of the handle table may have come back by being read

	compacting  chan struct{} // holds a token while Compact runs
	compactions uint32        // how many calls there were; owned by the holder of the token

	mu      sync.Mutex
	readers []*Reader // guarded by mu
	handles handles   // guarded by mu
	fresh   int       // guarded by mu; segments from here on were never used
	free    list      // guarded by mu; segments below fresh in state free
	limbo   list      // guarded by mu; oldest first
	young   openSet   // guarded by mu; where Put stores
	old     openSet   // guarded by mu; where Compact moves to: what outlived a segment dies less soon
}

// New creates an empty pool. It reserves 6 GiB of address space; memory is used
// as entries come.
func New(o Options) (*Pool, error) {
	file, err := hostmem.NewMemfd("agentzip-pool", units.Bytes(tableSize+arenaSize))
	if err != nil {
		return nil, fmt.Errorf("create pool: %w", err)
	}
	mapping, err := hostmem.MapShared(file, units.Bytes(tableSize+arenaSize))
	if err != nil {
		return nil, fmt.Errorf("create pool: %w", errors.Join(err, file.Close()))
	}
	if err := plainPages(mapping.Data); err != nil {
		return nil, fmt.Errorf("create pool: %w", errors.Join(err, mapping.Close(), file.Close()))
	}
	p := newPool(o.Limit, mapping.Data[:tableSize:tableSize], mapping.Data[tableSize:])
	p.file, p.mapping = file, mapping
	p.punch = func(mem []byte, at, n int64) error {
		if &mem[0] == &p.arena[0] {
			at += tableSize
		}
		return hostmem.PunchHole(file, at, n)
	}
	return p, nil
}

// newPool makes a pool of memory that its caller frees; punch is to be set.
func newPool(limit units.Bytes, table, arena []byte) *Pool {
	if most := units.Bytes(len(table) + len(arena)); limit <= 0 || limit > most {
		limit = most
	}
	p := &Pool{limit: int64(limit), table: table, arena: arena, compacting: make(chan struct{}, 1)}
	p.epoch.Store(1)
	p.segments.Store(new([]*segmentChunk))
	p.present.Store(new([]atomic.Uint64))
	p.old.most = oldOpen
	p.young.most = youngOpen
	p.tables.Store(poolBytes)
	p.used.Store(poolBytes)
	return p
}

// Put stores a copy of enc with one reference. It fails with ErrFull at the limit;
// then nothing was stored.
func (p *Pool) Put(enc codec.Encoded) (Handle, error) {
	if len(enc.Data) > codec.MaxData || enc.Kind == 0 || int(enc.Kind) >= codec.Kinds {
		return 0, fmt.Errorf("put entry of %d bytes of %v in pool: longer than a page or of no known kind", len(enc.Data), enc.Kind)
	}
	h, off, err := p.allocate(entrySize(enc.Kind, len(enc.Data)))
	if errors.Is(err, ErrFull) && p.Trim() > 0 {
		h, off, err = p.allocate(entrySize(enc.Kind, len(enc.Data)))
	}
	if err != nil {
		return 0, fmt.Errorf("put entry of %d bytes in pool of %v: %w", len(enc.Data), units.Bytes(p.limit), err)
	}
	head := writeEntry(p.arena[off:], h, enc)
	p.entries.Add(1)
	p.live.Add(int64(len(enc.Data)))
	p.headers.Add(int64(head))
	p.word(h).Store(uint64(makeWord(1, uint32(off/unit))))
	return h, nil
}

// allocate takes a handle, which names no entry yet, and n bytes of the arena.
func (p *Pool) allocate(n int) (h Handle, off int, err error) {
	most := p.limit - workRoom
	p.mu.Lock()
	defer p.mu.Unlock()
	if h, err = p.takeHandle(most); err != nil {
		return 0, 0, err
	}
	if off, err = p.allot(&p.young, n, most); err != nil {
		p.returnHandle(h)
		return 0, 0, err
	}
	return h, off, nil
}

// Ref adds a reference to an entry the caller already holds one of. It fails with
// ErrShared or ErrDamaged; then the caller holds what it held.
func (p *Pool) Ref(h Handle) error {
	a, w, err := p.load(h)
	for err == nil {
		if w.refs() == MaxRefs {
			return ErrShared
		}
		if a.CompareAndSwap(uint64(w), uint64(w.withRefs(w.refs()+1))) {
			return nil
		}
		if a, w, err = p.load(h); err != nil {
			p.strayed.Store(true) // the page may have gone between load and compare
		}
	}
	return err
}

// TryRef adds a reference to the entry that h names now. h may be any value, also
// one that was released or never given out: false, and nothing changed. It is for
// indexes that keep handles without a reference: true says that h names an
// entry, not that it is the one that was noted, so the caller compares.
func (p *Pool) TryRef(h Handle) bool { return p.Ref(h) == nil }

// Release gives a reference back. freed: it was the last, and was is the entry
// without Data, for the caller to release dictionary or base and to un-index it.
//
// With ErrDamaged nothing is given back (the handle names no entry, or its word
// is damaged), or the last reference is, and the entry's room is lost until
// Close, because its header is damaged. was is unknown then: what it named stays
// referenced. The caller goes on, or ends the sandbox that held h.
func (p *Pool) Release(h Handle) (freed bool, was codec.Encoded, err error) {
	a, w, err := p.load(h)
	for err == nil {
		n := w.refs()
		if a.CompareAndSwap(uint64(w), uint64(w.withRefs(n-1))) {
			if n > 1 {
				return false, codec.Encoded{}, nil
			}
			return p.bury(h, a, int(w.place())*unit)
		}
		if a, w, err = p.load(h); err != nil {
			p.strayed.Store(true)
		}
	}
	return false, codec.Encoded{}, err
}

// bury frees the entry of h at off, whose count the caller brought to 0: nobody
// moves it or gives h out before it is on the stack.
func (p *Pool) bury(h Handle, a *atomic.Uint64, off int) (freed bool, was codec.Encoded, err error) {
	was, ok := p.readEntry(h, off)
	if !ok {
		return false, codec.Encoded{}, errHeader
	}
	n := len(was.Data)
	was.Data = nil
	p.entries.Add(-1)
	p.live.Add(-int64(n))
	p.headers.Add(-int64(headerSize(was.Kind)))
	for {
		top := p.deadHandle.Load()
		a.Store(uint64(makeWord(0, top)))
		if p.deadHandle.CompareAndSwap(top, uint32(h)) {
			break
		}
	}
	p.abandon(off, entrySize(was.Kind, n))
	return true, was, nil
}

// reserve notes n bytes more of memory, or fails above most.
func (p *Pool) reserve(n, most int64) error {
	if err := growPoint.Err(); err != nil {
		return err
	}
	for {
		u := p.used.Load()
		if u+n > most {
			return ErrFull
		}
		if p.used.CompareAndSwap(u, u+n) {
			return nil
		}
	}
}

// Close unmaps the file and frees its memory, whatever is stored. No other call
// may be running or come after, also of readers, and no View may be in use.
func (p *Pool) Close() error {
	if err := errors.Join(p.mapping.Close(), p.file.Close()); err != nil {
		return fmt.Errorf("close pool: %w", err)
	}
	return nil
}
