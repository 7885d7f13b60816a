package pager

import (
	"context"
	"slices"
	"sync"
)

// A Class says how soon pages are needed. Faults go before restores, restores of a call that
// runs before speculative ones, and both before encoding.
type Class uint8

// Classes of restores.
const (
	Needed      Class = iota // a call runs or comes, and touches the pages soon
	Speculative              // somebody guesses
)

func (c Class) String() string {
	if c == Needed {
		return "needed"
	}
	return "speculative"
}

// turns gives the places for restoring to those who have a batch to restore, one batch at a
// time: first by class, then the sandbox whose last turn is the longest ago.
//
//	absent --take, a place is free--> has a turn --give--> absent
//	absent --take--> waits --another gives--> has a turn
//	                 waits --ctx ends--> absent
//
// Lock order: mu, then nothing. Safe for concurrent use.
type turns struct {
	mu      sync.Mutex
	free    []*worker // guarded by mu; nil: not made yet
	waiting []*turn   // guarded by mu; in order of arrival
	given   uint64    // guarded by mu; turns
}

// A turn is a batch that waits for a place.
type turn struct {
	pager *Pager
	class Class
	place chan *worker // holds one
}

// take waits for a place. The place may be nil: not made yet.
func (ts *turns) take(ctx context.Context, p *Pager, class Class) (*worker, error) {
	ts.mu.Lock()
	if n := len(ts.free); n > 0 { // then nobody waits
		w := ts.free[n-1]
		ts.free = ts.free[:n-1]
		ts.note(p)
		ts.mu.Unlock()
		return w, nil
	}
	t := &turn{pager: p, class: class, place: make(chan *worker, 1)}
	ts.waiting = append(ts.waiting, t)
	ts.mu.Unlock()
	select {
	case w := <-t.place:
		return w, nil
	case <-ctx.Done():
	}
	ts.mu.Lock()
	if i := slices.Index(ts.waiting, t); i >= 0 {
		ts.waiting = slices.Delete(ts.waiting, i, i+1)
		ts.mu.Unlock()
		return nil, ctx.Err()
	}
	ts.mu.Unlock()
	ts.give(<-t.place) // it came at the same moment
	return nil, ctx.Err()
}

// note counts a turn of p. Caller holds mu.
func (ts *turns) note(p *Pager) {
	ts.given++
	p.lastTurn = ts.given
}

// give ends a turn: the place goes to whoever is next.
func (ts *turns) give(w *worker) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if len(ts.waiting) == 0 {
		ts.free = append(ts.free, w)
		return
	}
	next := 0
	for i, t := range ts.waiting {
		best := ts.waiting[next]
		if t.class < best.class || t.class == best.class && t.pager.lastTurn < best.pager.lastTurn {
			next = i
		}
	}
	t := ts.waiting[next]
	ts.waiting = slices.Delete(ts.waiting, next, next+1)
	ts.note(t.pager)
	t.place <- w
}
