package codec

import "github.com/agentzip/agentzip/internal/units"

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

// Encoder encodes pages. One goroutine at a time.
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

// Encode encodes page. template is the template's page of the same frame, nil
// for a hole; dict may be nil. false: the page does not shrink below the
// limit and stays resident. Data is valid until the next Encode.
func (e *Encoder) Encode(page, template *units.Page, dict *Dictionary) (Encoded, bool) {
	best := Encoded{}
	n := e.limit + 1
	if k := encodeRuns(&e.a, page, nil, n-1); k >= 0 {
		best, n = Encoded{Kind: KindRLE, Data: e.a[:k]}, k
	}
	if template != nil && n > 0 {
		if k := encodeRuns(&e.b, page, template, n-1); k >= 0 {
			best, n = Encoded{Kind: KindDelta, Data: e.b[:k]}, k
		}
	}
	if n > runsEnough {
		if k, kind, id := e.block(page, dict); len(k) < n && k != nil {
			best, n = Encoded{Kind: kind, Dict: id, Data: k}, len(k)
		}
	}
	if n > e.limit {
		return Encoded{}, false
	}
	best.Sum = Checksum(page)
	return best, true
}

// block encodes page with zstd; nil if that does not shrink it.
func (e *Encoder) block(page *units.Page, dict *Dictionary) ([]byte, Kind, DictID) {
	kind, id := KindZstd, DictID(0)
	var t *dictTables
	if dict != nil && dict.enter() {
		defer dict.exit()
		kind, id, t = KindZstdDict, dict.id, dict.tables
	}
	n := e.zstd.compress(&e.frame, page, t)
	body, ok := frameBody(e.frame[:n])
	if !ok {
		return nil, 0, 0
	}
	return body, kind, id
}

// Close frees the native memory of e.
func (e *Encoder) Close() { e.zstd.free() }
