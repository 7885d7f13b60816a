package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/prefetch"
)

// A Call says how one tool call went.
type Call struct {
	CallMemory

	Exit     guestlink.Exit
	Duration time.Duration // from dispatch to the end of its output, as the host saw it
}

// Run runs one command in the guest as a tool call: it closes the gap, and the
// gap opens again when no call has run for the settle time.
//
// A command that fails is a Call, not an error. An error wraps ErrDead when the
// sandbox has died; the cause is in its text.
func (s *Sandbox) Run(ctx context.Context, cmd guestlink.Command, stdout, stderr io.Writer) (Call, error) {
	end, err := s.BeginCall(ctx, CallInfo{Kind: kindOf(cmd)})
	if err != nil {
		return Call{}, err
	}
	begin := time.Now()
	exit, err := s.link.Run(ctx, cmd, stdout, stderr)
	call := Call{Exit: exit, Duration: time.Since(begin), CallMemory: end()}
	if err != nil {
		if cause := s.deathOf(err); cause != nil {
			return call, cause
		}
		return call, fmt.Errorf("run command in sandbox %s: %w", s.id, err)
	}
	return call, nil
}

// kindOf names the kind of a command.
func kindOf(cmd guestlink.Command) string {
	if cmd.Shell != "" {
		return prefetch.KindOf(cmd.Shell)
	}
	return prefetch.KindOf(strings.Join(cmd.Args, " "))
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
