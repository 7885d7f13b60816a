// Package cohort holds what the siblings of one trust domain share to make
// their pages small: today, Zstandard dictionaries.
package cohort

import (
	"context"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

// Options of a Cohort. The zero value is ready for use.
type Options struct {
	DictSize int // bytes of a trained dictionary; 0 = 64 KiB
	Samples  int // pages in the reservoir; 0 = the default
}

// Stats is an account of a cohort.
type Stats struct {
	Current      codec.DictID
	IDs          []codec.DictID // alive, ascending
	Dictionaries units.Bytes    // native memory of all alive
	Reservoir    units.Bytes    // memory of the samples
	Trainings    int            // finished with a new dictionary
	Refusals     int            // refused: too few or too alike samples, or no better than the current one
}

// Cohort is safe for concurrent use.
type Cohort struct{}

// New returns a cohort without a dictionary.
func New(o Options) *Cohort { return &Cohort{} }

// Sample offers a private page for training.
func (c *Cohort) Sample(p *units.Page) {}

// Dictionary returns the current one, or nil before the first training.
func (c *Cohort) Dictionary() *codec.Dictionary { return nil }

// Lookup returns a live dictionary, or nil. Lock-free.
func (c *Cohort) Lookup(id codec.DictID) *codec.Dictionary { return nil }

// Retain notes that one more page names id. false: that dictionary is already
// gone (it was replaced after the caller asked for it); the page must not be kept.
// Retain(0) is a no-op that reports true.
func (c *Cohort) Retain(id codec.DictID) bool { return true }

// Release undoes one Retain. Release(0) is a no-op.
func (c *Cohort) Release(id codec.DictID) {}

// Train trains a dictionary from the samples and makes it current.
func (c *Cohort) Train(ctx context.Context) error { return nil }

// Run trains whenever the rule of this package says so, until ctx ends.
func (c *Cohort) Run(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// Stats returns an account.
func (c *Cohort) Stats() Stats { return Stats{} }

// Close frees all dictionaries and samples.
func (c *Cohort) Close() {}
