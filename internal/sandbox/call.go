package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
)

// A Call says how one tool call went.
type Call struct {
	Exit     guestlink.Exit
	Duration time.Duration // from dispatch to the end of its output, as the host saw it
	Stall    time.Duration // time for which faults blocked the guest meanwhile
	Faults   uint64        // faults served meanwhile
}

// Run runs one command in the guest as a tool call: it closes the gap, and the
// gap opens again when no call has run for the settle time.
//
// A command that fails is a Call, not an error. An error wraps ErrDead when the
// sandbox has died; the cause is in its text.
func (s *Sandbox) Run(ctx context.Context, cmd guestlink.Command, stdout, stderr io.Writer) (Call, error) {
	if err := s.callStarts(); err != nil {
		return Call{}, err
	}
	ahead := s.restoreAhead(ctx)
	var stall time.Duration
	var faults uint64
	if s.pager != nil {
		stall, faults = s.pager.Stall(), s.pager.Faults()
	}
	begin := time.Now()
	exit, err := s.link.Run(ctx, cmd, stdout, stderr)
	call := Call{Exit: exit, Duration: time.Since(begin)}
	if s.pager != nil {
		call.Stall, call.Faults = s.pager.Stall()-stall, s.pager.Faults()-faults
	}
	ahead()
	s.callEnds()
	if err != nil {
		if cause := s.deathOf(err); cause != nil {
			return call, cause
		}
		return call, fmt.Errorf("run command in sandbox %s: %w", s.id, err)
	}
	return call, nil
}

// deathOf returns the cause of the sandbox's death if err was its consequence.
// A link breaks a moment before the VMM's end is known, so it waits for that.
func (s *Sandbox) deathOf(err error) error {
	if errors.Is(err, guestlink.ErrLinkDown) {
		select {
		case <-s.machine.Done():
			s.die(s.machine.Exit().Err())
		case <-time.After(linkGrace):
		}
	}
	return s.Cause()
}

// linkGrace is how long a broken link may precede the VMM's end. Reaping takes
// milliseconds; a VMM that lives on after it has an agent that died.
const linkGrace = 2 * time.Second

// callStarts closes the gap.
func (s *Sandbox) callStarts() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil {
		return s.death()
	}
	if s.rhythm.CallStarts(time.Now()) == policy.Stop && s.cancelPass != nil {
		if s.cancelled.IsZero() {
			s.cancelled = time.Now()
		}
		s.cancelPass()
	}
	return nil
}

// callEnds tells the rhythm, the predictor what the call was seen touching, and the pager
// what the next one will.
func (s *Sandbox) callEnds() {
	if s.pager != nil { // it waits for faults and batches, and sorts: not under mu
		touched := s.pager.DrainTouched(nil)
		s.mu.Lock()
		s.recent.Observe(touched)
		soon := s.recent.Predict(nil)
		s.mu.Unlock()
		s.pager.Expect(soon)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rhythm.CallEnds(time.Now())
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// restoreAhead starts to bring back the pages that the coming call will likely
// touch and returns a function that ends it and waits.
func (s *Sandbox) restoreAhead(ctx context.Context) (stop func()) {
	if s.pager == nil || s.opts.NoPrefetch {
		return func() {}
	}
	s.mu.Lock()
	pages := s.recent.Predict(make([]pager.Touch, 0, 1024))
	s.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := s.pager.Restore(ctx, pages, pager.Needed); err != nil && ctx.Err() == nil {
			s.log.Warn("restore ahead of a call", "err", err)
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// breathe runs the passes that the rhythm asks for until ctx ends.
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
		if pass, ok := s.beginPass(ctx); ok {
			s.evict(pass)
			s.endPass()
		}
		s.mu.Lock()
		due, idle := s.rhythm.Deadline()
		s.mu.Unlock()
		if idle {
			timer.Reset(time.Until(due))
		}
	}
}

// beginPass asks the rhythm; a call that arrives from now on cancels the pass.
func (s *Sandbox) beginPass(ctx context.Context) (context.Context, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause != nil || s.rhythm.Tick(time.Now()) != policy.Compress {
		return nil, false
	}
	pass, cancel := context.WithCancel(ctx)
	s.cancelPass = cancel
	return pass, true
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

// evict runs one pass.
func (s *Sandbox) evict(ctx context.Context) {
	r, err := s.pager.Evict(ctx)
	switch {
	case ctx.Err() != nil:
		s.log.Debug("compression cancelled by a call", "result", r)
	case errors.Is(err, cohort.ErrFull):
		s.log.Warn("the pool is full: pages stay uncompressed", "result", r)
	case err != nil:
		s.log.Warn("compress", "err", err)
	default:
		s.log.Debug("compressed", "result", r)
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
