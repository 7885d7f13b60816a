package daemon

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/units"
)

const (
	// sampleEvery is how often the host's memory is looked at: 100 us of a core. Doubled, a
	// guest that allocates 1 GB/s takes another GB before anybody notices.
	sampleEvery = time.Second
	// newSandbox is what a sandbox occupies from its start to its first pass: its VMM under
	// TCG (30 MiB anonymous) and what its guest writes while it gets its identity.
	newSandbox = 48 * units.MiB
	// poolMost is what a pool without a limit can address.
	poolMost = 4 * units.GiB
)

// A tenant occupies memory: *sandbox.Sandbox, and fakes.
type tenant interface {
	Need() units.Bytes
	Squeeze()
	Cause() error
}

// A shortage watches the host's memory for all sandboxes of a daemon, and refuses new ones
// whose memory could not be given back.
//
// Lock order: mu, then nothing.
type shortage struct {
	look  func() (policy.HostSample, error) // immutable; without what the sandboxes need
	pools func() float64                    // immutable; the share of its limit that the fullest pool has used
	log   *slog.Logger                      // immutable
	gauge sandbox.Gauge                     // the level, for sandboxes

	mu       sync.Mutex
	pressure *policy.Pressure    // guarded by mu
	coming   int                 // guarded by mu; sandboxes that are being started
	tenants  map[tenant]struct{} // guarded by mu
	blind    bool                // guarded by mu; the last look failed
}

func newShortage(look func() (policy.HostSample, error), pools func() float64, log *slog.Logger) *shortage {
	return &shortage{look: look, pools: pools, log: log, pressure: policy.NewPressure(policy.Limits{}), tenants: map[tenant]struct{}{}}
}

// lookAtHost is what the kernel says. Without PSI there is only MemAvailable.
func lookAtHost() (policy.HostSample, error) {
	total, available, err := hostmem.Available()
	if err != nil {
		return policy.HostSample{}, err
	}
	s := policy.HostSample{At: time.Now(), Total: total, Available: available}
	switch s.Some, s.Full, err = hostmem.Pressure(); {
	case err == nil:
		s.StallKnown = true
	case !errors.Is(err, hostmem.ErrNoPressure):
		return policy.HostSample{}, err
	}
	return s, nil
}

// run watches until ctx ends.
func (w *shortage) run(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		w.sample()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sample looks at the host, and at a higher level makes every sandbox that sleeps smaller.
func (w *shortage) sample() {
	s, err := w.look()
	if err == nil {
		s.PoolUsed = w.pools()
	}
	w.mu.Lock()
	if err != nil {
		if !w.blind {
			w.log.Warn("look at the host's memory: the last level stays", "err", err)
		}
		w.blind = true
		w.mu.Unlock()
		return
	}
	w.blind = false
	var squeeze []tenant
	for t := range w.tenants {
		if t.Cause() != nil {
			delete(w.tenants, t)
			continue
		}
		s.Reserve += t.Need()
		squeeze = append(squeeze, t)
	}
	before, level := w.pressure.Level(), w.pressure.Note(s)
	w.mu.Unlock()
	w.gauge.Set(level)
	if level == before {
		return
	}
	w.log.Info("the host's memory", "level", level, "available", s.Available, "reserve", s.Reserve, "some", s.Some, "full", s.Full, "pool", s.PoolUsed)
	if level > before {
		for _, t := range squeeze {
			t.Squeeze()
		}
	}
}

// admit says whether a sandbox may start; the error wraps a *policy.Refusal. Without one the
// caller calls started with what came of it, or nil.
func (w *shortage) admit() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.pressure.Admit(units.Bytes(w.coming+1) * (newSandbox + policy.FirstNeed)); err != nil {
		return err
	}
	w.coming++
	return nil
}

func (w *shortage) started(t tenant) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.coming--
	if t != nil {
		w.tenants[t] = struct{}{}
	}
}
