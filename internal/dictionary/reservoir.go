package dictionary

import (
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// When to collect samples.
const (
	// The first training comes as soon as there are samples. After a training,
	// successful or not, the next one is due when grow times as many pages were
	// offered in all: 1,000, 4,000, 16,000, ... By then the cohort has seen
	// something new, and the number of trainings is the logarithm of the work.
	grow = 4

	// Of the pages offered while the reservoir is open only one in thin is
	// looked at (but for the first training): neighbours are alike, and samples should
	// come from several calls and sandboxes.
	thin = 4

	// A reservoir that is not full after patience times its pages were offered
	// (a quiet cohort, the same pages over and over) is trained from as it is, or
	// dropped: it holds up to 4 MiB, as much as several sandboxes.
	patience = 16
)

// reservoir collects pages to train from.
type reservoir struct {
	most int // immutable; pages

	offered atomic.Int64 // pages offered since the start
	opens   atomic.Int64 // the value of offered from which pages are collected

	full chan struct{} // a token when a training is due

	mu      sync.Mutex
	mapping *hostmem.Mapping    // guarded by mu; nil while closed, empty or taken by a training
	count   int                 // guarded by mu; pages collected
	seen    int                 // guarded by mu; different pages looked at since it opened
	known   map[uint32]struct{} // guarded by mu; checksums of pages collected: equal pages teach nothing
	thinned bool                // guarded by mu; after the first training
	ends    int64               // guarded by mu; the value of offered at which patience ends
	taken   bool                // guarded by mu; a training has the mapping
}

func (r *reservoir) init(most int) {
	r.most = most
	r.full = make(chan struct{}, 1)
	r.ends = int64(most) * patience
}

// offer keeps a copy of p if the reservoir is open and p is not zero, not known and
// lucky: when it is full, later pages replace earlier ones so that each has
// the same chance to stay (Vitter's algorithm R).
func (r *reservoir) offer(p *units.Page) {
	n := r.offered.Add(1)
	if n <= r.opens.Load() {
		return
	}
	if r.add(p, n) {
		select {
		case r.full <- struct{}{}:
		default:
		}
	}
}

// add reports whether a training is due. n is the number of the page.
func (r *reservoir) add(p *units.Page, n int64) bool {
	if codec.IsZero(p) {
		return false
	}
	sum := codec.Checksum(p)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.taken || r.thinned && n%thin != 0 {
		return false
	}
	if n >= r.ends {
		r.ends = math.MaxInt64
		return true
	}
	if _, known := r.known[sum]; known {
		return false
	}
	r.seen++
	if r.mapping == nil {
		m, err := hostmem.MapAnonymous(units.Bytes(r.most) * units.PageSize)
		if err != nil {
			return false // no memory for samples is no reason to fail an eviction; the next page tries again
		}
		r.mapping, r.known = m, make(map[uint32]struct{}, r.most)
	}
	i := r.count
	if r.count == r.most {
		if i = rand.IntN(r.seen); i >= r.most {
			return false
		}
		delete(r.known, codec.Checksum(&asPages(r.mapping.Data)[i]))
	} else {
		r.count++
	}
	asPages(r.mapping.Data)[i] = *p
	r.known[sum] = struct{}{}
	return r.count == r.most && r.seen == r.most
}

// take hands the samples to a training; nothing is collected until giveBack.
// Preconditions: the training lock is held.
func (r *reservoir) take() ([]units.Page, *hostmem.Mapping) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken = true
	select {
	case <-r.full: // what it stands for is being done
	default:
	}
	if r.mapping == nil {
		return nil, nil
	}
	return asPages(r.mapping.Data)[:r.count], r.mapping
}

// giveBack ends a training. If the samples were too few and there is room for
// more, collecting goes on; else the reservoir is closed until the next is due.
func (r *reservoir) giveBack(m *hostmem.Mapping, wantMore bool) {
	r.mu.Lock()
	r.taken = false
	if wantMore && r.count < r.most && r.ends != math.MaxInt64 {
		r.mu.Unlock()
		return
	}
	r.reset()
	r.thinned = true
	opens := r.offered.Load()*grow - int64(r.most)*thin
	r.opens.Store(opens)
	r.ends = max(opens, r.offered.Load()) + int64(r.most)*patience
	r.mu.Unlock()
	unmap(m)
}

// reset forgets the samples.
// Preconditions: mu is held.
func (r *reservoir) reset() {
	r.mapping, r.known, r.count, r.seen = nil, nil, 0, 0
}

// size returns the memory of the samples.
func (r *reservoir) size() units.Bytes {
	r.mu.Lock()
	defer r.mu.Unlock()
	return units.Bytes(r.count) * units.PageSize
}

func (r *reservoir) close() {
	r.mu.Lock()
	m := r.mapping
	r.reset()
	r.mu.Unlock()
	unmap(m)
}

// unmap frees the samples. Unmapping what was mapped does not fail.
func unmap(m *hostmem.Mapping) {
	if m != nil {
		_ = m.Close()
	}
}
