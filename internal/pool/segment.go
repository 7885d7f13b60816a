package pool

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

const (
	maxSegments = arenaSize / segmentSize
	chunkLen    = 256 // segments whose tables are made at once, for 16 MiB of arena

	// segmentMagic starts a segment's head in the arena; the class follows.
	segmentMagic = 0x675a4741 // "AGZg"

	// A page table of this process maps 2 MiB of the arena.
	tableSpan  = 2 << 20 / segmentSize
	tableBytes = units.PageSize
)

// A segment's table. Guarded by the mu of the class that owns it, but for class.
type segment struct {
	class   atomic.Int32 // class + 1; 0 = none. Written under class.mu; read by holders of a reference
	touched uint16       // pages of the segment that are in memory
	linked  bool         // in its class's list
	free    int32        // free slots
	prev    int32        // in the list; -1 = first
	next    int32        // in the list; -1 = last
	taken   []uint64     // a bit for each slot that is in use
}

// slotSize returns the size of the segment's slots, 0 if it is free.
func (s *segment) slotSize() int {
	c := s.class.Load()
	if c == 0 {
		return 0
	}
	return slotSizes[c-1]
}

// segment returns the table of segment i, nil if it was never used.
func (p *Pool) segment(i int) *segment {
	chunk := p.segments[i/chunkLen].Load()
	if chunk == nil {
		return nil
	}
	return &chunk[i%chunkLen]
}

// pageSet returns the pages of a segment that [from, from+n) of it touches.
func pageSet(from, n int) uint16 {
	first, last := from/units.PageSize, (from+n-1)/units.PageSize
	return uint16(1<<(last+1)-1) &^ uint16(1<<first-1)
}

// alloc takes a slot for need bytes and returns its offset. Its pages that the
// entry will touch are accounted for; its reference count is 0.
func (p *Pool) alloc(need int) (off int, err error) {
	c := &p.classes[classOf[(need+granule-1)/granule]]
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.partial < 0 {
		if err := p.addSegment(c); err != nil {
			return 0, err
		}
	}
	i := c.partial
	s := p.segment(i)
	slot := s.firstFree()
	from := segmentHead + slot*c.size
	if more := pageSet(from, need) &^ s.touched; more != 0 {
		if err := p.reserve(pageBytes(more)); err != nil {
			return 0, err
		}
		p.resident.Add(pageBytes(more))
		s.touched |= more
	}
	s.taken[slot/64] |= 1 << (slot % 64)
	if s.free--; s.free == 0 {
		p.unlink(c, s)
	}
	return i*segmentSize + from, nil
}

// firstFree returns the first free slot: entries stay at the front, where the
// pages are in memory. At most 64 words.
// Preconditions: free > 0.
func (s *segment) firstFree() int {
	for w, set := range s.taken {
		if set != ^uint64(0) {
			return w*64 + bits.TrailingZeros64(^set)
		}
	}
	panic("pool: a segment with free slots has none")
}

// release gives the slot at off back; the caller brought its count to 0. If it
// was the last of its segment, the segment goes back to the system.
func (p *Pool) release(off int) {
	i := off / segmentSize
	s := p.segment(i)
	c := &p.classes[s.class.Load()-1] // stable: the slot is still taken
	slot := (off%segmentSize - segmentHead) / c.size

	c.mu.Lock()
	s.taken[slot/64] &^= 1 << (slot % 64)
	s.free++
	empty := int(s.free) == c.slots
	switch {
	case empty:
		if s.linked {
			p.unlink(c, s)
		}
		s.class.Store(0)
	case !s.linked:
		p.link(c, i, s)
	}
	c.mu.Unlock()
	if empty {
		p.retire(i, s)
	}
}

// link puts segment i first in its class's list.
// Preconditions: c.mu is held.
func (p *Pool) link(c *class, i int, s *segment) {
	s.linked, s.prev, s.next = true, -1, int32(c.partial)
	if c.partial >= 0 {
		p.segment(c.partial).prev = int32(i)
	}
	c.partial = i
}

// unlink takes a segment out of its class's list.
// Preconditions: c.mu is held.
func (p *Pool) unlink(c *class, s *segment) {
	if s.prev >= 0 {
		p.segment(int(s.prev)).next = s.next
	} else {
		c.partial = int(s.next)
	}
	if s.next >= 0 {
		p.segment(int(s.next)).prev = s.prev
	}
	s.linked = false
}

// addSegment gives c an empty segment, first in its list.
// Preconditions: c.mu is held.
func (p *Pool) addSegment(c *class) error {
	i, err := p.takeSegment()
	if err != nil {
		return err
	}
	s := p.segment(i)
	words := (c.slots + 63) / 64
	grow := int64(max(0, words-cap(s.taken))) * 8
	if err := p.reserve(units.PageSize + grow); err != nil { // page 0 holds the head
		p.mu.Lock()
		p.free = append(p.free, i)
		p.mu.Unlock()
		return err
	}
	p.resident.Add(units.PageSize)
	p.tables.Add(grow)
	if grow > 0 {
		s.taken = make([]uint64, words)
	}
	s.taken = s.taken[:words]
	clear(s.taken)
	if rest := c.slots % 64; rest != 0 {
		s.taken[words-1] = ^uint64(0) << rest // slots that do not exist
	}
	s.touched, s.free = 1, int32(c.slots)
	head := p.mem[i*segmentSize:]
	binary.LittleEndian.PutUint32(head, segmentMagic)
	binary.LittleEndian.PutUint32(head[4:], uint32(c.index))
	s.class.Store(int32(c.index) + 1)
	p.link(c, i, s)
	return nil
}

// takeSegment returns a segment that belongs to nobody, one used before if there
// is one: its tables exist.
func (p *Pool) takeSegment() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		i := p.free[n-1]
		p.free = p.free[:n-1]
		return i, nil
	}
	i := p.fresh
	if i == maxSegments {
		return 0, ErrFull
	}
	var grow int64
	if i%tableSpan == 0 {
		grow += tableBytes
	}
	if i%chunkLen == 0 {
		grow += chunkBytes
	}
	if err := p.reserve(grow); err != nil {
		return 0, err
	}
	p.tables.Add(grow)
	if i%chunkLen == 0 {
		p.segments[i/chunkLen].Store(new([chunkLen]segment))
	}
	p.fresh++
	return i, nil
}

// retire returns the memory of segment i to the system and makes it free.
// Preconditions: it belongs to no class, so that nobody else names it.
func (p *Pool) retire(i int, s *segment) {
	p.punch(i, s, s.touched)
	s.touched = 0
	p.mu.Lock()
	p.free = append(p.free, i)
	p.mu.Unlock()
}

// punch returns a set of pages of segment i to the system.
func (p *Pool) punch(i int, s *segment, set uint16) {
	for left := set; left != 0; {
		first := bits.TrailingZeros16(left)
		n := bits.TrailingZeros16(^(left >> first))
		if err := hostmem.PunchHole(p.file, int64(i*segmentSize+first*units.PageSize), int64(n*units.PageSize)); err != nil {
			// A memory file that is not sealed punches what lies in it.
			panic(fmt.Sprintf("pool: %v", err))
		}
		left &^= uint16(1<<n-1) << first
	}
	s.touched &^= set
	p.resident.Add(-pageBytes(set))
	p.used.Add(-pageBytes(set))
}

// Trim returns the pages to the system that lie wholly in free slots, and how
// much it was. Entries are never moved, so after many releases (a sandbox died)
// segments can be sparse. It holds a class's lock for one segment at a time.
func (p *Pool) Trim() units.Bytes {
	p.mu.Lock()
	fresh := p.fresh
	p.mu.Unlock()
	var sum int64
	for i := range fresh {
		s := p.segment(i)
		n := s.class.Load()
		if n == 0 {
			continue
		}
		c := &p.classes[n-1]
		c.mu.Lock()
		if s.class.Load() == n && s.linked { // still of this class
			if idle := s.idle(c); idle != 0 {
				p.punch(i, s, idle)
				sum += pageBytes(idle)
			}
		}
		c.mu.Unlock()
	}
	return units.Bytes(sum)
}

// idle returns the pages in memory that hold neither the head nor a part of a
// slot in use.
// Preconditions: c.mu is held.
func (s *segment) idle(c *class) uint16 {
	keep := uint16(1)
	for w, set := range s.taken {
		for ; set != 0; set &= set - 1 {
			if slot := w*64 + bits.TrailingZeros64(set); slot < c.slots {
				keep |= pageSet(segmentHead+slot*c.size, c.size)
			}
		}
	}
	return s.touched &^ keep
}
