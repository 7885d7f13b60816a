package prefetch

import (
	"slices"
	"sync"

	"github.com/agentzip/agentzip/internal/units"
)

// Limits of what a cohort remembers. A recording of a test run has some 500 cells, 20 KiB.
const (
	maxKinds   = 24   // kinds of calls; agents' tools and the programs they run are fewer
	maxNumbers = 16   // first calls that are remembered by their number
	kindCells  = 1024 // of a recording
)

// Options of a History. The zero value is right.
type Options struct {
	// Pages is the most pages that are restored ahead of one call; 0 means DefaultPages.
	Pages int
	// HoldOut is one in how many expected pages is left out; 0 means DefaultHoldOut.
	HoldOut int
	// Seed makes the choice of those left out repeatable.
	Seed uint64
	// Without turns sources off: for ablations.
	Without Sources
}

// DefaultPages are 32 MiB. The largest call of the main job touches 7,600 pages.
const DefaultPages = 8192

// DefaultHoldOut is one in how many expected pages is left out: 15 faults a call. At 32 they are
// 22, at 128 accuracy is 4 % lower because nobody notices what is no longer used.
const DefaultHoldOut = 48

// A recording is what the cohort touched in one kind of call, or in its k-th call.
type recording struct {
	heat heatmap
	used uint64 // History.clock when it was last used
}

// A History is what a cohort's sandboxes have learned together. It is safe for concurrent
// use, and remembers for as long as the cohort lives.
type History struct {
	opts Options // immutable

	mu      sync.Mutex
	clock   uint64                // guarded by mu; calls that began
	kinds   map[string]*recording // guarded by mu; at most maxKinds
	any     heatmap               // guarded by mu; of all calls
	numbers [maxNumbers]recording // guarded by mu
	cal     calibration           // guarded by mu
	follow  [NumSources]estimate  // guarded by mu; of the followers
	links   links                 // guarded by mu; cohort temporal
}

// NewHistory returns the empty memory of a cohort.
func NewHistory(o Options) *History {
	if o.Pages <= 0 {
		o.Pages = DefaultPages
	}
	if o.HoldOut <= 0 {
		o.HoldOut = DefaultHoldOut
	}
	h := &History{opts: o, kinds: make(map[string]*recording), any: heatmap{limit: kindCells}, cal: newCalibration(), links: links{size: cohortLinks}}
	for i := range h.follow {
		h.follow[i] = guess(leastFollow) // on trial
	}
	for i := range h.numbers {
		h.numbers[i].heat.limit = kindCells
	}
	return h
}

// view returns copies of what is known of calls of the kind and of the number, and how far
// that can be trusted.
func (h *History) view(c Call) view {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	v := view{cal: h.cal}
	if h.opts.Without.Has(SourceHotSet) {
		return v
	}
	if r := h.kinds[c.Kind]; r != nil && c.Kind != "" {
		r.used = h.clock
		v.kind, v.known = slices.Clone(r.heat.cells), true
	}
	v.any = slices.Clone(h.any.cells)
	if r := h.number(c.Number); r != nil {
		v.number = slices.Clone(r.heat.cells)
	}
	return v
}

// number returns the recording of the k-th call, or nil. Caller holds mu.
func (h *History) number(k int) *recording {
	if k < 1 || k > maxNumbers {
		return nil
	}
	return &h.numbers[k-1]
}

// learn takes over what one call was seen doing, and what the guesses were worth.
func (h *History) learn(c Call, o *outcome, s *score) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.Kind != "" {
		h.kind(c.Kind).heat.learn(o)
	}
	h.any.learn(o)
	if r := h.number(c.Number); r != nil {
		r.heat.learn(o)
	}
	h.cal.learn(s)
	for i := range h.follow {
		h.follow[i].observe(s.follow[i])
	}
}

// kind returns the recording of a kind of call, and makes one if there is none, in place of
// the one that was not used for the longest time. Caller holds mu.
func (h *History) kind(name string) *recording {
	if r := h.kinds[name]; r != nil {
		return r
	}
	if len(h.kinds) >= maxKinds {
		oldest, at := "", ^uint64(0)
		for k, r := range h.kinds {
			if r.used < at || r.used == at && k < oldest {
				oldest, at = k, r.used
			}
		}
		delete(h.kinds, oldest)
	}
	r := &recording{heat: heatmap{limit: kindCells}, used: h.clock}
	h.kinds[name] = r
	return r
}

// Footprint returns what the cohort's memory occupies. Each sibling bears its share.
func (h *History) Footprint() units.Bytes {
	h.mu.Lock()
	defer h.mu.Unlock()
	const fixed = 8 << 10 // estimates, map, recordings without their cells
	sum := fixed + h.any.footprint() + h.links.footprint()
	for _, r := range h.kinds {
		sum += r.heat.footprint()
	}
	for i := range h.numbers {
		sum += h.numbers[i].heat.footprint()
	}
	return sum
}
