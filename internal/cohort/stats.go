package cohort

import (
	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// Stats is an account of a cohort. Everything that is kept because of it is in Footprint,
// the pagers' page tables and the library, which all cohorts share, excepted.
type Stats struct {
	Pool         pool.Stats
	Index        units.Bytes // by content and by similarity
	Dictionaries units.Bytes
	Dictionary   dictionary.Stats
	Footprint    units.Bytes
}

// Stats returns the account; each figure is right for some moment of the call.
func (c *Cohort) Stats() Stats {
	s := Stats{Pool: c.pool.Stats(), Index: c.equal.size() + c.similar.size()}
	if c.dict != nil {
		s.Dictionary = c.dict.Stats()
		s.Dictionaries = s.Dictionary.Dictionaries + s.Dictionary.Reservoir
	}
	s.Footprint = s.Pool.Footprint + s.Index + s.Dictionaries
	return s
}

// notePut keeps the shares of what was put into the pool.
func (c *Cohort) notePut(enc codec.Encoded) {
	c.putBytes.Add(int64(len(enc.Data)))
	if !enc.Kind.HasBase() {
		c.putPlain.Add(1)
		c.plain.Add(1)
	}
	if enc.Kind == codec.KindZstd || enc.Kind == codec.KindZstdDict {
		c.putBlocks.Add(int64(len(enc.Data)))
	}
}

// atStake estimates the bytes in the pool that a better dictionary would shrink: blocks
// without a base have the share of what is there that they had of what was put.
func (c *Cohort) atStake() units.Bytes {
	all := c.putBytes.Load()
	if all == 0 {
		return 0
	}
	return units.Bytes(float64(c.pool.Stats().Live) * float64(c.putBlocks.Load()) / float64(all))
}
