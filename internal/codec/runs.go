package codec

import (
	"encoding/binary"
	"math/bits"

	"github.com/agentzip/agentzip/internal/units"
)

// The run coder behind KindRLE and KindDelta. A page is written as steps, each
//
//	control byte | [more literals] | literals | [more run]
//
// control = literals (3 bits, high) | source (2 bits) | run (3 bits). 7 in a
// count means that a varint with the rest follows. The literals come first,
// then a run of bytes that need no storing because they equal
//
//	base   the base page at the same place: zeros (RLE) or the template (delta)
//	zero   nothing: the bytes are zero. In RLE, where base says that: 16 bytes earlier
//	byte   the byte before
//	word   the byte 8 earlier: arrays of pointers and counters
//
// What follows the last step equals the base. So a page equal to its base is
// no bytes at all, and a page with one changed counter about six.

type source uint8

const (
	fromBase source = iota
	fromZero
	fromByte
	fromWord
)

const (
	countMore = 7                     // the 3-bit count that says "a varint follows"
	minRun    = 3                     // shorter runs cost as much as the literals they replace
	maxRuns   = 2*units.PageSize + 64 // what a page may need at worst, see appendStep
)

var zeroPage units.Page

// encodeRuns writes page as steps against base (nil: zeros) to dst and returns
// their length; -1 as soon as they would exceed limit.
// Preconditions: limit <= MaxData.
func encodeRuns(dst *[maxRuns]byte, page, base *units.Page, limit int) int {
	delta := base != nil
	if !delta {
		base = &zeroPage
	}
	out, lit := 0, 0 // lit: where the pending literals start
	for i := 0; i < units.PageSize; {
		n, src := longestRun(page, base, i, delta)
		if n < minRun {
			i++
			continue
		}
		if i+n == units.PageSize && src == fromBase && i == lit {
			return out // the implied end
		}
		out = appendStep(dst, out, page[lit:i], src, n)
		if out > limit {
			return -1
		}
		i += n
		lit = i
	}
	if lit < units.PageSize {
		out = appendStep(dst, out, page[lit:], fromBase, 0)
	}
	if out > limit {
		return -1
	}
	return out
}

// longestRun returns the source that covers most bytes of page from i on.
func longestRun(page, base *units.Page, i int, delta bool) (int, source) {
	n, src := matchLen(page, base, i, i), fromBase
	if n >= 64 {
		return n, src
	}
	if i >= 8 {
		if m := matchLen(page, page, i, i-8); m > n {
			n, src = m, fromWord
		}
	}
	if i >= 1 {
		if m := matchLen(page, page, i, i-1); m > n {
			n, src = m, fromByte
		}
	}
	if delta {
		if m := matchLen(page, &zeroPage, i, i); m > n {
			n, src = m, fromZero
		}
	} else if i >= 16 {
		if m := matchLen(page, page, i, i-16); m > n {
			n, src = m, fromZero
		}
	}
	return n, src
}

// matchLen returns how many bytes of a from i on equal those of b from j on.
// Preconditions: j <= i < PageSize.
func matchLen(a, b *units.Page, i, j int) int {
	n := 0
	for i+n+8 <= units.PageSize {
		x := binary.LittleEndian.Uint64(a[i+n:]) ^ binary.LittleEndian.Uint64(b[j+n:])
		if x != 0 {
			return n + bits.TrailingZeros64(x)/8
		}
		n += 8
	}
	for i+n < units.PageSize && a[i+n] == b[j+n] {
		n++
	}
	return n
}

// appendStep writes one step at out and returns its end. A step is at most
// 1 + 2 + len(lits) + 2 bytes and covers at least minRun+len(lits) bytes of
// the page (but for the last), so a page is less than maxRuns.
func appendStep(dst *[maxRuns]byte, out int, lits []byte, src source, run int) int {
	c := byte(min(len(lits), countMore))<<5 | byte(src)<<3 | byte(min(run, countMore))
	dst[out] = c
	out++
	if len(lits) >= countMore {
		out += binary.PutUvarint(dst[out:], uint64(len(lits)-countMore))
	}
	out += copy(dst[out:], lits)
	if run >= countMore {
		out += binary.PutUvarint(dst[out:], uint64(run-countMore))
	}
	return out
}

// decodeRuns writes the page that data describes to dst and reports whether
// data is well formed. base nil: zeros (RLE).
// Preconditions: dst != base.
func decodeRuns(dst *units.Page, data []byte, base *units.Page) bool {
	delta := base != nil
	if delta {
		*dst = *base
	} else {
		clear(dst[:])
	}
	pos := 0 // bytes of the page done
	for len(data) > 0 {
		c := data[0]
		data = data[1:]
		lits, run := int(c>>5), int(c&7)
		if lits == countMore {
			n, k := uvarint(data)
			if k == 0 {
				return false
			}
			lits += n
			data = data[k:]
		}
		if lits > len(data) || lits > units.PageSize-pos {
			return false
		}
		pos += copy(dst[pos:], data[:lits])
		data = data[lits:]
		if run == countMore {
			n, k := uvarint(data)
			if k == 0 {
				return false
			}
			run += n
			data = data[k:]
		}
		if run > units.PageSize-pos {
			return false
		}
		switch src := source(c >> 3 & 3); src {
		case fromBase:
		case fromByte:
			if pos < 1 {
				return false
			}
			fill(dst[pos:pos+run], dst[pos-1])
		case fromWord:
			if !repeat(dst, pos, run, 8) {
				return false
			}
		case fromZero:
			if delta {
				clear(dst[pos : pos+run])
			} else if !repeat(dst, pos, run, 16) {
				return false
			}
		}
		pos += run
	}
	return true
}

// uvarint reads a count below 1<<14 and the number of its bytes, 0 if data
// holds none. Counts are below PageSize: two bytes are enough.
func uvarint(data []byte) (n, k int) {
	if len(data) == 0 {
		return 0, 0
	}
	if data[0] < 0x80 {
		return int(data[0]), 1
	}
	if len(data) < 2 || data[1] >= 0x80 {
		return 0, 0
	}
	return int(data[0]&0x7f) | int(data[1])<<7, 2
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// repeat copies run bytes at pos from back bytes earlier, which may overlap.
func repeat(dst *units.Page, pos, run, back int) bool {
	if pos < back {
		return false
	}
	start, end := pos-back, pos+run
	for pos < end { // the repeated part doubles
		pos += copy(dst[pos:end], dst[start:pos])
	}
	return true
}
