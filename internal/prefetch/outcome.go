package prefetch

import (
	"cmp"
	"slices"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// A blockOutcome is what is known of one block's pages in one call: one bit a page.
type blockOutcome struct {
	block   uint32
	rank    uint16 // number of the block in the order of first touch
	evicted uint64 // pages that were evicted when the call began
	asked   uint64 // restored ahead, or asked for
	askedW  uint64 // of asked: those that are written when they are touched
	held    uint64 // expected, and left out on purpose
	beside  uint64 // came beside a page that was waited for
	fault   uint64 // a fault was seen
	faultW  uint64 // a fault was seen that was a write
	found   uint64 // a pass found the page private
}

const outcomeBytes = 72

// touched are the pages that the call surely touched.
func (b *blockOutcome) touched() uint64 { return b.fault | b.found }

// known are the pages of which it is known whether the call touched them: it would have
// been seen.
func (b *blockOutcome) known(found bool) uint64 {
	seen := ^(b.asked | b.beside)
	if !found {
		seen &= b.evicted // writes to shared pages take no fault
	}
	return b.touched() | seen
}

// unused are the pages that were expected to be written, and were not: four in five of them
// were not touched at all.
func (b *blockOutcome) unused(found bool) uint64 {
	if !found {
		return 0
	}
	return b.askedW & b.evicted &^ b.touched()
}

// wrote are the pages that the call surely wrote.
func (b *blockOutcome) wrote() uint64 { return b.faultW | b.found }

// notWritten are the pages that the call surely did not write: evicted ones that came back, by
// a fault or ahead of it, and that the next pass found as they were. A page of zeros that is
// as it was may have been used, and zeroed when it was freed.
func (b *blockOutcome) notWritten(found bool) uint64 {
	if !found {
		return 0
	}
	return (b.fault | b.asked&b.evicted) &^ b.wrote()
}

// An outcome is what is known of one call.
type outcome struct {
	blocks []blockOutcome // ascending
	ranks  uint16         // blocks that were seen touched so far
	found  bool           // a pass has told which pages are private
}

// at returns the entry of a block, and makes one if there is none. It is valid until the
// next call.
func (o *outcome) at(block uint32) *blockOutcome {
	i, found := slices.BinarySearchFunc(o.blocks, block, func(b blockOutcome, x uint32) int { return cmp.Compare(b.block, x) })
	if !found {
		o.blocks = slices.Insert(o.blocks, i, blockOutcome{block: block, rank: unranked})
	}
	return &o.blocks[i]
}

// get returns the entry of a block, or nil.
func (o *outcome) get(block uint32) *blockOutcome {
	i, found := slices.BinarySearchFunc(o.blocks, block, func(b blockOutcome, x uint32) int { return cmp.Compare(b.block, x) })
	if !found {
		return nil
	}
	return &o.blocks[i]
}

// see notes a fault, or a page that came beside one. Reading a page of zeros or of the template is free once it is mapped:
// such a fault is no reason to restore anything.
func (o *outcome) see(t pager.Touch) {
	if t.Kind == pager.KindNeighbour {
		b, bit := o.at(uint32(t.Frame)>>blockShift), uint64(1)<<(t.Frame%blockPages)
		b.beside |= bit
		b.evicted |= bit
		b.held &^= bit // nothing will be learned from it
		return
	}
	if !t.Kind.Waited() || !t.Write && (t.Kind == pager.KindZero || t.Kind == pager.KindTemplate) {
		return
	}
	b, bit := o.at(uint32(t.Frame)>>blockShift), uint64(1)<<(t.Frame%blockPages)
	b.fault |= bit
	if t.Write {
		b.faultW |= bit
	}
	if t.Kind == pager.KindEvicted {
		b.evicted |= bit
	}
	if b.rank == unranked && o.ranks < unranked {
		b.rank = o.ranks
		o.ranks++
	}
}

// has reports whether the page is one that the call was seen waiting for already, or that
// was asked for.
func (o *outcome) has(f units.Frame) bool {
	b := o.get(uint32(f) >> blockShift)
	return b != nil && (b.asked|b.held|b.beside|b.fault)>>(f%blockPages)&1 != 0
}
