package codec

import (
	"encoding/binary"

	"github.com/agentzip/agentzip/internal/units"
)

// What is stored of a Zstandard frame. A frame of one page is
//
//	magic (4) | descriptor (1) | window (1) | [dictionary id] | [content size] | block header (3) | block
//
// and all but the block is the same for every page, or follows from the
// block's length. So only the body of its single compressed block is stored
// (9-15 bytes less, of ~450) and the decoder puts a header back: RFC 8878,
// sections 3.1.1.1 and 3.1.1.2. Both libraries read the result, so a pool
// written by a cgo build is readable by a !cgo build and the reverse.

const (
	frameMagic = 0xFD2FB528 // RFC 8878 section 3.1.1

	// frameWindow is the window descriptor put back: 128 KiB. It must cover
	// the page and every window an encoder may have assumed; it costs nothing,
	// decoders write straight to the page.
	frameWindow = (17 - 10) << 3

	fhdChecksum      = 1 << 2
	fhdSingleSegment = 1 << 5
	fhdSize2         = 1 << 6 // content size in 2 bytes, minus 256
	fhdDict4         = 3      // dictionary id in 4 bytes

	blockHeaderLen  = 3
	blockCompressed = 2
	maxHeader       = 4 + 1 + 1 + 4 + 2 + blockHeaderLen
)

// A frameBuffer holds any frame of one page, also one that grew
// (ZSTD_compressBound(4096) is 4,156).
type frameBuffer [units.PageSize + 128]byte

// appendFrame appends the frame around body. dictID is the id inside the
// dictionary (not a DictID), 0 to leave it out: the C library is told the
// dictionary, klauspost/compress looks it up by that id.
// Preconditions: len(body) <= MaxData and dst has room for maxHeader more.
func appendFrame(dst, body []byte, dictID uint32) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, frameMagic)
	if dictID != 0 {
		dst = append(dst, fhdSize2|fhdDict4, frameWindow)
		dst = binary.LittleEndian.AppendUint32(dst, dictID)
	} else {
		dst = append(dst, fhdSize2, frameWindow)
	}
	dst = binary.LittleEndian.AppendUint16(dst, units.PageSize-256)
	h := uint32(len(body))<<3 | blockCompressed<<1 | 1 // 1: the last block
	dst = append(dst, byte(h), byte(h>>8), byte(h>>16))
	return append(dst, body...)
}

// frameBody returns the body of the single compressed block of frame. false:
// the frame has another form, which means that zstd did not shrink the page
// (a raw block) or that the page is one byte repeated (RLE does better).
func frameBody(frame []byte) ([]byte, bool) {
	if len(frame) < 6 || binary.LittleEndian.Uint32(frame) != frameMagic {
		return nil, false
	}
	fhd := frame[4]
	if fhd&fhdChecksum != 0 {
		return nil, false
	}
	n := 5
	if fhd&fhdSingleSegment == 0 {
		n++ // window descriptor
	} else if fhd>>6 == 0 {
		n++ // content size in 1 byte
	}
	n += [4]int{0, 1, 2, 4}[fhd&3]  // dictionary id
	n += [4]int{0, 2, 4, 8}[fhd>>6] // content size
	if len(frame) < n+blockHeaderLen {
		return nil, false
	}
	h := uint32(frame[n]) | uint32(frame[n+1])<<8 | uint32(frame[n+2])<<16
	body := frame[n+blockHeaderLen:]
	if h&7 != blockCompressed<<1|1 || int(h>>3) != len(body) {
		return nil, false
	}
	return body, true
}
