package lifecycle

import (
	"context"
	"errors"
)

// ErrCut is the cause of a Live's context after its sandbox was killed, paused or died.
var ErrCut = errors.New("the sandbox has ended or was paused")

// A Live is one VM of a box: from its start to its pause or death. A box that is
// resumed has a new one.
type Live struct {
	Box     *Box    // immutable
	Sandbox Sandbox // immutable

	ctx context.Context //nolint:containedctx // the lifetime of a VM, not of a call
	cut context.CancelCauseFunc
}

func newLive(b *Box, s Sandbox) *Live {
	l := &Live{Box: b, Sandbox: s}
	l.ctx, l.cut = context.WithCancelCause(context.Background())
	return l
}

// Context ends, with the cause ErrCut, when requests under way must end: not
// cleanly, their sandbox is gone.
func (l *Live) Context() context.Context { return l.ctx }

// end breaks what runs through this VM. It is called after the box's state has
// changed, so that a client that asks at once finds the new state.
func (l *Live) end() { l.cut(ErrCut) }
