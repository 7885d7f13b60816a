package codec

import (
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/units"
)

// MinSamples is the fewest pages Train takes. ZDICT refuses fewer than some
// ten samples; below a few hundred the dictionary knows its samples by heart
// and no other page.
const MinSamples = 256

// ErrSamples: the samples are too few or too alike for a dictionary.
var ErrSamples = errors.New("too few or too alike samples")

// Train makes a dictionary of at most size bytes from pages, for
// NewDictionary. It takes seconds of one core and cannot be interrupted: off
// the fault path only.
func Train(pages []units.Page, size int) ([]byte, error) {
	if len(pages) < MinSamples {
		return nil, fmt.Errorf("train dictionary on %d pages: %w", len(pages), ErrSamples)
	}
	if size < minDict || size > maxDictLen {
		return nil, fmt.Errorf("train dictionary: size %d is not in [%d, %d]", size, minDict, maxDictLen)
	}
	raw := train(pages, size)
	if len(raw) < minDict {
		return nil, fmt.Errorf("train dictionary on %d pages: %w", len(pages), ErrSamples)
	}
	return raw, nil
}
