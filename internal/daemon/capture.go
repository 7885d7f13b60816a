package daemon

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/units"
)

// captureSample is how often the display of a capture is told what sandboxes hold. It costs
// 1-3 ms for each sandbox, which would be time of the guests.
const captureSample = 2 * time.Second

// captureTimeout bounds a call that hangs. Sixteen emulated guests on two busy cores took more
// than five minutes for a test module, and a call that is cut short leaves other pages.
const captureTimeout = 30 * time.Minute

// callsPerCore bounds the calls that run at once. With all of sixteen on two cores each takes
// eight times as long, and what has a time limit of its own (tests of network code) fails.
// One call a core would leave cores idle while a guest waits for its disk.
const callsPerCore = 2

// CaptureOptions says what to capture, and where.
type CaptureOptions struct {
	Dir      string // must not exist yet
	Template string
	Plans    []bench.Plan
	GapScale float64
	MaxGap   time.Duration
	Tool     string // the name of this program, with its revision
	Source   string // of the trajectories
	Display  report.Display
}

// Capture replays the plans without compression, in sandboxes that are one cohort, and
// writes their private pages at every gap to a folder. It appears when all is well: after an
// error, or when ctx ends, nothing is left.
func (d *Daemon) Capture(ctx context.Context, o CaptureOptions) (_ capture.Info, err error) {
	tmpl, clone, err := d.Template(ctx, o.Template)
	if err != nil {
		return capture.Info{}, err
	}
	m := report.ThisMachine()
	info := capture.Info{
		Tool: o.Tool, Source: o.Source,
		Template: capture.Template{Name: tmpl.Name, Digest: tmpl.Input},
		Machine: capture.Machine{
			CPU: m.CPU, Cores: m.Cores, OS: m.OS, Kernel: m.Kernel,
			QEMU: tmpl.Host.QEMU, Accel: string(tmpl.Hardware.Accel),
		},
	}
	for _, p := range o.Plans {
		info.Siblings = append(info.Siblings, capture.Sibling{Name: p.Name, Trajectory: p.Trajectory.ID})
	}
	w, err := capture.Create(o.Dir, info)
	if err != nil {
		return capture.Info{}, err
	}
	defer func() { err = errors.Join(err, w.Abort()) }()
	o.Display.Stage("template: memory and root image")
	if err := w.Template(ctx, clone.Image, clone.Root); err != nil {
		return capture.Info{}, err
	}
	err = bench.Replay(ctx, bench.Config{
		Fleet:     d.Fleets(FleetOptions{Template: o.Template}),
		Sandboxes: o.Plans, GapScale: o.GapScale, MaxGap: o.MaxGap,
		First: bench.Off, SampleEvery: captureSample, CallTimeout: captureTimeout, Display: o.Display,
		Parallel: callsPerCore * runtime.NumCPU(),
		OnCallEnd: func(ctx context.Context, e bench.CallEnd) error {
			return captureGap(ctx, w, clone.Image, e, o.Display)
		},
	})
	if err != nil {
		return capture.Info{}, err
	}
	return w.Commit()
}

// captureGap waits until a gap would open and writes what the sandbox holds then.
func captureGap(ctx context.Context, w *capture.Writer, image *guestmem.Image, e bench.CallEnd, display report.Display) (err error) {
	select {
	case <-time.After(policy.DefaultSettle):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	b, ok := e.Box.(*box)
	if !ok {
		return fmt.Errorf("capture: a sandbox of another fleet: %T", e.Box)
	}
	memory, err := guestmem.OpenReader(b.PID(), image)
	if err != nil {
		return b.orDeath(err)
	}
	defer memory.Close() //nolint:errcheck // read only
	info, err := w.Gap(capture.GapInfo{
		Sibling: e.Sandbox, Call: e.Call, Command: e.Step.Shell, Start: e.Start, End: e.End, At: time.Since(e.Begin),
	}, func(visit func(units.Frame, *units.Page) error) error {
		return memory.Private(func(f units.Frame, page *units.Page) error {
			if f%1024 == 0 && ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return visit(f, page)
		})
	})
	if err != nil {
		return b.orDeath(err)
	}
	display.Event(fmt.Sprintf("%s gap %d: %d private pages, %d changed, %s stored", b.ID(), e.Call, info.Private, info.Changed, units.Bytes(info.Length)))
	return nil
}

// orDeath returns the cause of the sandbox's death if err is its consequence.
func (b *box) orDeath(err error) error {
	if !errors.Is(err, guestmem.ErrGone) {
		return err
	}
	if cause := b.Cause(); cause != nil {
		return cause
	}
	return err
}
