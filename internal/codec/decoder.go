package codec

import (
	"fmt"

	"github.com/agentzip/agentzip/internal/units"
)

// Decoder decodes pages. One goroutine at a time.
type Decoder struct {
	zstd  *decompressor
	frame frameBuffer
}

// NewDecoder returns a Decoder. Close frees its native memory.
func NewDecoder() *Decoder { return &Decoder{zstd: newDecompressor()} }

// Decode writes the page that enc encodes to dst and checks its checksum.
// base and dict are what the encoder was given; those that the kind does not
// need are ignored. It never panics, never writes outside dst and does not
// allocate, whatever enc holds. After an error (ErrCorrupt, ErrDictionary,
// ErrBase) dst holds garbage.
// Preconditions: dst is not base.
func (d *Decoder) Decode(dst *units.Page, enc Encoded, base *units.Page, dict *Dictionary) error {
	if len(enc.Data) > MaxData {
		return errLength
	}
	switch enc.Kind {
	case KindRLE:
		if !decodeRuns(dst, enc.Data, nil) {
			return errRuns
		}
	case KindDelta:
		if base == nil {
			return ErrBase
		}
		if !decodeRuns(dst, enc.Data, base) {
			return errRuns
		}
	case KindZstd:
		if !d.zstd.decompress(dst, enc.Data, &d.frame, nil) {
			return errBlock
		}
	case KindZstdDict:
		if dict == nil || dict.id != enc.Dict() || !dict.enter() {
			return ErrDictionary
		}
		ok := d.zstd.decompress(dst, enc.Data, &d.frame, dict.tables)
		dict.exit()
		if !ok {
			return errBlock
		}
	case KindZstdBase:
		if base == nil {
			return ErrBase
		}
		if !usableBase(base) || !d.zstd.decompressWithBase(dst, enc.Data, &d.frame, base) {
			return errBlock
		}
	case KindRaw:
		if len(enc.Data) != MaxData || enc.Operand > 0xff {
			return errRaw
		}
		copy(dst[:], enc.Data)
		dst[MaxData] = byte(enc.Operand)
	default:
		return errKind
	}
	if Checksum(dst) != enc.Sum {
		return errSum
	}
	return nil
}

// Each wraps ErrCorrupt; made once, so that Decode does not allocate.
var (
	errLength = fmt.Errorf("longer than a page: %w", ErrCorrupt)
	errKind   = fmt.Errorf("unknown encoder: %w", ErrCorrupt)
	errRuns   = fmt.Errorf("malformed runs: %w", ErrCorrupt)
	errRaw    = fmt.Errorf("a page that was kept as it is has another length: %w", ErrCorrupt)
	errBlock  = fmt.Errorf("malformed zstd block: %w", ErrCorrupt)
	errSum    = fmt.Errorf("checksum differs: %w", ErrCorrupt)
)

// Close frees the native memory of d.
func (d *Decoder) Close() { d.zstd.free() }
