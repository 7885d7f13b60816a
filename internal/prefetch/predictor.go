package prefetch

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// ownCells bounds what a predictor remembers of its sandbox: 40 KiB. The guest of the main
// job touches 600 blocks in 13 calls.
const ownCells = 1024

// A Call is what is known of a tool call before it runs.
type Call struct {
	Number int    // from 1, in this sandbox
	Kind   string // what it does: see KindOf. "" means that it is not known
}

// A Predictor guesses for one sandbox. One goroutine uses it at a time.
//
//	idle --Begin--> in a call --End--> ended --Settle, or the next Begin--> idle
//	                in a call --Faulted--> in a call
type Predictor struct {
	name    string
	history *History
	evicted func(units.Frame) bool // nil: not known

	own      heatmap
	call     Call
	now      outcome // of the call that runs or has ended; empty while idle
	open     bool    // there is such a call
	promised []span  // ascending; pages that End said will be written
	links    links   // temporal
	strides  strides
	last     units.Frame // the latest page that the call waited for
	waited   bool        // there is one
	guesses  []guessed   // of the followers, in this call
	stats    Stats
}

// A span is some pages of a block.
type span struct {
	block uint32
	pages uint64
}

const spanBytes = 16

// NewPredictor returns the predictor of one sandbox of the cohort. evicted says whether a
// page is evicted now, as pager.Evicted does: pages that are not need no restoring unless
// they are written. With nil all are taken for evicted.
func (h *History) NewPredictor(name string, evicted func(units.Frame) bool) *Predictor {
	p := &Predictor{name: name, history: h, evicted: evicted, own: heatmap{limit: ownCells}, links: links{size: ownLinks}}
	for s := range p.stats.Sources {
		p.stats.Sources[s].Source = Source(s) //nolint:gosec // G115: a few
	}
	return p
}

// A candidate is a page that may be restored.
type candidate struct {
	frame units.Frame
	rank  uint16
	class class
	write bool // as a copy of its own
	wrote bool // it is written when it is touched
	p     float32
}

// least is how likely a page must be touched to be restored ahead. To restore one in vain
// costs 9 us of a worker and the work to drop it again, a fault 27 us of the guest's time. At
// 0.3 coverage of the evicted pages is 2 % higher and accuracy 3 % lower, at 0.5 the reverse.
var least = [numClasses]float32{classEvicted: 0.4, classShared: 0.65}

// view returns what is known before a call.
func (p *Predictor) view(c Call) view {
	v := p.history.view(c)
	if v.without = p.history.opts.Without; !v.without.Has(SourceRecent) {
		v.own = p.own.cells
	}
	return v
}

// Begin returns the pages to restore for a call, in the order of their use. Some of those
// expected are left out, to learn from them.
func (p *Predictor) Begin(c Call) []pager.Touch {
	p.Settle(nil, false)
	p.call, p.open = c, true
	return p.ask(c)
}

// Change says that the call that Begin named is another one than was thought, and returns the
// pages to restore for that beside those that were named already. What was restored in vain
// is still held against those who had expected it.
func (p *Predictor) Change(c Call) []pager.Touch {
	p.call = c
	return p.ask(c)
}

// Abandon says that the call that Begin named does not come: nothing is learned from it.
func (p *Predictor) Abandon() { p.open, p.now, p.guesses, p.waited = false, outcome{}, nil, false }

// ask returns the pages to restore for a call that were not named yet.
func (p *Predictor) ask(c Call) []pager.Touch {
	v := p.view(c)
	var list []candidate
	v.each(func(at place) {
		b := p.now.at(at.block)
		wrote, surely := at.wrote()
		ready, rank := p.ready(at), at.rank()
		pages(at.warm()&^(b.asked|b.held), func(page uint) {
			bit, f := uint64(1)<<page, frame(at.block, page)
			t := candidate{frame: f, class: classEvicted, rank: rank, write: surely&bit != 0, wrote: wrote&bit != 0}
			if p.evicted == nil || p.evicted(f) {
				b.evicted |= bit
			} else if t.class, t.write = classShared, t.wrote; !t.write || ready&bit == 0 {
				return
			}
			if t.p = v.chance(&at, page, t.class); t.p >= least[t.class] {
				list = append(list, t)
			}
		})
	})
	return p.choose(list)
}

// regionBlocks is how many blocks the pager maps together where the guest works; see
// internal/pager/mapback.go.
const regionBlocks = 512 / blockPages

// ready returns the pages of a block that, if they are shared, are not mapped: those that
// End said would be written, and all of a region where the guest never had a page of its own.
// A mapped page cannot be replaced.
func (p *Predictor) ready(at place) uint64 {
	first := at.block &^ (regionBlocks - 1)
	i, _ := slices.BinarySearchFunc(p.own.cells, first, func(c cell, b uint32) int { return cmp.Compare(c.block, b) })
	if i == len(p.own.cells) || p.own.cells[i].block >= first+regionBlocks {
		return ^uint64(0)
	}
	i, found := slices.BinarySearchFunc(p.promised, at.block, func(s span, b uint32) int { return cmp.Compare(s.block, b) })
	if !found {
		return 0
	}
	return p.promised[i].pages
}

// choose keeps as many as may be restored, leaves out those to learn from, and puts the
// rest into order.
func (p *Predictor) choose(list []candidate) []pager.Touch {
	if limit := p.history.opts.Pages; len(list) > limit {
		slices.SortFunc(list, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.p, a.p), cmp.Compare(a.frame, b.frame)) })
		list = list[:limit]
	}
	slices.SortFunc(list, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.class, b.class), cmp.Compare(a.rank, b.rank), cmp.Compare(a.frame, b.frame))
	})
	dst := make([]pager.Touch, 0, len(list))
	for _, t := range list {
		b, bit := p.now.at(uint32(t.frame)>>blockShift), uint64(1)<<(t.frame%blockPages)
		if p.leaveOut(t.frame, p.history.opts.HoldOut) {
			b.held |= bit
			continue
		}
		b.asked |= bit
		if t.wrote {
			b.askedW |= bit
		}
		dst = append(dst, pager.Touch{Frame: t.frame, Write: t.write})
	}
	return dst
}

// leaveOut picks one in n pages, others in each call.
func (p *Predictor) leaveOut(f units.Frame, n int) bool {
	x := p.history.opts.Seed ^ uint64(f)<<20 ^ uint64(p.stats.Calls) //nolint:gosec // G115: a count
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	x ^= x >> 31
	return x%uint64(n) == 0 //nolint:gosec // G115: positive
}

// Faulted notes pages that the running call waited for, in their order, and returns pages
// to restore because of them.
func (p *Predictor) Faulted(touched []pager.Touch) []pager.Touch {
	if !p.open {
		return nil
	}
	var dst []pager.Touch
	for _, t := range touched {
		p.now.see(t)
		if t.Kind != pager.KindEvicted {
			continue
		}
		if p.waited {
			p.followed(p.last, t.Frame)
		}
		p.last, p.waited = t.Frame, true
		dst = p.follow(t.Frame, dst)
	}
	return dst
}

// leastPromise is how likely a page must be written by the next call, whatever it is, to be
// promised: a promise that is not kept costs a fault where a mapped page would have cost none.
// At 0.7 a call has 3 such faults more and finds 24 % of the shared pages it writes copied
// ahead, instead of 15 %.
const leastPromise = 0.9

// End notes the rest of what the call waited for and returns the pages that the next one will
// probably touch, whatever kind of call it is, in ascending order. They are for pager.Expect:
// pages that are promised there to be written are not mapped back as shared, so that Begin
// can ask for them.
func (p *Predictor) End(touched []pager.Touch) []pager.Touch {
	for _, t := range touched {
		p.now.see(t)
	}
	v := p.view(Call{Number: p.call.Number + 1})
	var dst []pager.Touch
	p.promised = p.promised[:0]
	v.each(func(at place) {
		s := span{block: at.block}
		wrote, _ := at.wrote()
		pages(at.warm(), func(page uint) {
			bit := uint64(1) << page
			write := wrote&bit != 0 && v.chance(&at, page, classShared) >= leastPromise
			if write {
				s.pages |= bit
			}
			if write || v.chance(&at, page, classEvicted) >= leastPromise {
				dst = append(dst, pager.Touch{Frame: frame(at.block, page), Write: write})
			}
		})
		if s.pages != 0 {
			p.promised = append(p.promised, s)
		}
	})
	return dst
}

// Settle learns from the call that ended. looked is what DrainTouched gave after a pass; whole
// says that the pass was not cancelled, so that what it did not find private was not written.
// Only the first Settle after a call does anything.
func (p *Predictor) Settle(looked []pager.Touch, whole bool) {
	if !p.open {
		return
	}
	p.open = false
	for _, t := range looked {
		if t.Kind == pager.KindPrivate {
			p.now.at(uint32(t.Frame) >> blockShift).found |= 1 << (t.Frame % blockPages)
		}
	}
	p.now.found = whole
	s := p.judge()
	p.judgeFollowers(s)
	p.own.learn(&p.now)
	p.history.learn(p.call, &p.now, s)
	p.now, p.guesses, p.waited = outcome{}, nil, false
	p.stats.add(s)
}

// judge compares what was expected with what is known of the call.
func (p *Predictor) judge() *score {
	s := new(score)
	v := p.view(p.call)
	v.each(func(at place) {
		b := p.now.at(at.block)
		touched := b.touched()
		pages(at.warm()&b.known(p.now.found)&^b.asked, func(page uint) {
			bit, weight := uint64(1)<<page, uint32(1)
			c := classShared
			if b.evicted&bit != 0 {
				c = classEvicted
			}
			if b.held&bit != 0 {
				weight = uint32(p.history.opts.HoldOut) //nolint:gosec // G115: small; it stands for those that were restored
			}
			v.note(s, &at, page, c, touched&bit != 0, weight)
		})
		for src, mask := range [...]uint64{SourceRecent: at.own.warm(), SourceHotSet: at.kind.warm() | at.any.warm() | at.number.warm()} {
			s.sources[src].add(tally{
				asked:  bits.OnesCount64(b.asked & mask),
				held:   bits.OnesCount64(b.held & mask),
				useful: bits.OnesCount64(b.held & mask & touched),
			})
		}
	})
	for i := range p.now.blocks {
		b := &p.now.blocks[i]
		s.total.add(tally{
			asked:  bits.OnesCount64(b.asked),
			held:   bits.OnesCount64(b.held),
			useful: bits.OnesCount64(b.held & b.touched()),
		})
		s.missed += bits.OnesCount64(b.fault &^ b.asked &^ b.held)
	}
	return s
}

// Stats says what this sandbox's predictions were worth.
func (p *Predictor) Stats() Stats {
	s := p.stats
	s.Footprint = p.Footprint()
	return s
}

// Footprint returns what the predictor occupies, without its share of the History.
func (p *Predictor) Footprint() units.Bytes {
	const fixed = 1024
	return fixed + p.own.footprint() + p.links.footprint() + units.Bytes(cap(p.guesses)*guessBytes) + units.Bytes(cap(p.now.blocks)*outcomeBytes+cap(p.promised)*spanBytes)
}
