package pool

import (
	"encoding/binary"
	"math/bits"

	"github.com/agentzip/agentzip/internal/codec"
)

// A word is an entry of the handle table.
//
//	bits 0-15   references n
//	bits 16-31  the complement of n
//	bits 32-62  place: of the entry, in units from the arena's start; without an entry: the next free handle
//	bit 63      makes the number of set bits from 32 on odd
//
// Zeros, which a hole reads as, fail both checks.
type word uint64

const (
	wordSize  = 8
	placeBits = 31

	// unit is the granule of entries: a place of 31 bits reaches 4 GiB, and
	// rounding costs half a byte an entry; 16 B would cost 8 B, 2 % of a guest's
	// entries.
	unit = 2
)

func makeWord(n uint16, place uint32) word {
	place |= uint32(^bits.OnesCount32(place)&1) << placeBits
	return word(place)<<32 | word(^n)<<16 | word(n)
}

func (w word) valid() bool {
	return uint16(w)^uint16(w>>16) == 0xffff && bits.OnesCount32(uint32(w>>32))&1 == 1
}

func (w word) refs() uint16                { return uint16(w) }
func (w word) place() uint32               { return uint32(w>>32) & (1<<placeBits - 1) }
func (w word) withRefs(n uint16) word      { return w&^0xffffffff | word(^n)<<16 | word(n) }
func (w word) withPlace(place uint32) word { return makeWord(w.refs(), place) }

// The header of an entry.
//
//	0 checksum, mixed (4) | 4 shape (2) | [6 operand (4)] | bytes
//
// The shape is the length, above it the kind, and a bit that makes the number of
// set bits odd: a wrong length must not reach the accounts of the segment.
const (
	offSum     = 0
	offShape   = 4
	offOperand = 6
	headPlain  = 6
	headOp     = 10

	lengthBits = 12 // codec.MaxData is 1<<12 - 1
	kindBits   = 3
)

const (
	_ = uint(1<<lengthBits - 1 - codec.MaxData) // a length fits
	_ = uint(1<<kindBits - codec.Kinds)         // a kind fits
)

func headerSize(k codec.Kind) int {
	if k.HasOperand() {
		return headOp
	}
	return headPlain
}

// entrySize returns the bytes of arena that an entry of n encoded bytes takes.
func entrySize(k codec.Kind, n int) int {
	return (headerSize(k) + n + unit - 1) &^ (unit - 1)
}

// mix returns what the checksum is stored mixed with. For two calls that differ
// in one argument it differs, always: each step is a bijection.
func mix(h Handle, shape uint16, operand uint32) uint32 {
	x := uint32(h)*0x9e3779b1 ^ uint32(shape)*0xc2b2ae35 ^ operand*0x85ebca6b
	x = (x ^ x>>16) * 0x7feb352d
	x = (x ^ x>>15) * 0x846ca68b
	return x ^ x>>16
}

// writeEntry writes the entry of h to the start of mem and returns the length of
// its header.
func writeEntry(mem []byte, h Handle, enc codec.Encoded) (head int) {
	shape := uint16(enc.Kind)<<lengthBits | uint16(len(enc.Data))
	shape |= uint16(^bits.OnesCount16(shape)&1) << (lengthBits + kindBits)
	head = headPlain
	var operand uint32
	if enc.Kind.HasOperand() {
		head, operand = headOp, enc.Operand
		binary.LittleEndian.PutUint32(mem[offOperand:], operand)
	}
	binary.LittleEndian.PutUint32(mem[offSum:], enc.Sum^mix(h, shape, operand))
	binary.LittleEndian.PutUint16(mem[offShape:], shape)
	copy(mem[head:], enc.Data)
	return head
}

// readEntry returns the entry of h at off of the arena; Data aliases it. false:
// nothing that Put writes lies there. It takes any off and any bytes.
func (p *Pool) readEntry(h Handle, off int) (enc codec.Encoded, ok bool) {
	from := off % segmentSize
	if from > segmentSize-headPlain || off >= len(p.arena) {
		return codec.Encoded{}, false
	}
	mem := p.arena[off : off+headPlain]
	shape := binary.LittleEndian.Uint16(mem[offShape:])
	kind := codec.Kind(shape >> lengthBits & (1<<kindBits - 1))
	if bits.OnesCount16(shape)&1 == 0 || kind == 0 || int(kind) >= codec.Kinds {
		return codec.Encoded{}, false
	}
	head := headerSize(kind)
	n := head + int(shape&(1<<lengthBits-1))
	if from+n > segmentSize {
		return codec.Encoded{}, false
	}
	enc.Kind = kind
	if head == headOp {
		enc.Operand = binary.LittleEndian.Uint32(p.arena[off+offOperand:])
	}
	enc.Sum = binary.LittleEndian.Uint32(mem[offSum:]) ^ mix(h, shape, enc.Operand)
	enc.Data = p.arena[off+head : off+n : off+n]
	return enc, true
}
