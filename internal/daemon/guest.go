package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/vmm"
)

// guest is one sandbox of the gateway.
type guest struct {
	*sandbox.Sandbox
	leave   func()       // the cohort, after Close
	figures *callFigures // immutable

	mu    sync.Mutex
	last  sandbox.CallMemory // guarded by mu; of the call that ended last
	cpu   time.Duration      // guarded by mu; of the VMM when Busy was asked last
	cpuAt time.Time          // guarded by mu
}

// Agent carries requests to the guest's agent.
func (g *guest) Agent() http.RoundTripper { return g.Sandbox.Agent() }

// Dial connects to a port in the guest.
func (g *guest) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	c, err := g.Sandbox.Dial(ctx, int(port))
	if errors.Is(err, guestlink.ErrPortClosed) {
		return nil, lifecycle.ErrPortClosed
	}
	return c, err
}

// BeginCall opens a tool window.
func (g *guest) BeginCall(ctx context.Context, kind string) (func(), error) {
	end, err := g.Sandbox.BeginCall(ctx, sandbox.CallInfo{Kind: kind})
	if err != nil {
		return nil, err
	}
	return func() {
		m := end()
		g.figures.note(m)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.last = m
	}, nil
}

// busyShare of a core that a guest uses is taken for work. An idle one uses up to
// 0.9 % under TCG (design.md 3b); a command that waits for input the same.
const busyShare = 0.1

// busyLook is the shortest time over which the share is measured.
const busyLook = 200 * time.Millisecond

// Busy reports whether the guest has computed since it was asked last. The first
// answer, and one that cannot be had, is no.
func (g *guest) Busy() bool {
	used, err := hostmem.CPUTime(g.PID())
	if err != nil {
		return false // it has ended; whoever reads its stream sees it
	}
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	before, at := g.cpu, g.cpuAt
	g.cpu, g.cpuAt = used, now
	if at.IsZero() || now.Sub(at) < busyLook {
		return true // nothing to compare with: look once more
	}
	return (used - before).Seconds() > busyShare*now.Sub(at).Seconds()
}

// SetInternet opens or closes the guest's way out.
func (g *guest) SetInternet(ctx context.Context, open bool) error {
	return g.Configure(ctx, guestlink.Settings{Internet: &open})
}

// maxTool bounds the name of a tool, which is a client's: the cohort remembers some.
const maxTool = 64

// Signal passes a signal to the rhythm.
func (g *guest) Signal(s lifecycle.Signal) {
	if kind, err := policy.ParseSignal(s.Kind); err == nil { // the control plane has checked it
		g.Sandbox.Signal(policy.Signal{Kind: kind, Tool: s.Tool[:min(len(s.Tool), maxTool)]})
	}
}

// Memory is the sandbox's memory statement.
func (g *guest) Memory() (lifecycle.Memory, error) {
	u, err := g.Usage()
	if err != nil {
		return lifecycle.Memory{}, err
	}
	m := lifecycle.Memory{
		Private: int64(u.ResidentPrivate), Encoded: int64(u.Encoded), PageTables: int64(u.PageTables),
		VMM: int64(u.VMMHeap), Kept: u.Kept, Phase: g.Phase().String(),
	}
	g.mu.Lock()
	last := g.last
	g.mu.Unlock()
	m.LastStall, m.LastFaults, m.LastPrefetched, m.LastWasted = last.Stall, last.Faults, last.Prefetched, last.Wasted
	for w, n := range last.Ways {
		if n > 0 {
			m.LastWays = append(m.LastWays, lifecycle.Way{Name: cohort.Way(w).String(), Pages: n}) //nolint:gosec // G115: below cohort.NumWays
		}
	}
	if st, on := g.Pager(); on {
		m.Stall = st.Blocking.Total + st.Template.Total + st.Zero.Total + st.Protected.Total
		m.Faults = uint64(st.Blocking.Count + st.Template.Count + st.Zero.Count + st.Protected.Count)
		for _, w := range st.Ways {
			m.Ways = append(m.Ways, lifecycle.Way{Name: w.Way.String(), Pages: w.Pages, Bytes: int64(w.Bytes)})
		}
	}
	return m, nil
}

// Pause is not possible yet.
func (g *guest) Pause(context.Context, bool) error {
	return fmt.Errorf("%w: pause is not supported yet", lifecycle.ErrUnchanged)
}

// Snapshot is not possible yet.
func (g *guest) Snapshot(context.Context, string) error { return lifecycle.ErrUnsupported }

// Fork is not possible yet.
func (g *guest) Fork(_ context.Context, specs []lifecycle.Spec) ([]lifecycle.Sandbox, []error) {
	errs := make([]error, len(specs))
	for i := range errs {
		errs[i] = lifecycle.ErrUnsupported
	}
	return make([]lifecycle.Sandbox, len(specs)), errs
}

// Kill ends the sandbox.
func (g *guest) Kill() error {
	err := g.Close()
	g.leave()
	return err
}

// Cause says why the sandbox ended.
func (g *guest) Cause() (lifecycle.Cause, string) {
	err := g.Sandbox.Cause()
	if err == nil {
		return lifecycle.CauseNone, ""
	}
	if errors.Is(err, pager.ErrFatal) {
		return lifecycle.CauseIntegrity, err.Error()
	}
	e := g.Exit()
	switch e.Cause {
	case vmm.GuestPowerOff, vmm.GuestReboot:
		return lifecycle.CauseGuest, e.String()
	case vmm.GuestPanic:
		if strings.Contains(string(g.Console()), "Out of memory") {
			return lifecycle.CauseGuestOOM, e.String()
		}
		return lifecycle.CauseGuest, e.String()
	case vmm.OutOfMemory:
		return lifecycle.CausePressure, e.String()
	case vmm.Killed:
		return lifecycle.CauseKilled, e.String()
	case vmm.Alive, vmm.Crashed, vmm.HostGone:
	}
	return lifecycle.CauseCrash, e.String()
}
