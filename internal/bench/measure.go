package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/report"
)

// ErrIntegrity says that something came out differently with compression, or
// that the pager found a page that is not what it was. The report has it all.
var ErrIntegrity = errors.New("integrity check failed")

// ErrNoSignals says that calls cannot be announced to the sandboxes of a fleet.
var ErrNoSignals = errors.New("these sandboxes take no signals")

// NativeResult is how long the calls take without a VM: by sandbox and call,
// 0 where unknown. Missing says why there is nothing at all.
type NativeResult struct {
	Durations [][]time.Duration
	Missing   string
	Notes     []string
}

// Measure runs everything in pairs (with Config.Alone in one mode only) and returns the report. With ErrIntegrity
// there is a report too; with any other error there is none. When it returns,
// all fleets are closed.
//
// The caller adds what only it knows: machine, template, where the trajectories
// come from.
func Measure(ctx context.Context, cfg Config) (*report.Report, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	started := time.Now()
	native := NativeResult{Missing: "not asked for"}
	if cfg.NativeReplay != nil {
		cfg.Display.Stage("native: the same commands without a VM")
		native = cfg.NativeReplay()
		if native.Missing != "" {
			cfg.Display.Event("native durations: n/a: " + native.Missing)
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("measure: %w", context.Cause(ctx))
	}
	var runs []*run
	var baseline *run
	modes := cfg.modes()
	for i, mode := range modes {
		cfg.Display.Stage(fmt.Sprintf("run %d of %d: compression %s", i+1, len(modes), mode))
		r, err := cfg.replay(ctx, mode, i+1, baseline)
		if err != nil {
			return nil, err
		}
		if mode == Off || cfg.Alone {
			for _, l := range r.lanes {
				if err := l.look().err; err != nil {
					return nil, fmt.Errorf("run with compression %s: sandbox %s: %w", mode, l.plan.Name, err)
				}
			}
			if mode == Off {
				baseline = r
			}
		}
		runs = append(runs, r)
	}
	rep := summarise(&cfg, runs, native)
	rep.Started, rep.WallS = started, time.Since(started).Seconds()
	if !rep.Summary.Intact {
		return rep, ErrIntegrity
	}
	return rep, nil
}

// Replay runs everything once, in the mode of cfg.First, and measures nothing: for what
// OnCallEnd does. A sandbox that fails fails the replay. When it returns, the fleet is closed.
func Replay(ctx context.Context, cfg Config) error {
	if err := cfg.fill(); err != nil {
		return err
	}
	cfg.Display.Stage("replay: compression " + cfg.First.String())
	r, err := cfg.replay(ctx, cfg.First, 1, nil)
	if err != nil {
		return err
	}
	for _, l := range r.lanes {
		if err := l.look().err; err != nil {
			return fmt.Errorf("replay: sandbox %s: %w", l.plan.Name, err)
		}
	}
	return nil
}
