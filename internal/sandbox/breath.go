package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
)

// callStarts closes the gap: the pass under way ends.
func (s *Sandbox) callStarts() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil {
		return s.death()
	}
	now := time.Now()
	if s.rhythm.CallStarts(now) == policy.Stop {
		s.stopPass(now)
		s.noteGap(now)
	}
	return nil
}

// noteGap tells the cohort of the gap that has ended. Caller holds mu.
func (s *Sandbox) noteGap(now time.Time) {
	if s.shared == nil {
		return
	}
	if gap, known := s.rhythm.LastGap(); known {
		s.shared.noteGap(gap)
	}
	if !s.named.IsZero() {
		s.shared.noteLead(s.tool, now.Sub(s.named))
		s.named = time.Time{}
	}
}

// stopPass cancels the pass under way. Caller holds mu.
func (s *Sandbox) stopPass(now time.Time) {
	if s.cancelPass == nil {
		return
	}
	if s.cancelled.IsZero() {
		s.cancelled = now
	}
	s.cancelPass()
}

// callEnds tells the rhythm.
func (s *Sandbox) callEnds() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rhythm.CallEnds(time.Now())
	s.look()
}

// look makes breathe look at the rhythm. It does not wait.
func (s *Sandbox) look() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Signal passes on what somebody outside knows of the calls to come. It does not wait.
func (s *Sandbox) Signal(sig policy.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pager == nil || s.cause != nil || !s.ready {
		return
	}
	now := time.Now()
	if sig.Kind == policy.SignalToolName && s.rhythm.State() != policy.Window {
		s.named, s.tool = now, sig.Tool
		if sig.Lead == 0 {
			sig.Lead = s.shared.lead(sig.Tool)
		}
	}
	switch a := s.rhythm.Signal(now, sig); a {
	case policy.Restore:
		s.bring(now)
	case policy.Withdraw:
		s.tellAhead(order{what: orderWithdraw})
	case policy.Park, policy.Wake:
		s.later = a
	case policy.None, policy.Compress, policy.Stop:
	}
	s.look()
}

// bring restores for the call that is announced. Caller holds mu.
func (s *Sandbox) bring(now time.Time) {
	s.stopPass(now)
	s.tellAhead(order{what: orderAnnounce, kind: s.rhythm.Tool()})
}

// tellAhead passes an order on to the follower, where there is one.
func (s *Sandbox) tellAhead(o order) {
	if s.ahead != nil {
		s.ahead.tell(o)
	}
}

// Squeeze makes a pass now, if no call runs or comes: the host is short of memory.
func (s *Sandbox) Squeeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pager == nil || s.cause != nil || !s.ready {
		return
	}
	s.rhythm.Hurry(time.Now())
	s.look()
}

// breathe does what the rhythm asks for until ctx ends.
func (s *Sandbox) breathe(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.machine.Done():
			return
		case <-s.wake:
		case <-timer.C:
		}
		for s.act(ctx) {
		}
		s.mu.Lock()
		due, idle := s.rhythm.Deadline()
		s.mu.Unlock()
		if idle {
			timer.Reset(time.Until(due))
		}
	}
}

// act does one thing that is due; false: nothing is.
func (s *Sandbox) act(ctx context.Context) bool {
	a, reach, pass := s.next(ctx)
	switch a {
	case policy.Compress:
		s.evict(pass, reach)
		s.endPass()
	case policy.Park: // until it can be put away, all its pages are
		s.evict(pass, policy.Warm)
		s.endPass()
	case policy.Withdraw:
		s.tellAhead(order{what: orderWithdraw})
	case policy.None:
		return false
	case policy.Restore, policy.Wake, policy.Stop:
	}
	return true
}

// next asks the rhythm. With Compress and Park it returns a context for the pass: a call that
// arrives from now on cancels it.
func (s *Sandbox) next(ctx context.Context) (policy.Action, policy.Temperature, context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || ctx.Err() != nil {
		return policy.None, policy.Cold, nil
	}
	now := time.Now()
	a := s.later
	s.later = policy.None
	if a == policy.None || s.rhythm.State() == policy.Window {
		a = s.rhythm.Tick(now)
	}
	switch a {
	case policy.Compress, policy.Park:
		pass, cancel := context.WithCancel(ctx)
		s.cancelPass = cancel
		return a, s.shared.reach(s.rhythm.InGap(now)), pass
	case policy.Restore:
		s.bring(now)
	case policy.None, policy.Stop, policy.Withdraw, policy.Wake:
	}
	return a, policy.Cold, nil
}

func (s *Sandbox) endPass() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancelPass()
	s.cancelPass = nil
	if !s.cancelled.IsZero() {
		s.cancels.Record(time.Since(s.cancelled))
		s.cancelled = time.Time{}
	}
}

// evict runs one pass over the pages that are within reach.
func (s *Sandbox) evict(ctx context.Context, reach policy.Temperature) {
	r, err := s.pager.EvictSome(ctx, pager.Selection{KeepExpected: reach == policy.Cold, KeepDirty: reach == policy.Clean})
	whole := err == nil && reach == policy.Warm
	s.tellAhead(order{what: orderLooked, pass: whole})
	if s.ahead == nil {
		s.pager.DrainTouched(nil) // nobody learns from it
	}
	switch {
	case ctx.Err() != nil:
		s.log.Debug("compression cancelled by a call", "result", r)
	case errors.Is(err, cohort.ErrFull):
		s.log.Warn("the pool is full: pages stay uncompressed", "result", r)
	case err != nil:
		s.log.Warn("compress", "err", err)
	default:
		s.log.Debug("compressed", "reach", reach, "result", r)
	}
}

// Compress runs one pass of eviction now, whatever the rhythm says: for tests
// and for people who want to see what a sandbox comes down to.
func (s *Sandbox) Compress(ctx context.Context) (pager.EvictResult, error) {
	if s.pager == nil {
		return pager.EvictResult{}, fmt.Errorf("compress sandbox %s: its compression is off", s.id)
	}
	return s.pager.Evict(ctx)
}
