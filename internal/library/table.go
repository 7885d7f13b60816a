package library

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/bits"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A record says which page has which checksum.
type record struct {
	sum uint32
	id  ID
}

// before orders records by checksum, then by ID.
func (r record) before(o record) bool { return r.sum < o.sum || r.sum == o.sum && r.id < o.id }

const (
	entryBytes = 4
	wordBits   = 64
	// samplePeriod is how many buckets share a sample of where they begin. At 64 the
	// table is 2.3 % larger and a miss takes 31 ns instead of 32.
	samplePeriod = 128
	sampleBytes  = 4
)

// A table is a set of records in 4 bytes each, and 3 to 5 bits for each ID there could be.
//
// Records are sorted, and a record's bucket is the upper idBits bits of its checksum.
// The bucket says those bits, so an entry holds only the others, and the ID: always 32
// bits together, and nothing of the checksum is lost. Which entries a bucket
// has is written in unary: a 0 for each of its entries, then a 1. So bucket b begins
// behind the b-th 1, found from a sample for every 128th bucket.
//
//	entries  n x 4 bytes, little-endian: checksum's lower 32-idBits bits, then the ID
//	fences   (n + 2^idBits) bits in 8-byte words
//	samples  2^idBits / 128 x 4 bytes: the position in fences where each 128th bucket begins
//
// For a template of 512 MiB with 268 MiB of root image (74,501 distinct pages) that is
// 352,256 bytes, 4.73 a page. An open-addressing table of page numbers beside an array of
// checksums was the alternative: 8.4 bytes a page at 90 % load, with one cache miss less.
//
// The memory is a sealed memory file: no file can be truncated under it, no stray
// write can reach it, and the garbage collector does not know it.
type table struct {
	entries int    // immutable
	idBits  uint   // immutable, 1..IDBits
	low     []byte // immutable; entries
	fences  []byte // immutable; whole words
	samples []byte // immutable
	memory  *hostmem.Mapping
	length  units.Bytes // immutable; whole pages
}

// bitsFor returns how many bits the numbers below n need, at least 1.
func bitsFor(n uint32) uint { return uint(max(1, bits.Len32(n-1))) } //nolint:gosec // G115: 1..32

func (t *table) buckets() int { return 1 << t.idBits }

// newTable makes a table of records.
//
// Preconditions: records are sorted and differ; every ID is below 2^idBits; idBits <= IDBits.
func newTable(records []record, idBits uint) (*table, error) {
	t := &table{entries: len(records), idBits: idBits}
	lowLen := (len(records)*entryBytes + 7) &^ 7
	fenceLen := (len(records)+t.buckets())/wordBits*8 + 8
	samplesLen := (t.buckets() + samplePeriod - 1) / samplePeriod * sampleBytes
	used := units.Bytes(lowLen + fenceLen + samplesLen)
	t.length = (used + units.PageSize - 1) &^ (units.PageSize - 1)

	file, err := hostmem.NewMemfd("agentzip-library", t.length)
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // the mapping keeps the memory
	fill, err := hostmem.MapShared(file, t.length)
	if err != nil {
		return nil, err
	}
	t.cut(fill.Data, lowLen, fenceLen)
	t.fill(records)
	if err := errors.Join(fill.Close(), hostmem.Seal(file)); err != nil {
		return nil, fmt.Errorf("make table of public pages: %w", err)
	}
	if t.memory, err = hostmem.MapReadOnly(file, t.length); err != nil {
		return nil, err
	}
	t.cut(t.memory.Data, lowLen, fenceLen)
	return t, nil
}

func (t *table) cut(data []byte, lowLen, fenceLen int) {
	t.low, t.fences, t.samples = data[:lowLen], data[lowLen:lowLen+fenceLen], data[lowLen+fenceLen:]
}

func (t *table) fill(records []record) {
	next := 0
	for b := range t.buckets() {
		if b%samplePeriod == 0 {
			binary.LittleEndian.PutUint32(t.samples[b/samplePeriod*sampleBytes:], uint32(next+b)) //nolint:gosec // G115: at most 2^29
		}
		for next < len(records) && t.bucketOf(records[next].sum) == b {
			r := records[next]
			binary.LittleEndian.PutUint32(t.low[next*entryBytes:], r.sum<<t.idBits|uint32(r.id))
			next++
		}
		t.setFence(next + b)
	}
}

func (t *table) setFence(at int) {
	w := t.fences[at/wordBits*8:]
	binary.LittleEndian.PutUint64(w, binary.LittleEndian.Uint64(w)|1<<(at%wordBits))
}

func (t *table) bucketOf(sum uint32) int { return int(sum >> (32 - t.idBits)) }

func (t *table) word(i int) uint64  { return binary.LittleEndian.Uint64(t.fences[i*8:]) }
func (t *table) entry(i int) uint32 { return binary.LittleEndian.Uint32(t.low[i*entryBytes:]) }

// bucket returns the range of entries that may have the checksum.
func (t *table) bucket(sum uint32) (first, end int) {
	b := t.bucketOf(sum)
	sample := b / samplePeriod
	at := int(binary.LittleEndian.Uint32(t.samples[sample*sampleBytes:]))
	if skip := b - sample*samplePeriod; skip > 0 {
		at = t.afterFence(at, skip)
	}
	// The next fence ends the bucket: in this word or, seldom, a later one.
	i := at / wordBits
	w := t.word(i) >> (at % wordBits)
	first = at - b
	for end = first; ; {
		if w != 0 {
			return first, end + bits.TrailingZeros64(w)
		}
		end += wordBits - at%wordBits
		at = (i + 1) * wordBits
		i++
		w = t.word(i)
	}
}

// afterFence returns the position behind the n-th fence at or after at.
func (t *table) afterFence(at, n int) int {
	i := at / wordBits
	w := t.word(i) &^ (1<<(at%wordBits) - 1)
	for c := bits.OnesCount64(w); c < n; c = bits.OnesCount64(w) {
		n -= c
		i++
		w = t.word(i)
	}
	return i*wordBits + nthOne(w, n) + 1
}

// nthOne returns the position of the n-th 1 of w. It halves the part of w where that may
// be six times, without branches: no guess of the processor would be right often.
//
// Preconditions: 1 <= n <= OnesCount64(w).
func nthOne(w uint64, n int) int {
	at := 0
	for width := 32; width > 0; width /= 2 {
		c := bits.OnesCount64(w & (1<<width - 1))
		upper := (c - n) >> 63 // all ones if it is in the upper half, else 0
		n -= c & upper
		at += width & upper
		w >>= width & upper & 63
	}
	return at
}

// match returns the ID of entry i if its checksum is sum.
//
// Preconditions: i is in the bucket of sum.
func (t *table) match(i int, sum uint32) (ID, bool) {
	e := t.entry(i)
	return ID(e & (1<<t.idBits - 1)), e>>t.idBits == sum&(1<<(32-t.idBits)-1)
}

// has reports whether the page id has that checksum.
func (t *table) has(sum uint32, id ID) bool {
	want := sum<<t.idBits | uint32(id)
	for i, end := t.bucket(sum); i < end; i++ {
		if t.entry(i) == want {
			return true
		}
	}
	return false
}

// all yields the records in their order.
func (t *table) all(yield func(ID, uint32) bool) {
	next := 0
	for b := range t.buckets() {
		upper := uint32(b) << (32 - t.idBits) //nolint:gosec // G115: below 2^idBits
		for t.word((next+b)/wordBits)>>((next+b)%wordBits)&1 == 0 {
			e := t.entry(next)
			if !yield(ID(e&(1<<t.idBits-1)), upper|e>>t.idBits) {
				return
			}
			next++
		}
	}
}

var _ iter.Seq2[ID, uint32] = (*table)(nil).all

func (t *table) size() units.Bytes { return t.length }

func (t *table) close() error { return t.memory.Close() }
