package codec

import "github.com/agentzip/agentzip/internal/units"

// Rules of Encode. The figures beside them: see bench_test.go.
const (
	// DefaultLimit is the longest Data worth keeping.
	DefaultLimit = 3600

	// runsEnough: runs this short end the search.
	runsEnough = 64

	levelPlain = 3
	levelDict  = 3
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
	a, b  [maxRuns]byte // runs: the shorter one stays, the other is scratch
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
