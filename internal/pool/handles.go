package pool

import (
	"math/bits"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/units"
)

// wordsPerPage handles share a page of the table.
const wordsPerPage = units.PageSize / wordSize

// handles is the book of the handle table's pages. Guarded by Pool.mu.
//
// The free handles of a page are a list through the places of their words (1 +
// index in the page). Handles of low pages are given out first, so that high
// ones become empty and can be given back.
type handles struct {
	pages    []tablePage
	avail    []uint64 // a bit for each page with a free handle
	lowest   int      // no word of avail before it has a bit
	empty    int      // pages in memory all of whose handles are free
	absent   int      // pages below len(pages) that were given back
	draining Handle   // what is left of the stack of released handles that was taken last
}

// A tablePage is absent, punched, or in memory with free handles from head on.
type tablePage struct{ head, free uint16 }

const (
	pageAbsent  = 0xffff // in free: not in memory
	pagePunched = 0xfffe // in free: being given back
)

// capacity returns how many handles page i has: handle 0 is none.
func capacity(i int) uint16 {
	if i == 0 {
		return wordsPerPage - 1
	}
	return wordsPerPage
}

// load returns the word of a handle that names an entry. h may be any value.
func (p *Pool) load(h Handle) (*atomic.Uint64, word, error) {
	present := *p.present.Load()
	page := h / wordsPerPage
	if int(page/64) >= len(present) || present[page/64].Load()>>(page%64)&1 == 0 {
		return nil, 0, errNoEntry
	}
	a := p.word(h)
	w := word(a.Load())
	if !w.valid() {
		if w == 0 {
			p.strayed.Store(true) // given back in between: the read has filled the hole
		}
		return nil, 0, errWord
	}
	if w.refs() == 0 {
		return nil, 0, errNoEntry
	}
	return a, w, nil
}

// takeHandle returns a free handle.
// Preconditions: mu is held.
func (p *Pool) takeHandle(most int64) (Handle, error) {
	p.drainHandles()
	t := &p.handles
	for {
		for t.lowest < len(t.avail) && t.avail[t.lowest] == 0 {
			t.lowest++
		}
		if t.lowest == len(t.avail) {
			if err := p.addTablePage(most); err != nil {
				return 0, err
			}
			continue
		}
		i := t.lowest*64 + bits.TrailingZeros64(t.avail[t.lowest])
		page := &t.pages[i]
		h := Handle(i*wordsPerPage + int(page.head) - 1)
		w := word(p.word(h).Load())
		if page.free == capacity(i) {
			t.empty--
		}
		page.free--
		page.head = uint16(w.place())
		if !w.valid() || w.refs() != 0 || w.place() > wordsPerPage || page.free > 0 && w.place() == 0 {
			page.free = 0 // damaged: the list is lost, and its handles with it
		}
		if page.free == 0 {
			page.head = 0
			t.avail[i/64] &^= 1 << (i % 64)
		}
		if w.valid() && w.refs() == 0 {
			return h, nil
		}
	}
}

// returnHandle makes h free.
// Preconditions: mu is held; h names no entry and is in no list.
func (p *Pool) returnHandle(h Handle) {
	t := &p.handles
	i := int(h / wordsPerPage)
	page := &t.pages[i]
	p.word(h).Store(uint64(makeWord(0, uint32(page.head))))
	page.head = uint16(h%wordsPerPage) + 1
	if page.free++; page.free == capacity(i) {
		t.empty++
	}
	t.avail[i/64] |= 1 << (i % 64)
	t.lowest = min(t.lowest, i/64)
}

// drainHandles makes up to batch released handles free, and reports whether there
// were that many.
// Preconditions: mu is held.
func (p *Pool) drainHandles() (more bool) {
	t := &p.handles
	for range batch {
		if t.draining == 0 {
			if t.draining = Handle(p.deadHandle.Swap(0)); t.draining == 0 {
				return false
			}
		}
		h := t.draining
		i := int(h / wordsPerPage)
		t.draining = 0
		if i >= len(t.pages) || t.pages[i].free >= capacity(i) {
			return false // a damaged word named no released handle: the rest is lost
		}
		w := word(p.word(h).Load())
		if !w.valid() || w.refs() != 0 {
			return false // likewise
		}
		t.draining = Handle(w.place())
		p.returnHandle(h)
	}
	return true
}

// addTablePage brings the lowest page of the table that is absent into memory.
// Preconditions: mu is held.
func (p *Pool) addTablePage(most int64) error {
	t := &p.handles
	i := len(t.pages)
	if t.absent > 0 {
		for i = 0; t.pages[i].free != pageAbsent; i++ {
		}
	} else if i*units.PageSize >= len(p.table) {
		return ErrFull
	}
	var tables int64
	if i == len(t.pages) {
		if i%(2<<20/units.PageSize) == 0 {
			tables += units.PageSize // its page table
		}
		if i == cap(t.pages) {
			tables += int64(max(64, i)) * tablePageBits / 8
		}
	}
	if err := p.reserve(units.PageSize+tables, most); err != nil {
		return err
	}
	p.inTable.Add(units.PageSize)
	p.tables.Add(tables)
	if i == cap(t.pages) {
		p.growBook(i + max(64, i))
	}
	if i == len(t.pages) {
		t.pages = append(t.pages, tablePage{})
	} else {
		t.absent--
	}
	p.fillTablePage(i)
	return nil
}

// tablePageBits is what the book has of a page: a tablePage and a bit in each of
// avail and present.
const tablePageBits = 32 + 1 + 1

// growBook makes room in the book for n pages, a multiple of 64.
// Preconditions: mu is held.
func (p *Pool) growBook(n int) {
	t := &p.handles
	t.pages = append(make([]tablePage, 0, n), t.pages...)
	t.avail = append(make([]uint64, 0, n/64), t.avail...)[:n/64]
	present := make([]atomic.Uint64, n/64)
	for i, old := 0, *p.present.Load(); i < len(old); i++ {
		present[i].Store(old[i].Load())
	}
	p.present.Store(&present)
}

// fillTablePage makes all handles of page i free.
// Preconditions: mu is held; the page is not present.
func (p *Pool) fillTablePage(i int) {
	t := &p.handles
	t.pages[i] = tablePage{}
	p.word(Handle(i * wordsPerPage)).Store(uint64(makeWord(0, 0))) // also handle 0's, which is never given out
	for h := wordsPerPage - 1; h >= wordsPerPage-int(capacity(i)); h-- {
		p.returnHandle(Handle(i*wordsPerPage + h))
	}
	(*p.present.Load())[i/64].Or(1 << (i % 64))
}

// trimTable gives back the pages of the table all of whose handles are free, and
// returns how many bytes that was.
func (p *Pool) trimTable() (sum int64) {
	for more := true; more; {
		p.mu.Lock()
		more = p.drainHandles()
		p.mu.Unlock()
	}
	if p.strayed.Swap(false) {
		p.punchAbsent()
	}
	const stride = 64 * batch // pages looked at under one lock
	for from := 0; ; from += stride {
		var ripe [stride]int32
		n := 0
		p.mu.Lock()
		t := &p.handles
		end := min(from+stride, len(t.pages))
		if t.empty == 0 || from >= end {
			p.mu.Unlock()
			return sum
		}
		for i := from; i < end; i++ {
			if t.pages[i].free == capacity(i) {
				t.pages[i].free = pagePunched
				t.avail[i/64] &^= 1 << (i % 64)
				t.empty--
				(*p.present.Load())[i/64].And(^uint64(1 << (i % 64)))
				ripe[n] = int32(i)
				n++
			}
		}
		p.mu.Unlock()
		for rest := ripe[:n]; len(rest) > 0; {
			run := 1
			for run < min(batch, len(rest)) && rest[run] == rest[0]+int32(run) {
				run++
			}
			sum += p.punchTable(int(rest[0]), run)
			rest = rest[run:]
		}
	}
}

// punchTable gives n pages of the table from the i-th on back, which are in no list.
// If that fails they are in use again.
func (p *Pool) punchTable(i, n int) int64 {
	bytes := int64(n) * units.PageSize
	err := punchPoint.Err()
	if err == nil {
		err = p.punch(p.table, int64(i)*units.PageSize, bytes)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for j := i; j < i+n; j++ {
		if err != nil {
			p.fillTablePage(j)
		} else {
			p.handles.pages[j].free = pageAbsent
		}
	}
	if err != nil {
		return 0
	}
	p.handles.absent += n
	p.inTable.Add(-bytes)
	p.used.Add(-bytes)
	return bytes
}

// punchAbsent punches again those pages that a TryRef may have read in the moment
// in which they were given back. They are taken out of reach meanwhile.
func (p *Pool) punchAbsent() {
	for i := 0; ; i++ {
		p.mu.Lock()
		t := &p.handles
		for i < len(t.pages) && t.pages[i].free != pageAbsent {
			i++
		}
		if i == len(t.pages) {
			p.mu.Unlock()
			return
		}
		t.pages[i].free = pagePunched
		t.absent--
		p.mu.Unlock()
		if err := p.punch(p.table, int64(i)*units.PageSize, units.PageSize); err != nil {
			p.strayed.Store(true) // again with the next Trim
		}
		p.mu.Lock()
		t.pages[i].free = pageAbsent
		t.absent++
		p.mu.Unlock()
	}
}
