package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
)

// Config is what Measure does. The zero values of the optional fields mean what
// their comments say.
type Config struct {
	Fleet        FleetFactory
	Sandboxes    []Plan
	GapScale     float64       // think times are multiplied by it; 0 leaves no gaps
	MaxGap       time.Duration // think times are cut at it, before scaling; 0 = not
	First        Mode          // the mode of the first run
	Alone        bool          // only runs in the mode First: nothing is compared, and no ratio known
	Repeat       int           // pairs of runs; every other pair runs in the other order. 0 = 1
	SampleEvery  time.Duration // 0 = 200 ms
	CallTimeout  time.Duration // for calls that name none; 0 = 5 minutes
	User         string        // account of the commands; "" = "user"
	Display      report.Display
	NativeReplay func() NativeResult // how long the calls take without a VM; nil = not measured
	OnCallEnd    CallEndFunc         // looks at a sandbox between its calls; nil = nobody does
	Signals      bool                // calls are announced when the model has named their tool; boxes must be Announcers
	Parallel     int                 // at most so many calls run at once, the others wait for their turn; 0 = any number
}

// A CallEndFunc is called when a call has ended, before the thinking time, also after the
// last call. It runs on the goroutine that replays the sandbox's trajectory: no call of that
// sandbox runs meanwhile, and the time it takes counts as thinking time. Its error ends the run.
type CallEndFunc func(ctx context.Context, e CallEnd) error

// A CallEnd says which call has ended.
type CallEnd struct {
	Sandbox    int           // index of its plan
	Call       int           // from 1
	Step       traj.Step     // that was the call
	Begin      time.Time     // of the run: zero of all offsets
	Start, End time.Duration // of the call
	Box        Box
}

// A Plan is what one sandbox replays.
type Plan struct {
	Name       string // of the sandbox; the same in all runs
	Trajectory traj.Trajectory
	Shift      time.Duration // the sandbox starts so much later, scaled
}

// defaultSampleEvery: twice as long misses short calls, half as long makes the
// measuring itself a load (1-3 ms per sandbox and sample).
const defaultSampleEvery = 200 * time.Millisecond

// defaultCallTimeout bounds a call that hangs. An emulated guest on a busy host
// needs up to a minute for a test module; a doubled bound only delays the error.
const defaultCallTimeout = 5 * time.Minute

var errConfig = errors.New("nothing to replay")

func (c *Config) fill() error {
	if len(c.Sandboxes) == 0 {
		return fmt.Errorf("measure: %w", errConfig)
	}
	for _, p := range c.Sandboxes {
		if len(p.Trajectory.Steps) == 0 {
			return fmt.Errorf("measure: sandbox %s: %w", p.Name, errConfig)
		}
	}
	if c.Repeat <= 0 {
		c.Repeat = 1
	}
	if c.SampleEvery <= 0 {
		c.SampleEvery = defaultSampleEvery
	}
	if c.CallTimeout <= 0 {
		c.CallTimeout = defaultCallTimeout
	}
	if c.User == "" {
		c.User = "user"
	}
	if c.Display == nil {
		c.Display = silent{}
	}
	return nil
}

// gap returns how long the sandbox waits before a step.
func (c *Config) gap(s traj.Step) time.Duration {
	d := s.Think
	if c.MaxGap > 0 {
		d = min(d, c.MaxGap)
	}
	return c.scaled(d)
}

func (c *Config) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) * max(0, c.GapScale))
}

// lead returns for how long before a step its tool was known: as recorded, or else drawn. It is
// not scaled: what can be restored in it does not take longer because calls are emulated.
func (c *Config) lead(t traj.Trajectory, n int) time.Duration {
	s := t.Steps[n]
	if s.Lead == 0 {
		return traj.DrawLead(t.ID, n, s)
	}
	return s.Lead
}

// modes lists the runs: pairs, every other one in the other order.
func (c *Config) modes() []Mode {
	var out []Mode
	for i := range c.Repeat {
		a := c.First
		if i%2 == 1 {
			a = other(a)
		}
		if c.Alone {
			out = append(out, c.First)
			continue
		}
		out = append(out, a, other(a))
	}
	return out
}

func other(m Mode) Mode {
	if m == Off {
		return On
	}
	return Off
}

// silent is the Display of callers that want none.
type silent struct{}

func (silent) Stage(string)      {}
func (silent) Rows([]report.Row) {}
func (silent) Event(string)      {}
func (silent) Close()            {}

// PlanSandboxes gives n sandboxes their trajectories, in order. When there are
// fewer trajectories than sandboxes they are replayed again with a shift, and
// repeated says how many sandboxes that concerns. maxCalls cuts trajectories; 0
// does not; dropped counts the calls cut off per sandbox.
func PlanSandboxes(trs []traj.Trajectory, n, maxCalls int) (plans []Plan, repeated int, dropped []int) {
	for i := range n {
		t := trs[i%len(trs)]
		cut := 0
		if maxCalls > 0 && len(t.Steps) > maxCalls {
			cut = len(t.Steps) - maxCalls
			t.Steps = t.Steps[:maxCalls]
		}
		round := i / len(trs)
		if round > 0 {
			repeated++
		}
		plans = append(plans, Plan{Name: fmt.Sprintf("s%d", i+1), Trajectory: t, Shift: time.Duration(round) * repeatShift})
		dropped = append(dropped, cut)
	}
	return plans, repeated, dropped
}

// repeatShift keeps a repeated trajectory from running in step with the first.
const repeatShift = 3 * time.Second
