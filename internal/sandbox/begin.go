package sandbox

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/vmm"
)

// A CallInfo is what is known of a call that comes.
type CallInfo struct {
	Kind string // the command's name, "" if unknown
}

// A CallMemory says what a call waited for.
type CallMemory struct {
	Stall  time.Duration // time for which faults blocked the guest meanwhile
	Faults uint64        // faults served meanwhile
}

// BeginCall opens a tool window for a caller that runs commands through Agent:
// it closes the gap, restores ahead, and returns when the guest can answer. end
// closes the window and may be called once. An error wraps ErrDead.
func (s *Sandbox) BeginCall(ctx context.Context, _ CallInfo) (end func() CallMemory, err error) {
	if err := s.callStarts(); err != nil {
		return nil, err
	}
	ahead := s.restoreAhead(context.WithoutCancel(ctx))
	var before CallMemory
	if s.pager != nil {
		before = CallMemory{Stall: s.pager.Stall(), Faults: s.pager.Faults()}
	}
	return sync.OnceValue(func() CallMemory {
		var m CallMemory
		if s.pager != nil {
			m = CallMemory{Stall: s.pager.Stall() - before.Stall, Faults: s.pager.Faults() - before.Faults}
		}
		ahead()
		s.callEnds()
		return m
	}), nil
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
