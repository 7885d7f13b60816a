package prefetch

import (
	"math/bits"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// A follower guesses what comes after a page that the guest waited for. It is told all of them
// in their order, and appends at most n frames to dst in the order of their use, those that want
// refuses left out.
type follower interface {
	follow(f units.Frame, n int, want func(units.Frame) bool, dst []units.Frame) []units.Frame
}

// Windows of a follower: how many pages it may ask for because of one fault. A source that is
// mostly right gets the wide one; doubled, its last pages are touched half as often.
const (
	narrowWindow = 8
	wideWindow   = 24
)

// leastFollow is how often a source must have been right lately for its pages to be restored.
const leastFollow = 0.4

// followHoldOut is one in how many of a follower's pages is left out: they are few, so a rate of
// one in 32 would take many calls to tell right from wrong.
const followHoldOut = 8

// Numbers of links, a power of two: 8 bytes each.
const (
	ownLinks    = 2048
	cohortLinks = 8192
)

// links say which page the guest waited for next after a page, lately. Where two pages want
// the same slot the later one gets it. The zero value forgets everything.
type links struct {
	slots []link // nil or a power of two
	size  int    // of slots, when there are some
}

// A link leads from a page to the next; both plus one, so that 0 is none.
type link struct{ from, to uint32 }

const linkBytes = 8

func (l *links) slot(f units.Frame) *link {
	x := uint32(f) * 0x9e3779b1
	return &l.slots[x>>(32-bits.TrailingZeros(uint(l.size)))] //nolint:gosec // G115: positive
}

// learn notes that b was waited for next after a.
func (l *links) learn(a, b units.Frame) {
	if l.slots == nil {
		l.slots = make([]link, l.size)
	}
	*l.slot(a) = link{uint32(a) + 1, uint32(b) + 1}
}

// maxSkip is how many pages of a chain may be there already: then it leads nowhere new.
const maxSkip = 32

// follow is temporal prefetching: what followed before follows again.
func (l *links) follow(f units.Frame, n int, want func(units.Frame) bool, dst []units.Frame) []units.Frame {
	if l.slots == nil {
		return dst
	}
	for skipped := 0; n > 0 && skipped < maxSkip; {
		s := l.slot(f)
		if s.from != uint32(f)+1 {
			break
		}
		if f = units.Frame(s.to - 1); want(f) {
			dst = append(dst, f)
			n--
			continue
		}
		skipped++
	}
	return dst
}

func (l *links) footprint() units.Bytes { return units.Bytes(len(l.slots) * linkBytes) }

// A guess is a page that followers expect.
type guessed struct {
	frame    units.Frame
	sources  Sources
	restored bool // else it was left out, or its sources are not believed
}

const guessBytes = 8

// maxGuesses bounds what is remembered of one call's guesses: later ones are not judged.
const maxGuesses = 1024

// follow asks the followers what comes after a fault and appends what is to be restored.
func (p *Predictor) follow(f units.Frame, dst []pager.Touch) []pager.Touch {
	h := p.history
	h.mu.Lock()
	defer h.mu.Unlock()
	first := len(p.guesses)
	var frames [wideWindow]units.Frame
	for _, s := range [...]Source{SourceTemporal, SourceCohortTemporal, SourceStride} {
		if h.opts.Without.Has(s) || len(p.guesses) >= maxGuesses {
			continue
		}
		chance, n := h.follow[s].p(), narrowWindow
		if chance >= least[classEvicted]+0.2 {
			n = wideWindow
		}
		believed := chance >= leastFollow
		for _, g := range p.follower(s).follow(f, n, p.wants, frames[:0]) {
			p.propose(g, s, believed, first)
		}
	}
	for i := first; i < len(p.guesses); i++ {
		g := &p.guesses[i]
		b, bit := p.now.at(uint32(g.frame)>>blockShift), uint64(1)<<(g.frame%blockPages)
		if !g.restored {
			continue
		}
		b.asked |= bit
		dst = append(dst, pager.Touch{Frame: g.frame})
	}
	return dst
}

// propose notes a source's guess. Caller holds History.mu.
func (p *Predictor) propose(f units.Frame, s Source, believed bool, first int) {
	for i := first; i < len(p.guesses); i++ {
		if g := &p.guesses[i]; g.frame == f {
			g.sources |= Only(s)
			g.restored = g.restored || believed && !p.leaveOut(f, followHoldOut)
			return
		}
	}
	p.guesses = append(p.guesses, guessed{frame: f, sources: Only(s), restored: believed && !p.leaveOut(f, followHoldOut)})
}

// follower returns a source.
func (p *Predictor) follower(s Source) follower {
	switch s {
	case SourceTemporal:
		return &p.links
	case SourceCohortTemporal:
		return &p.history.links
	default:
		return &p.strides
	}
}

// wants reports whether a page may be restored in answer to a fault.
func (p *Predictor) wants(f units.Frame) bool {
	return !p.now.has(f) && (p.evicted == nil || p.evicted(f))
}

// followed notes the order of two faults.
func (p *Predictor) followed(a, b units.Frame) {
	p.links.learn(a, b)
	p.history.mu.Lock()
	defer p.history.mu.Unlock()
	p.history.links.learn(a, b)
}

// judgeFollowers compares the followers' guesses with what is known of the call.
func (p *Predictor) judgeFollowers(s *score) {
	for _, g := range p.guesses {
		b := p.now.get(uint32(g.frame) >> blockShift)
		touched := b != nil && b.fault>>(g.frame%blockPages)&1 != 0
		for src := range NumSources {
			if !g.sources.Has(src) {
				continue
			}
			if g.restored {
				s.sources[src].asked++
				continue
			}
			s.sources[src].held++
			if touched {
				s.sources[src].useful++
			}
			s.follow[src].add(touched, 1)
		}
	}
}
