package codec

import (
	"encoding/binary"

	"github.com/agentzip/agentzip/internal/units"
)

// The rules of Encode, each measured on 4,987 private pages (not zero, not equal
// to the template) of a Debian 12 guest after git, grep, find and pytest; the
// smallest of runs and dictionary block is 654 B a page on average (84.0 % saved;
// the dictionary trained on another guest, level 3 with full tables),
// a tenth is below 20 B, half below 300 B.
const (
	// DefaultLimit is the longest Data worth keeping: above it a page saves
	// less than 12 %, and pays a decode and a fault for that. Few are near: 4.2 % of
	// pages are above 3,600 B, 4.1 % above 4,090 B (compressed files, mostly).
	DefaultLimit = 3600

	// runsEnough ends the search: when runs are this short, zstd (10 us) is
	// not tried. A quarter of the pages end here, for 0.2 % more bytes; at
	// 100 B it would be 30 % of the pages and 0.5 %.
	runsEnough = 64

	// With a dictionary the plain block is not tried: the smaller of both would
	// be 0.5 % smaller on average, for 12 us more a page.

	// levelPlain: level 1 is 2.2 % larger and 3 us faster, level 4 1 % smaller
	// and 5 us slower.
	levelPlain = 3

	// levelDict with the small tables of zstd_cgo.go is 767 B at
	// 10 us and 142 KiB; level 1 is 784 B at 9.5 us, 3 is 767 B with 398 KiB
	// of tables, 6 is 739 B at 31 us.
	levelDict = 4
)

// Options of an Encoder. The zero value is ready for use.
type Options struct {
	// Limit is the longest Data worth keeping, in bytes; 0 = DefaultLimit.
	Limit int
}

// Encoder encodes pages. One goroutine at a time. What its methods return is
// valid until the next call.
type Encoder struct {
	limit int
	zstd  *compressor
	a, b  runBuffer // runs: the shorter one stays, the other is scratch
	frame frameBuffer
}

// NewEncoder returns an Encoder. Close frees its native memory.
func NewEncoder(o Options) *Encoder {
	if o.Limit <= 0 {
		o.Limit = DefaultLimit
	}
	return &Encoder{limit: min(o.Limit, MaxData), zstd: newCompressor(levelPlain)}
}

// Limit returns the longest Data that Encode keeps.
func (e *Encoder) Limit() int { return e.limit }

// Encode encodes page with the best of runs, runs against base (nil: a page of
// zeros) and a Zstandard block: the three encoders of the literature. dict may
// be nil. false: the page does not shrink below the limit. The caller sets the
// Operand of a KindDelta.
func (e *Encoder) Encode(page, base *units.Page, dict *Dictionary) (Encoded, bool) {
	best := Encoded{}
	n := e.limit + 1
	if k := encodeRuns(&e.a, page, nil, n-1); k >= 0 {
		best, n = Encoded{Kind: KindRLE, Data: e.a[:k]}, k
	}
	if base != nil && n > 0 {
		if k := encodeRuns(&e.b, page, base, n-1); k >= 0 {
			best, n = Encoded{Kind: KindDelta, Data: e.b[:k]}, k
		}
	}
	if n > runsEnough {
		if enc, ok := e.block(page, dict); ok && len(enc.Data) < n {
			best, n = enc, len(enc.Data)
		}
	}
	if n > e.limit {
		return Encoded{}, false
	}
	best.Sum = Checksum(page)
	return best, true
}

// Runs encodes page as runs against base (nil: zeros, KindRLE) if that takes at
// most limit bytes, which must not exceed MaxData. Sum and Operand are left to
// the caller, as in Block and BlockBase.
func (e *Encoder) Runs(page, base *units.Page, limit int) (Encoded, bool) {
	k := encodeRuns(&e.a, page, base, limit)
	if k < 0 {
		return Encoded{}, false
	}
	if base == nil {
		return Encoded{Kind: KindRLE, Data: e.a[:k]}, true
	}
	return Encoded{Kind: KindDelta, Data: e.a[:k]}, true
}

// Block encodes page as a Zstandard block, with dict unless it is nil or closed
// (then Kind is KindZstd). Operand is set. false: that does not shrink it.
func (e *Encoder) Block(page *units.Page, dict *Dictionary) (Encoded, bool) {
	return e.block(page, dict)
}

// BlockBase encodes page as a Zstandard block with base as prefix. false: that
// does not shrink it.
func (e *Encoder) BlockBase(page, base *units.Page) (Encoded, bool) {
	if !usableBase(base) {
		return Encoded{}, false
	}
	n := e.zstd.compressWithBase(&e.frame, page, base)
	body, ok := frameBody(e.frame[:n])
	return Encoded{Kind: KindZstdBase, Data: body}, ok
}

// Raw keeps page as it is: larger than a page, and right for any. It is for pages that must
// be kept although they do not shrink. Data aliases page.
func Raw(page *units.Page) Encoded {
	// A length has 12 bits where pages are kept, so that a page is one byte too long.
	return Encoded{Kind: KindRaw, Operand: uint32(page[MaxData]), Data: page[:MaxData]}
}

// usableBase reports whether base may be a prefix: a page that starts like a
// trained dictionary would be parsed as one by some decoders.
func usableBase(base *units.Page) bool { return binary.LittleEndian.Uint32(base[:]) != dictMagic }

func (e *Encoder) block(page *units.Page, dict *Dictionary) (Encoded, bool) {
	enc := Encoded{Kind: KindZstd}
	var t *dictTables
	if dict != nil && dict.enter() {
		defer dict.exit()
		enc.Kind, enc.Operand, t = KindZstdDict, uint32(dict.id), dict.tables
	}
	n := e.zstd.compress(&e.frame, page, t)
	var ok bool
	enc.Data, ok = frameBody(e.frame[:n])
	return enc, ok
}

// Close frees the native memory of e.
func (e *Encoder) Close() { e.zstd.free() }
