//go:build !cgo

package codec

import (
	"github.com/klauspost/compress/dict"
	"github.com/klauspost/compress/zstd"

	"github.com/agentzip/agentzip/internal/units"
)

// train returns the dictionary, nil if the builder refuses the samples.
func train(pages []units.Page, size int) []byte {
	in := make([][]byte, len(pages))
	for i := range pages {
		in[i] = pages[i][:]
	}
	raw, err := dict.BuildZstdDict(in, dict.Options{
		MaxDictSize: size,
		HashBytes:   6,
		ZstdDictID:  dictInnerID(pages),
		ZstdLevel:   zstd.EncoderLevelFromZstd(levelDict),
	})
	if err != nil {
		return nil
	}
	return raw
}

// dictInnerID returns an id in the range RFC 8878 leaves to private use
// (ZDICT draws a random one from it).
func dictInnerID(pages []units.Page) uint32 {
	return 32768 + (Checksum(&pages[0])^uint32(len(pages)))%(1<<30)
}
