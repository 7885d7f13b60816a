package restores

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
)

// Config is what Measure does. Parts whose fields are zero are left out.
type Config struct {
	Main     bench.Config                          // the paired run
	Ablation Ablation                              // short runs with parts of the prefetching off
	Fleet    func(v Variant) bench.FleetFactory    // for the ablation
	Colony   func(context.Context) (Colony, error) // for storm and idle
	Storm    Storm
	Idle     Idle
	User     string // account of the commands; "" = "user"
	Cores    int    // of this host, to estimate how long it all takes
}

// A Variant is one configuration of the prefetching.
type Variant struct {
	Name       string           // of the row
	Without    prefetch.Sources // prefetchers that are off
	NoPrefetch bool             // nothing is restored ahead
	Signals    bool             // calls are announced when the model has named their tool
}

// Variants lists what an ablation compares: everything, each prefetcher off, nothing ahead, and
// everything with signals.
func Variants() []Variant {
	all := []Variant{{Name: "all"}}
	for s := range prefetch.NumSources {
		all = append(all, Variant{Name: "without " + s.String(), Without: prefetch.Only(s)})
	}
	return append(all, Variant{Name: "nothing ahead", NoPrefetch: true}, Variant{Name: "all, signals", Signals: true})
}

// A Colony is sandboxes of one cohort, with compression. It is used from one goroutine but
// for Start, and for what its sandboxes do.
type Colony interface {
	// Start clones one sandbox. It may be called from several goroutines at once.
	Start(ctx context.Context, name string) (Sleeper, error)
	// Usage returns what the sandboxes cost, and what their cohort keeps.
	Usage() (bench.FleetUsage, error)
	// Close kills every sandbox and frees what they shared.
	Close() error
}

// A Sleeper is a sandbox that can be put to sleep. One goroutine uses it at a time.
type Sleeper interface {
	Run(ctx context.Context, spec bench.CallSpec) (bench.CallResult, error)
	// Compress runs one pass over all its memory.
	Compress(ctx context.Context) error
	// Park puts it away for a long time: until its next call it needs no VMM. It returns
	// errors.ErrUnsupported where that cannot be done.
	Park(ctx context.Context) error
	// Faults returns the service times of all its faults so far.
	Faults() report.Histogram
	// Process returns the process that it occupies; PID is 0 if it has none.
	Process() (Process, error)
	Close() error
}

// Measure runs the parts one after another and returns what they showed. With
// bench.ErrIntegrity there is a report too; with any other error there is none. When it
// returns, nothing that it started is left.
//
// The caller adds to the main run what only it knows: machine, template, where the
// trajectories come from.
func Measure(ctx context.Context, cfg Config) (*Report, error) {
	if cfg.User == "" {
		cfg.User = "user"
	}
	show := newProgress(cfg.Main.Display, cfg.schedule())
	cfg.Main.Display = show
	main, err := bench.Measure(ctx, cfg.Main)
	if err != nil && !errors.Is(err, bench.ErrIntegrity) {
		return nil, err
	}
	rep := &Report{Schema: Schema, Main: main, Where: whereOf(main.Runs)}
	if err != nil {
		return rep, err // what follows would measure something broken
	}
	if len(cfg.Ablation.Variants) > 0 {
		if rep.Ablation, err = cfg.ablate(ctx, show); err != nil {
			return nil, fmt.Errorf("ablation: %w", err)
		}
	}
	if cfg.Storm.Sandboxes > 0 {
		if rep.Storm, err = cfg.storm(ctx, show); err != nil {
			return nil, fmt.Errorf("storm: %w", err)
		}
	}
	if cfg.Idle.Sandboxes > 0 {
		if rep.Idle, err = cfg.idle(ctx, show); err != nil {
			return nil, fmt.Errorf("idle footprint: %w", err)
		}
	}
	return rep, nil
}

// callTimeout bounds a call of storm and idle; a doubled one only delays the error.
const callTimeout = 5 * time.Minute

// spec is a step as a sandbox gets it.
func (c *Config) spec(s traj.Step) bench.CallSpec {
	return bench.CallSpec{Shell: s.Shell, Cwd: traj.WorkTree, User: c.User, Env: traj.Environment(), Timeout: callTimeout}
}
