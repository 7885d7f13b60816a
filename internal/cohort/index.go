package cohort

import (
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// A slot of an index: a pool handle and four bits of what it was filed under. 0 is empty.
//
// Slots are never cleaned: a handle may have been released, or stand for another page by
// now. Whoever follows one takes a reference first and compares then, so that the release of
// a page, which happens on the fault path, has nothing to do here.
type slot uint32

const tagBits = 32 - 28

func makeSlot(h pool.Handle, tag uint32) slot { return slot(uint32(h)<<tagBits | tag&(1<<tagBits-1)) }
func (s slot) handle() pool.Handle            { return pool.Handle(s >> tagBits) }
func (s slot) tagged(tag uint32) bool {
	return s != 0 && uint32(s)&(1<<tagBits-1) == tag&(1<<tagBits-1)
}

const (
	slotBytes = 4

	// bucketSlots is how many slots are looked through for a checksum in each of the two
	// buckets it may lie in: half a cache line. With one bucket a table that grew to
	// three quarters full has lost 8 % of its entries, with the emptier of two 0.01 %.
	bucketSlots = 8
)

// An index finds entries by the checksum of their page. It is a table of buckets that
// forgets at random when one is full. Lookups and insertions take no lock and see slots
// one at a time.
type index struct {
	table atomic.Pointer[[]atomic.Uint32] // replaced when it grows, under Cohort.growing
}

// Sizes: a table grows by half when it is three quarters full, so 5.3-8 bytes an entry.
const (
	firstSlots = 1 << 10
	fullNum    = 3
	fullDen    = 4
)

func (x *index) init() {
	t := make([]atomic.Uint32, firstSlots)
	x.table.Store(&t)
}

func (x *index) size() units.Bytes { return units.Bytes(len(*x.table.Load())) * slotBytes }

// buckets returns the slots in which sum may lie. They are chosen by high bits, which depend
// on all of sum; its low ones are the tag.
func buckets(t []atomic.Uint32, sum uint32) [2][]atomic.Uint32 {
	return [2][]atomic.Uint32{bucket(t, sum*0x9e3779b1), bucket(t, (sum^sum>>15)*0xc2b2ae3d)}
}

func bucket(t []atomic.Uint32, hash uint32) []atomic.Uint32 {
	i := int(uint64(hash) * uint64(len(t)/bucketSlots) >> 32)
	return t[i*bucketSlots : (i+1)*bucketSlots]
}

// insert files h under sum. If there is no room it takes the place of an entry that is
// gone, or of any. sumOf returns the checksum of a live entry.
func (x *index) insert(sum uint32, h pool.Handle, sumOf func(pool.Handle) (uint32, bool)) {
	b := buckets(*x.table.Load(), sum)
	if put(b, sum, h) {
		return
	}
	// Pages come and go: of a cohort whose size stays the same two slots in five
	// lead nowhere. Without this a third of the pages that are there could not be found.
	for _, b := range b {
		for i := range b {
			v := slot(b[i].Load())
			if is, ok := sumOf(v.handle()); !ok || !v.tagged(is) {
				b[i].Store(uint32(makeSlot(h, sum)))
				return
			}
		}
	}
	anyOf(b, h).Store(uint32(makeSlot(h, sum)))
}

// put files h in the emptier bucket, if it has room.
func put(b [2][]atomic.Uint32, sum uint32, h pool.Handle) bool {
	for i := range bucketSlots {
		for _, b := range b {
			if v := slot(b[i].Load()); v == 0 || v.handle() == h {
				b[i].Store(uint32(makeSlot(h, sum)))
				return true
			}
		}
	}
	return false
}

// anyOf returns one of the first bucket's eight slots.
func anyOf(b [2][]atomic.Uint32, h pool.Handle) *atomic.Uint32 {
	return &b[0][uint32(h)*0x85ebca77>>29]
}

// grow makes the table larger if entries are too many for it. sumOf returns the checksum of
// a live entry; stale slots are left behind.
func (x *index) grow(entries int64, sumOf func(pool.Handle) (uint32, bool)) {
	old := *x.table.Load()
	if entries*fullDen <= int64(len(old))*fullNum {
		return
	}
	n := (len(old) + len(old)/2) / bucketSlots * bucketSlots
	t := make([]atomic.Uint32, n)
	for i := range old {
		h := slot(old[i].Load()).handle()
		if h == 0 {
			continue
		}
		if sum, ok := sumOf(h); ok {
			if b := buckets(t, sum); !put(b, sum, h) {
				anyOf(b, h).Store(uint32(makeSlot(h, sum)))
			}
		}
	}
	x.table.Store(&t) // what was inserted into the old one meanwhile is lost: a page more in the pool
}
