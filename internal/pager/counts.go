package pager

import (
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// A source is who brings pages before the guest asks for them.
type source uint8

const (
	sourceRestore source = iota
	sourceAround         // a fault on an evicted neighbour
	numSources
)

// Counts are what a sandbox's guest has waited for, and what was brought ahead of it, since
// New. A tool call's own are the difference of two.
type Counts struct {
	Evicted, Zero, Template, Protected uint64 // faults by kind; those the guest did not have to wait for are in none
	Stall                              time.Duration

	Restored   uint64 // evicted pages that Restore brought
	Shared     uint64 // template and zero pages that Restore mapped
	Private    uint64 // template and zero pages that Restore installed to be written
	Neighbours uint64 // evicted pages brought beside one that the guest waited for

	// Of pages brought ahead that are resolved: used ones showed a sign of use, wasted ones
	// were dropped, or reported free, without. The only sign is a write, or a fault at the
	// moment of the restore: a page that was only read counts as wasted, hence that is an
	// upper bound. Hold-outs tell how many are useful.
	Used, Wasted                     uint64 // of Restored and Private
	NeighboursUsed, NeighboursWasted uint64

	Ways [cohort.NumWays]uint64 // how the pages were kept that were decoded, for whatever reason
}

// Counts returns a snapshot. It takes no lock and does not allocate; counters may be a fault apart.
func (p *Pager) Counts() Counts {
	c := p.stats
	n := Counts{
		Evicted: c.restore.count(), Zero: c.zero.count(), Template: c.template.count(), Protected: c.protect.count(),
		Stall:    time.Duration(c.stall.Load()),
		Restored: c.prefetch.count(), Shared: c.shared.Load(), Private: c.private.Load(), Neighbours: c.neighbours.Load(),
		Used: c.used[sourceRestore].Load(), Wasted: c.wasted[sourceRestore].Load(),
		NeighboursUsed: c.used[sourceAround].Load(), NeighboursWasted: c.wasted[sourceAround].Load(),
	}
	for i := range n.Ways {
		n.Ways[i] = c.ways[i].Load()
	}
	return n
}

// Sub returns what was counted since old.
func (c Counts) Sub(old Counts) Counts {
	d := Counts{
		Evicted: c.Evicted - old.Evicted, Zero: c.Zero - old.Zero, Template: c.Template - old.Template, Protected: c.Protected - old.Protected,
		Stall:    c.Stall - old.Stall,
		Restored: c.Restored - old.Restored, Shared: c.Shared - old.Shared, Private: c.Private - old.Private, Neighbours: c.Neighbours - old.Neighbours,
		Used: c.Used - old.Used, Wasted: c.Wasted - old.Wasted,
		NeighboursUsed: c.NeighboursUsed - old.NeighboursUsed, NeighboursWasted: c.NeighboursWasted - old.NeighboursWasted,
	}
	for i := range d.Ways {
		d.Ways[i] = c.Ways[i] - old.Ways[i]
	}
	return d
}

// Faults returns the sum over the kinds.
func (c Counts) Faults() uint64 { return c.Evicted + c.Zero + c.Template + c.Protected }

// noteUsed counts a sign of use of a page that was brought ahead, if it was. Caller holds mu.
func (p *Pager) noteUsed(f units.Frame) {
	if marked, around := p.table.unmark(f); marked {
		p.stats.used[sourceOf(around)].Add(1)
	}
}

// noteWasted counts a page that was brought ahead, if it was, and goes again. Caller holds mu.
func (p *Pager) noteWasted(f units.Frame) {
	if marked, around := p.table.unmark(f); marked {
		p.stats.wasted[sourceOf(around)].Add(1)
	}
}

func sourceOf(around bool) source {
	if around {
		return sourceAround
	}
	return sourceRestore
}

// noteFate counts what became of a page that Restore had installed to be written, if it had.
// fateSkip: it was written while the pass had it in hand; drop unset: it stays. Caller holds mu.
func (p *Pager) noteFate(b *batch, i int, f fate, drop bool) {
	page := b.frames[i]
	if b.before[i].tag() == tagLoose {
		switch {
		case f == fateSkip || b.written[i]:
			p.noteUsed(page)
		case drop && !b.mode.stay && f != fateAbandon:
			p.noteWasted(page)
		}
		return
	}
	if b.before[i].tag() != tagAhead {
		return
	}
	switch {
	case f == fateAbandon: // it stays what it is
	case f == fateSkip || b.written[i]:
		p.stats.used[sourceRestore].Add(1)
	case f == fateEncoded && !drop: // it stays, and may still be used
		p.table.mark(page, false)
	default:
		p.stats.wasted[sourceRestore].Add(1)
	}
}
