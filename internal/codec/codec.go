// Package codec turns a guest page into few bytes and back. Pure functions of
// their arguments: no state but scratch memory, no knowledge of sandboxes.
//
//	page --Encode--> Encoded{Kind, Dict, Sum, Data} --Decode--> the same page, or an error
//
// An Encoder and a Decoder each belong to one goroutine at a time; a
// Dictionary is safe for concurrent use.
package codec

import (
	"errors"
	"hash/crc32"

	"github.com/agentzip/agentzip/internal/units"
)

// Kind says which encoder made an Encoded, and so which decoder reads it.
// Values are stored in pools: never renumber.
type Kind uint8

// The encoders.
const (
	KindRLE      Kind = iota + 1 // runs, against a page of zeros
	KindDelta                    // runs, against the base page
	KindZstd                     // Zstandard block without dictionary
	KindZstdDict                 // Zstandard block with a dictionary
	KindZstdBase                 // Zstandard block with the base page as prefix
	KindRaw                      // the page as it is; its last byte is the operand
)

// Kinds is one more than the highest Kind.
const Kinds = int(KindRaw) + 1

// String returns the word used in metrics and logs.
func (k Kind) String() string {
	switch k {
	case KindRLE:
		return "rle"
	case KindDelta:
		return "delta"
	case KindZstd:
		return "zstd"
	case KindZstdDict:
		return "zstd-dict"
	case KindZstdBase:
		return "zstd-base"
	case KindRaw:
		return "raw"
	}
	return "unknown"
}

// HasBase reports whether the page is encoded against a base page.
func (k Kind) HasBase() bool { return k == KindDelta || k == KindZstdBase }

// HasOperand reports whether Encoded.Operand means something.
func (k Kind) HasOperand() bool { return k == KindZstdDict || k == KindRaw || k.HasBase() }

// DictID names a dictionary within its cohort. 0 is no dictionary.
type DictID uint32

// MaxData is the longest Encoded.Data any Encoder makes or any Decoder takes,
// in bytes.
const MaxData = units.PageSize - 1

// Encoded is one encoded page.
type Encoded struct {
	Kind    Kind
	Operand uint32 // KindZstdDict: the DictID. KindDelta, KindZstdBase: the caller's name of the base, opaque here. KindRaw: the last byte. Else 0
	Sum     uint32 // Checksum of the plain page
	Data    []byte // 0..MaxData bytes; empty: equal to the base (zeros, for KindRLE)
}

// Dict returns the dictionary that the page needs, 0 for none.
func (e Encoded) Dict() DictID {
	if e.Kind == KindZstdDict {
		return DictID(e.Operand)
	}
	return 0
}

// Errors of Decode. All mean that dst holds no valid page.
var (
	// ErrCorrupt: the bytes are not what any Encoder wrote, or they decode to
	// a page whose checksum differs from Encoded.Sum.
	ErrCorrupt = errors.New("encoded page is corrupt")
	// ErrDictionary: the page needs a dictionary that was not given, is
	// another one, or is closed.
	ErrDictionary = errors.New("wrong or missing dictionary")
	// ErrBase: the page needs a base page and none was given.
	ErrBase = errors.New("missing base page")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC-32C of a plain page.
func Checksum(p *units.Page) uint32 { return crc32.Checksum(p[:], castagnoli) }

// IsZero reports whether every byte of p is zero.
func IsZero(p *units.Page) bool { return *p == units.Page{} }
