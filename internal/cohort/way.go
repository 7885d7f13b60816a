package cohort

import "github.com/agentzip/agentzip/internal/codec"

// A Way is how a page is kept.
type Way uint8

// Ways. The first ones have the values of the codec's kinds.
const (
	WayRLE     = Way(codec.KindRLE)
	WayDelta   = Way(codec.KindDelta)    // runs against a base
	WayZstd    = Way(codec.KindZstd)     // a block of its own
	WayDict    = Way(codec.KindZstdDict) // a block with a dictionary
	WayBase    = Way(codec.KindZstdBase) // a block against a base
	WayRaw     = Way(codec.KindRaw)      // as it is
	WayPublic  = Way(codec.Kinds)        // a reference to a public page
	WayShared  = WayPublic + 1           // a reference to an entry that was there
	WaySimilar = WayPublic + 2           // in sets only: a similar page of the pool as base
	NumWays    = int(WaySimilar) + 1
)

// String returns the word used in metrics and tables.
func (w Way) String() string {
	switch w {
	case WayPublic:
		return "public"
	case WayShared:
		return "shared"
	case WaySimilar:
		return "similar"
	default:
		return codec.Kind(w).String()
	}
}

// A WaySet is a set of ways.
type WaySet uint16

// Ways makes a set.
func Ways(ways ...Way) WaySet {
	var s WaySet
	for _, w := range ways {
		s |= 1 << w
	}
	return s
}

// Has reports whether w is in the set.
func (s WaySet) Has(w Way) bool { return s&(1<<w) != 0 }
