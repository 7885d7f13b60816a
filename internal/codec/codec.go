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
	KindDelta                    // runs, against the template's page of the same frame
	KindZstd                     // Zstandard block without dictionary
	KindZstdDict                 // Zstandard block with the dictionary Encoded.Dict
)

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
	}
	return "unknown"
}

// DictID names a dictionary within its cohort. 0 is no dictionary.
type DictID uint32

// MaxData is the longest Encoded.Data any Encoder makes or any Decoder takes,
// in bytes.
const MaxData = units.PageSize - 1

// Encoded is one encoded page.
type Encoded struct {
	Kind Kind
	Dict DictID // 0 unless Kind is KindZstdDict
	Sum  uint32 // Checksum of the plain page
	Data []byte // 0..MaxData bytes; empty: equal to the base (zeros, or the template page)
}

// Errors of Decode. All mean that dst holds no valid page.
var (
	// ErrCorrupt: the bytes are not what any Encoder wrote, or they decode to
	// a page whose checksum differs from Encoded.Sum.
	ErrCorrupt = errors.New("encoded page is corrupt")
	// ErrDictionary: the page needs a dictionary that was not given, is
	// another one, or is closed.
	ErrDictionary = errors.New("wrong or missing dictionary")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC-32C of a plain page.
func Checksum(p *units.Page) uint32 { return crc32.Checksum(p[:], castagnoli) }

// IsZero reports whether every byte of p is zero.
func IsZero(p *units.Page) bool { return *p == units.Page{} }
