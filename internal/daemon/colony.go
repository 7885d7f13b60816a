package daemon

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/bench/restores"
	"github.com/agentzip/agentzip/internal/report"
)

// Colonies returns a factory of sandboxes that a benchmark puts to sleep and wakes.
func (d *Daemon) Colonies(o FleetOptions) func(context.Context) (restores.Colony, error) {
	return func(ctx context.Context) (restores.Colony, error) {
		c, err := d.NewCohort(ctx, CohortOptions{Template: o.Template, Isolation: o.Isolation, Without: o.Without})
		if err != nil {
			return nil, err
		}
		return &colony{fleet: fleet{daemon: d, opts: o, cohort: c}}, nil
	}
}

// colony is a fleet whose sandboxes can sleep.
type colony struct{ fleet }

// Start clones one sandbox.
func (c *colony) Start(ctx context.Context, name string) (restores.Sleeper, error) {
	b, err := c.clone(ctx, name)
	if err != nil {
		return nil, err
	}
	return sleeper{b}, nil
}

// Close kills the sandboxes that are left and frees what they shared.
func (c *colony) Close() error { return c.fleet.Close() }

// sleeper is one sandbox of a colony.
type sleeper struct{ *box }

// Compress runs one pass.
func (s sleeper) Compress(ctx context.Context) error {
	_, err := s.Sandbox.Compress(ctx)
	return err
}

// Park puts the sandbox away.
func (s sleeper) Park(context.Context) error {
	return fmt.Errorf("park sandbox %s: %w", s.ID(), errors.ErrUnsupported)
}

// Faults returns the service times of all faults so far.
func (s sleeper) Faults() report.Histogram {
	var h report.Histogram
	st, _ := s.Pager()
	for _, l := range []report.Histogram{histogram(st.Blocking), histogram(st.Protected), histogram(st.Zero), histogram(st.Template)} {
		h.Merge(l)
	}
	return h
}

// Process returns the VMM's process.
func (s sleeper) Process() (restores.Process, error) {
	m, err := s.Memory()
	if err != nil {
		return restores.Process{}, err
	}
	return restores.Process{PID: s.PID(), Kernel: m.Kernel}, nil
}
