package vmm

import (
	"context"
	"fmt"

	"github.com/agentzip/agentzip/internal/guestmem"
)

// handshake lets the shim, if there is one, go on into the VMM's main. By now the
// process is in its cgroup: all memory it will ever have is charged there.
func (m *machine) handshake(ctx context.Context, pl *plumbing) error {
	if pl.shim == nil {
		return nil
	}
	// AcceptShim waits on the process alone: end the one to end the other.
	stop := context.AfterFunc(ctx, m.end)
	defer stop()
	conn := pl.shim
	pl.shim = nil // AcceptShim takes it over
	shim, err := guestmem.AcceptShim(conn)
	if err == nil {
		m.mu.Lock()
		m.shim = shim
		m.mu.Unlock()
		err = shim.Go()
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return fmt.Errorf("shake hands with the shim: %w", err)
}

// Shim returns the daemon's end of the preloaded library; nil if there is none. It is
// closed with the machine.
func (m *machine) Shim() *guestmem.Shim {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.shim
}
