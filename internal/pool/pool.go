// Package pool keeps encoded pages in memory that the garbage collector never scans.
package pool

import (
	"errors"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

// ErrFull: storing the page would exceed the limit. Nothing was stored.
var ErrFull = errors.New("pool is full")

// Handle names an entry: its offset in the arena divided by 16. 0 is none;
// always below 1<<29.
type Handle uint32

// Options of a Pool.
type Options struct {
	Limit units.Bytes // hard limit of Footprint; 0 = the arena's 8 GiB
}

// Stats is an account of the pool. Footprint = Live + Meta + Slack.
type Stats struct {
	Entries   int64
	Live      units.Bytes // encoded bytes
	Meta      units.Bytes // entry headers, segment tables, page tables
	Slack     units.Bytes // the rest
	Resident  units.Bytes // arena pages in memory
	Footprint units.Bytes // Resident + tables outside the arena
}

// Pool is safe for concurrent use.
type Pool struct{}

// New creates an empty pool.
func New(o Options) (*Pool, error) { return nil, ErrFull }

// Put stores a copy of enc with one reference.
func (p *Pool) Put(enc codec.Encoded) (Handle, error) { return 0, ErrFull }

// View returns the entry; Data aliases the arena and is valid while the
// caller's reference lives.
func (p *Pool) View(h Handle) codec.Encoded { return codec.Encoded{} }

// Ref adds a reference to an entry the caller already holds one of.
func (p *Pool) Ref(h Handle) {}

// Release gives a reference back. freed: it was the last; dict is the
// dictionary the entry named (0 if none), for the caller to release.
func (p *Pool) Release(h Handle) (freed bool, dict codec.DictID) { return false, 0 }

// Stats returns an exact account.
func (p *Pool) Stats() Stats { return Stats{} }

// Footprint returns the memory held by the pool.
func (p *Pool) Footprint() units.Bytes { return 0 }

// Trim returns wholly free arena pages to the system; it returns how much.
func (p *Pool) Trim() units.Bytes { return 0 }

// Close unmaps the arena. No entry may be in use.
func (p *Pool) Close() error { return nil }
