package pager

import (
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// A Tally is a page table without a sandbox: benchmarks that replay page sets count with it what
// the page table of a sandbox would occupy. One goroutine at a time.
type Tally struct{ table *table }

// NewTally returns the page table of a guest of so many pages.
func NewTally(frames int) (*Tally, error) {
	t, err := newTable(frames)
	if err != nil {
		return nil, err
	}
	return &Tally{t}, nil
}

// Evict notes that the cohort keeps a page.
func (t *Tally) Evict(f units.Frame, r cohort.Ref) { t.table.store(f, evicted(r)) }

// Zero notes that a page was dropped because it is all zeros.
func (t *Tally) Zero(f units.Frame) { t.table.store(f, entryZero) }

// Keep notes that a page did not shrink and stays.
func (t *Tally) Keep(f units.Frame, sum uint32) { t.table.store(f, kept(sum)) }

// Template notes that a page is the template's, or the sandbox's own and not yet looked at.
func (t *Tally) Template(f units.Frame) { t.table.store(f, entryTemplate) }

// Size returns what the table occupies.
func (t *Tally) Size() (units.Bytes, error) { return t.table.resident() }

// Close frees the table.
func (t *Tally) Close() error { return t.table.close() }
