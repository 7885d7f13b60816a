package sandbox

import (
	"context"
	"log/slog"
	"sync"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/prefetch"
)

// memory is what a follower needs of a pager.
type memory interface {
	Restore(ctx context.Context, pages []pager.Touch, class pager.Class) (pager.RestoreResult, error)
	DrainTouched(dst []pager.Touch) []pager.Touch
	Notify() <-chan struct{}
	Expect(pages []pager.Touch)
}

var _ memory = (*pager.Pager)(nil)

// A follower brings pages back ahead of their use, and learns from the faults that come all
// the same. It does so beside the calls: nobody waits for it.
//
//	idle --announce--> announced --begin--> in a call --end (the last one)--> ended --looked--> idle
//	       announced --withdraw--> idle                  ended --announce, begin--> (learned from what is known)
//
// Orders are carried out one after another by Run, which owns the predictor. Between two
// batches of a restore it looks for orders and for faults: what follows a fault goes before
// the rest of what Begin named.
//
// Lock order: mu, then nothing.
type follower struct {
	memory memory              // immutable
	guess  *prefetch.Predictor // owned by run
	log    *slog.Logger        // immutable
	guided func() bool         // immutable; whether mere guesses are restored now

	wake chan struct{} // tells run that there are orders; capacity 1

	mu     sync.Mutex
	orders []order            // guarded by mu
	open   int                // guarded by mu; calls that run
	cancel context.CancelFunc // guarded by mu; ends the batch in hand, nil without one
	stats  prefetch.Stats     // guarded by mu; what run has published

	// Owned by run.
	number   int    // of the call that runs or ran last
	kind     string // of it, or of the announced one
	state    followState
	pending  []pager.Touch // to be restored, in their order
	scratch  []pager.Touch
	ordering []order
}

type followState uint8

const (
	followIdle followState = iota // no call is open in the predictor, or it waits for Settle
	followAnnounced
	followCall
)

// An order is what happened, as the follower is told.
type order struct {
	what orderKind
	kind string // of the call: announce, begin
	pass bool   // looked: the pass looked at all pages
}

type orderKind uint8

const (
	orderAnnounce orderKind = iota // a call comes
	orderWithdraw                  // it does not
	orderBegin                     // a call begins
	orderEnd                       // the last call has ended
	orderLooked                    // a pass has ended
)

func newFollower(m memory, guess *prefetch.Predictor, guided func() bool, log *slog.Logger) *follower {
	return &follower{memory: m, guess: guess, guided: guided, log: log, wake: make(chan struct{}, 1)}
}

// tell queues an order. It does not wait.
func (f *follower) tell(o order) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.orders = append(f.orders, o)
	if o.what != orderLooked && f.cancel != nil {
		f.cancel() // the batch in hand is of what was before; the rest of it is not lost
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// begin says that a call of a kind begins.
func (f *follower) begin(kind string) {
	f.mu.Lock()
	f.open++
	f.mu.Unlock()
	f.tell(order{what: orderBegin, kind: kind})
}

// end says that a call has ended.
func (f *follower) end() {
	f.mu.Lock()
	f.open--
	last := f.open == 0
	f.mu.Unlock()
	if last {
		f.tell(order{what: orderEnd})
	}
}

// Stats returns what the predictor was worth up to the last pass.
func (f *follower) Stats() prefetch.Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

// run carries out orders until ctx ends.
func (f *follower) run(ctx context.Context) {
	for {
		var faults <-chan struct{}
		if f.state == followCall {
			faults = f.memory.Notify()
		}
		if len(f.pending) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-f.wake:
			case <-faults:
				f.follow()
				continue
			}
		} else {
			select {
			case <-ctx.Done():
				return
			case <-f.wake:
			case <-faults:
				f.follow()
				continue
			default:
			}
		}
		f.carryOut()
		f.restoreBatch(ctx)
	}
}

// carryOut takes the orders that there are.
func (f *follower) carryOut() {
	f.mu.Lock()
	f.ordering, f.orders = f.orders, f.ordering[:0]
	f.mu.Unlock()
	for _, o := range f.ordering {
		switch o.what {
		case orderAnnounce:
			f.announce(o.kind)
		case orderWithdraw:
			if f.state == followAnnounced {
				f.guess.Abandon()
				f.state, f.pending = followIdle, nil
			}
		case orderBegin:
			f.begins(o.kind)
		case orderEnd:
			f.ends()
		case orderLooked:
			f.looked(o.pass)
		}
	}
}

// announce restores for a call that comes. A second announcement adds what its kind needs.
func (f *follower) announce(kind string) {
	if f.state == followCall || !f.guided() {
		return
	}
	c := prefetch.Call{Number: f.number + 1, Kind: kind}
	switch {
	case f.state == followIdle:
		f.learn(false)
		f.pending = f.guess.Begin(c)
	case kind != f.kind:
		f.pending = append(f.pending, f.guess.Change(c)...)
	}
	f.state, f.kind = followAnnounced, kind
}

// begins restores for a call that runs.
func (f *follower) begins(kind string) {
	f.number++
	c := prefetch.Call{Number: f.number, Kind: kind}
	switch {
	case f.state == followCall: // beside another one, which is judged now
		f.guess.End(f.drain())
		f.pending = append(f.pending, f.guess.Begin(c)...)
	case f.state == followIdle:
		f.learn(false)
		f.pending = f.guess.Begin(c)
	case kind != f.kind: // announced as something else, as clients name their tools
		f.pending = append(f.guess.Change(c), f.pending...)
	}
	f.state, f.kind = followCall, kind
}

// ends takes over what the call was seen touching, and tells the pager what the next one will.
func (f *follower) ends() {
	if f.state != followCall {
		return
	}
	f.state, f.pending = followIdle, nil
	f.memory.Expect(f.guess.End(f.drain()))
}

// looked learns from the call that ended and the pass that followed it.
func (f *follower) looked(whole bool) {
	if f.state == followIdle {
		f.learn(whole)
	}
}

// learn settles the call that ended, if that is still to be done.
func (f *follower) learn(whole bool) {
	f.scratch = f.memory.DrainTouched(f.scratch[:0])
	f.guess.Settle(f.scratch, whole)
	stats := f.guess.Stats()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stats = stats
}

// follow takes the faults of the running call, and restores what follows them first.
func (f *follower) follow() {
	if next := f.guess.Faulted(f.drain()); len(next) > 0 {
		f.pending = append(next, f.pending...)
	}
}

// drain takes what the guest waited for since the last time.
func (f *follower) drain() []pager.Touch {
	f.scratch = f.memory.DrainTouched(f.scratch[:0])
	waited := f.scratch[:0]
	for _, t := range f.scratch {
		if t.Kind.Waited() { // the others are the last words of a pass that a call has ended
			waited = append(waited, t)
		}
	}
	return waited
}

// restoreBatch restores the next pages.
func (f *follower) restoreBatch(ctx context.Context) {
	if len(f.pending) == 0 {
		return
	}
	class := pager.Needed
	if f.state != followCall {
		class = pager.Speculative
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.mu.Lock()
	if len(f.orders) > 0 { // told while we were about to
		f.mu.Unlock()
		return
	}
	f.cancel = cancel
	f.mu.Unlock()
	n := min(len(f.pending), pager.BatchPages)
	_, err := f.memory.Restore(ctx, f.pending[:n], class)
	f.mu.Lock()
	f.cancel = nil
	f.mu.Unlock()
	switch {
	case err == nil:
		f.pending = f.pending[n:]
	case ctx.Err() == nil: // the sandbox is dead or dies, which others see
		f.log.Warn("restore ahead of a call", "err", err)
		f.pending = nil
	}
}
