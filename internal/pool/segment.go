package pool

import (
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/units"
)

const (
	// segmentSize: what is left at the end of a full segment is a tenth of a
	// per cent of it; twice the size would hold twice as much back until the last
	// entry of a segment is gone.
	segmentSize = 64 << 10
	// chunkLen segments get their tables and their page table (2 MiB) at once.
	chunkLen = 32
	// hold in segment.live keeps a segment without live bytes from being dead.
	hold = 1 << 24
	// spareSegments are for Compact, when Puts have used all addresses.
	spareSegments = 4
	// tail is what is left in a segment that counts as full. Entries below 32 B
	// are a tenth and come without order.
	tail = 32
	// batch is how many segments or handles are taken in hand under one lock.
	batch = 64
	// punchMost segments are given back with one call of the kernel, 1 MiB. One by
	// one it takes 15 times as long on a virtual machine whose page tables are
	// shadowed (25 us a page instead of 1.7), for each call interrupts all cores.
	punchMost = 16
)

// A segment's table.
type segment struct {
	live  atomic.Int32 // bytes of its entries, and hold while it is open or a victim. Who brings it to 0 pushes it on the stack of the dead
	next  int32        // in that stack, then guarded by mu: in a list. 1 + index, 0 none
	fill  int32        // guarded by mu; bytes used since it was opened, dead ones too
	pages int32        // guarded by mu; how many of its pages, from the first on, are in memory
	state segmentState // guarded by mu
	stuck uint8        // guarded by mu; how many calls of Compact left live bytes behind
	tried uint32       // guarded by mu; the last such call
	stamp uint64       // guarded by mu; the epoch at which it went to limbo
}

type segmentState uint8

const (
	stateFree segmentState = iota
	stateOpen
	stateSealed
	stateVictim
	stateLimbo
	statePunched // memory of it is being given back
)

type segmentChunk [chunkLen]segment

// segment returns the table of segment i, which was used before.
func (p *Pool) segment(i int) *segment { return &(*p.segments.Load())[i/chunkLen][i%chunkLen] }

// pagesOf returns how many pages n bytes touch.
func pagesOf(n int32) int32 { return (n + units.PageSize - 1) / units.PageSize }

// memory returns how many bytes of the segment are in memory.
// Preconditions: mu is held, or the segment is the caller's.
func (s *segment) memory() int64 { return int64(s.pages) * units.PageSize }

// A list of segments through their next. Guarded by Pool.mu.
type list struct{ first, last int32 } // 1 + index, 0 none

func (p *Pool) pushBack(l *list, i int) {
	p.segment(i).next = 0
	if l.last != 0 {
		p.segment(int(l.last - 1)).next = int32(i + 1)
	} else {
		l.first = int32(i + 1)
	}
	l.last = int32(i + 1)
}

// popFront returns -1 for an empty list.
func (p *Pool) popFront(l *list) int {
	i := int(l.first) - 1
	if i >= 0 {
		if l.first = p.segment(i).next; l.first == 0 {
			l.last = 0
		}
	}
	return i
}

const (
	// youngOpen segments are open at once for Put: all but one are nearly full
	// and take the entries that fit. What is lost at the ends of segments is 1.9 %
	// with one, 0.3 % with 4, 0.1 % with 8.
	youngOpen = 8
	oldOpen   = 8
	openMost  = max(youngOpen, oldOpen) + 1 // one comes back from trimOpen
)

// An openSet is the segments that one kind of writer fills. Guarded by Pool.mu.
type openSet struct {
	most  int // immutable
	n     int
	segs  [openMost]opened
	grown int64 // bytes of pages that came into memory for it
}

type opened struct{ index, left int32 }

// allot takes n bytes of the open segment that they fill best, and opens one if
// they fit nowhere.
// Preconditions: mu is held.
func (p *Pool) allot(set *openSet, n int, most int64) (off int, err error) {
	best := -1
	for i, o := range set.segs[:set.n] {
		if int(o.left) >= n && (best < 0 || o.left < set.segs[best].left) {
			best = i
		}
	}
	if best < 0 {
		if err := p.open(set, most); err != nil {
			return 0, err
		}
		best = set.n - 1
	}
	o := &set.segs[best]
	s := p.segment(int(o.index))
	if more := int64(pagesOf(s.fill+int32(n))-s.pages) * units.PageSize; more > 0 {
		if err := p.reserve(more, most); err != nil {
			return 0, err
		}
		p.inArena.Add(more)
		set.grown += more
		s.pages = pagesOf(s.fill + int32(n))
	}
	off = int(o.index)*segmentSize + int(s.fill)
	s.fill += int32(n)
	s.live.Add(int32(n))
	if o.left -= int32(n); o.left < tail {
		p.seal(set, best)
	}
	return off, nil
}

// open adds an empty segment to the set, last; of a full set it seals the fullest.
// Preconditions: mu is held.
func (p *Pool) open(set *openSet, most int64) error {
	// Pages that are in memory are taken first: a new one costs 0.5 us here, 20 us
	// where page tables are shadowed.
	p.collectDead()
	i := p.popRipe(p.leastPinned())
	if i < 0 {
		i = p.popFront(&p.free)
	}
	if i < 0 {
		var err error
		if i, err = p.freshSegment(set, most); err != nil {
			return err
		}
	}
	if set.n == set.most {
		fullest := 0
		for j, o := range set.segs[:set.n] {
			if o.left < set.segs[fullest].left {
				fullest = j
			}
		}
		p.seal(set, fullest)
	}
	s := p.segment(i)
	s.state, s.fill, s.stuck, s.tried = stateOpen, 0, 0, 0
	s.live.Store(hold)
	set.segs[set.n] = opened{index: int32(i), left: segmentSize}
	set.n++
	return nil
}

// seal takes the j-th segment out of the set.
// Preconditions: mu is held.
func (p *Pool) seal(set *openSet, j int) {
	i := int(set.segs[j].index)
	set.n--
	set.segs[j] = set.segs[set.n]
	s := p.segment(i)
	s.state = stateSealed
	p.unhold(i, s)
}

// unhold lets a segment die that is neither open nor a victim any more.
func (p *Pool) unhold(i int, s *segment) {
	if s.live.Add(-hold) == 0 {
		p.pushDead(i, s)
	}
}

// sealSparse seals the open segments of which more than a quarter is dead, so that
// Compact may take them.
// Preconditions: mu is held.
func (p *Pool) sealSparse(set *openSet) {
	for j := set.n - 1; j >= 0; j-- {
		s := p.segment(int(set.segs[j].index))
		if s.fill > 0 && int64(s.live.Load()-hold)*4 < int64(s.fill)*3 {
			p.seal(set, j)
		}
	}
}

// freshSegment returns a segment that was never used.
// Preconditions: mu is held.
func (p *Pool) freshSegment(set *openSet, most int64) (int, error) {
	last := len(p.arena) / segmentSize
	if set == &p.young {
		last -= spareSegments
	}
	i := p.fresh
	if i >= last {
		return 0, ErrFull
	}
	if i%chunkLen == 0 {
		chunks := *p.segments.Load()
		grow := chunkBytes + int64(units.PageSize) // its page table
		if len(chunks) == cap(chunks) {
			grow += int64(max(8, cap(chunks))) * pointerBytes
		}
		if err := p.reserve(grow, most); err != nil {
			return 0, err
		}
		p.tables.Add(grow)
		if len(chunks) == cap(chunks) {
			chunks = append(make([]*segmentChunk, 0, len(chunks)+max(8, cap(chunks))), chunks...)
		}
		chunks = append(chunks, new(segmentChunk))
		p.segments.Store(&chunks)
	}
	p.fresh++
	return i, nil
}

// abandon makes n bytes at off dead. It takes no lock.
func (p *Pool) abandon(off, n int) {
	i := off / segmentSize
	if s := p.segment(i); s.live.Add(-int32(n)) == 0 {
		p.pushDead(i, s)
	}
}

// pushDead hands a segment that the caller brought to 0 live bytes to the next
// holder of mu. The stack is only ever taken whole, so no entry can come back
// while somebody compares.
func (p *Pool) pushDead(i int, s *segment) {
	for {
		top := p.deadSegment.Load()
		s.next = top
		if p.deadSegment.CompareAndSwap(top, int32(i+1)) {
			return
		}
	}
}

// collectDead moves the dead segments to limbo.
// Preconditions: mu is held.
func (p *Pool) collectDead() {
	next := p.deadSegment.Swap(0)
	if next == 0 {
		return
	}
	stamp := p.epoch.Add(1)
	for next != 0 {
		i := int(next - 1)
		s := p.segment(i)
		next = s.next
		s.state, s.stamp = stateLimbo, stamp
		p.pushBack(&p.limbo, i)
	}
}

// popRipe takes a segment out of limbo that no reader can see, if all are unpinned or
// pinned at the epoch least or later; -1 if there is none.
// Preconditions: mu is held.
func (p *Pool) popRipe(least uint64) int {
	if p.limbo.first == 0 || p.segment(int(p.limbo.first-1)).stamp > least {
		return -1
	}
	return p.popFront(&p.limbo)
}
