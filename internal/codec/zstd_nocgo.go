//go:build !cgo

package codec

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"

	"github.com/agentzip/agentzip/internal/units"
)

// The twin of zstd_cgo.go over klauspost/compress: the same frames, slower
// (decodes about 2x, encodes 3-5x).

// encoderOptions make a frame that frameBody takes.
func encoderOptions(level int) []zstd.EOption {
	return []zstd.EOption{
		zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(level)),
		zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false),
		zstd.WithSingleSegment(false),
		zstd.WithWindowSize(128 << 10),
		zstd.WithLowerEncoderMem(true),
	}
}

func decoderOptions() []zstd.DOption {
	return []zstd.DOption{
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderLowmem(true),
		zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(1 << 20),
	}
}

type compressor struct{ enc *zstd.Encoder }

func newCompressor(level int) *compressor {
	enc, err := zstd.NewWriter(nil, encoderOptions(level)...)
	if err != nil {
		panic(fmt.Sprintf("codec: zstd encoder options: %v", err))
	}
	return &compressor{enc}
}

func (c *compressor) free() { c.enc = nil }

func (c *compressor) size() int { return 0 } // on the Go heap, seen by its own figures

// compress writes a whole frame to dst and returns its length, 0 if it failed.
func (c *compressor) compress(dst *frameBuffer, page *units.Page, tables *dictTables) int {
	enc := c.enc
	if tables != nil {
		enc = tables.enc
	}
	frame := enc.EncodeAll(page[:], dst[:0])
	if len(frame) > len(dst) {
		return 0 // outgrew dst: not worth keeping
	}
	return len(frame)
}

// compressWithBase is compress with base as prefix. It makes an encoder for the
// one page: correct, and slow.
func (c *compressor) compressWithBase(dst *frameBuffer, page, base *units.Page) int {
	enc, err := zstd.NewWriter(nil, append(encoderOptions(levelPlain), zstd.WithEncoderDictRaw(prefixID, base[:]))...)
	if err != nil {
		return 0
	}
	frame := enc.EncodeAll(page[:], dst[:0])
	if len(frame) > len(dst) {
		return 0
	}
	return len(frame)
}

// prefixID names the raw dictionary that stands for a prefix; klauspost/compress
// finds dictionaries by id only. It is in no stored frame.
const prefixID = 1

type decompressor struct{ dec *zstd.Decoder }

func newDecompressor() *decompressor {
	dec, err := zstd.NewReader(nil, decoderOptions()...)
	if err != nil {
		panic(fmt.Sprintf("codec: zstd decoder options: %v", err))
	}
	return &decompressor{dec}
}

func (d *decompressor) free() {
	d.dec.Close()
	d.dec = nil
}

func (d *decompressor) size() int { return 0 }

// decompress decodes the block body to dst and reports whether it filled it.
func (d *decompressor) decompress(dst *units.Page, body []byte, scratch *frameBuffer, tables *dictTables) bool {
	dec, id := d.dec, uint32(0)
	if tables != nil {
		dec, id = tables.dec, tables.id
	}
	out, err := dec.DecodeAll(appendFrame(scratch[:0], body, id), dst[:0])
	return err == nil && len(out) == units.PageSize && &out[0] == &dst[0]
}

// decompressWithBase is decompress with base as prefix; it makes a decoder for
// the one page.
func (d *decompressor) decompressWithBase(dst *units.Page, body []byte, scratch *frameBuffer, base *units.Page) bool {
	dec, err := zstd.NewReader(nil, append(decoderOptions(), zstd.WithDecoderDictRaw(prefixID, base[:]))...)
	if err != nil {
		return false
	}
	defer dec.Close()
	out, err := dec.DecodeAll(appendFrame(scratch[:0], body, prefixID), dst[:0])
	return err == nil && len(out) == units.PageSize && &out[0] == &dst[0]
}

// dictTables is a dictionary digested for both directions.
type dictTables struct {
	n   int
	id  uint32 // the id inside the dictionary, by which DecodeAll finds it
	enc *zstd.Encoder
	dec *zstd.Decoder
}

// newDictTables copies raw. level is the level of frames made with it.
func newDictTables(raw []byte, level int) (*dictTables, error) {
	raw = append([]byte(nil), raw...)
	t := &dictTables{n: len(raw), id: binary.LittleEndian.Uint32(raw[4:])}
	if t.id == 0 {
		return nil, errors.New("the dictionary has no id inside")
	}
	var err error
	if t.enc, err = zstd.NewWriter(nil, append(encoderOptions(level), zstd.WithEncoderDict(raw))...); err != nil {
		return nil, err
	}
	if t.dec, err = zstd.NewReader(nil, append(decoderOptions(), zstd.WithDecoderDicts(raw))...); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *dictTables) free() {
	t.dec.Close()
	*t = dictTables{}
}

func (t *dictTables) size() int { return t.n }
