package sandbox

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// A CallInfo is what is known of a call that comes.
type CallInfo struct {
	Kind string // what it does: prefetch.KindOf of its command; "" if that is not known
}

// A CallMemory says what a call waited for. Of calls that run side by side each counts what
// all of them did.
type CallMemory struct {
	Stall  time.Duration // time for which faults blocked the guest meanwhile
	Faults uint64        // faults that the guest waited for meanwhile

	Prefetched uint64                 // pages that were brought before the guest asked for them
	Wasted     uint64                 // pages brought ahead earlier that went again without a sign of use, since the last call's end: an upper bound
	Kinds      pager.Counts           // all of it in detail
	Ways       [cohort.NumWays]uint64 // how the pages were kept that were decoded
}

// BeginCall opens a tool window for a caller that runs commands through Agent:
// it closes the gap, restores ahead, and returns when the guest can answer. end
// closes the window and may be called once. An error wraps ErrDead.
func (s *Sandbox) BeginCall(_ context.Context, info CallInfo) (end func() CallMemory, err error) {
	if err := s.callStarts(); err != nil {
		return nil, err
	}
	if s.pager == nil {
		return sync.OnceValue(func() CallMemory {
			s.callEnds()
			return CallMemory{}
		}), nil
	}
	if s.ahead != nil {
		s.ahead.begin(info.Kind)
	}
	before := s.pager.Counts()
	return sync.OnceValue(func() CallMemory {
		if s.ahead != nil {
			s.ahead.end()
		}
		m := s.account(before)
		s.callEnds()
		return m
	}), nil
}

// account says what has happened since before.
func (s *Sandbox) account(before pager.Counts) CallMemory {
	now := s.pager.Counts()
	s.mu.Lock()
	wasted := now.Wasted + now.NeighboursWasted - s.wasted
	s.wasted += wasted
	n := now.Sub(before)
	s.need.Note(units.Bytes(n.Evicted+n.Restored+n.Private+n.Neighbours) * units.PageSize) //nolint:gosec // G115: pages of a guest
	s.mu.Unlock()
	return CallMemory{
		Stall: n.Stall, Faults: n.Faults(),
		Prefetched: n.Restored + n.Private + n.Neighbours, Wasted: wasted, Kinds: n, Ways: n.Ways,
	}
}

// Predictions says what the guesses were worth, up to the last pass; zero where nobody guesses.
func (s *Sandbox) Predictions() prefetch.Stats {
	if s.ahead == nil {
		return prefetch.Stats{}
	}
	return s.ahead.Stats()
}

// Need estimates how much memory the next call brings back; 0 without compression.
func (s *Sandbox) Need() units.Bytes {
	if s.pager == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.need.Bytes()
}

// Agent carries requests to the agent in the guest. Open a tool window around them.
func (s *Sandbox) Agent() http.RoundTripper { return s.link.Transport() }

// Dial connects to a TCP port of the guest's loopback; guestlink.ErrPortClosed if
// nobody listens. Open a tool window while bytes flow.
func (s *Sandbox) Dial(ctx context.Context, port int) (net.Conn, error) {
	return s.link.Dial(ctx, port)
}

// Configure changes what the guest is told about itself, and whether it has a network.
func (s *Sandbox) Configure(ctx context.Context, c guestlink.Settings) error {
	// The guest's interface follows the cable: raised after it is in, lowered before it is out.
	if c.Internet != nil && *c.Internet {
		if err := s.machine.SetNetwork(ctx, true); err != nil {
			return err
		}
	}
	err := s.link.Configure(ctx, c)
	if c.Internet != nil && !*c.Internet {
		err = errors.Join(err, s.machine.SetNetwork(ctx, false)) // whatever the guest says
	}
	return err
}

// online says whether the settings allow the network.
func online(s *guestlink.Settings) bool { return s != nil && s.Internet != nil && *s.Internet }

// Exit says how the VMM ended; its Cause is vmm.Alive before.
func (s *Sandbox) Exit() vmm.Exit { return s.machine.Exit() }
