package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
	"github.com/agentzip/agentzip/internal/units"
)

// fakeFleet is a Fleet in memory. A sandbox's memory depends only on mode and
// whether a call runs: off 100 MiB; on 60 MiB during a call and 10 MiB resident
// + 4 MiB encoded in a gap. Each sandbox has a page table of 1 MiB when on; the
// fleet has 2 MiB of dictionary and 1 MiB of slack, shared.
type fakeFleet struct {
	mode Mode

	// answer says how a call ends; n counts from 1, the final state is n = 0.
	answer func(mode Mode, sandbox string, n int, spec CallSpec) (CallResult, error)
	// startError fails Start.
	startError error
	usageError error
	integrity  []string

	mu     sync.Mutex
	boxes  []*fakeBox
	closed bool
}

type fakeBox struct {
	fleet *fakeFleet
	name  string

	mu      sync.Mutex
	calls   int
	running bool
	closed  bool
}

func (f *fakeFleet) Start(_ context.Context, name string) (Box, error) {
	if f.startError != nil {
		return nil, f.startError
	}
	b := &fakeBox{fleet: f, name: name}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.boxes = append(f.boxes, b)
	return b, nil
}

func (f *fakeFleet) Usage() (FleetUsage, error) {
	if f.usageError != nil {
		return FleetUsage{}, f.usageError
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var u FleetUsage
	for _, b := range f.boxes {
		if x, err := b.Usage(); err == nil {
			u.ResidentPrivate += x.ResidentPrivate
			u.PoolFootprint += x.Encoded
			u.PageTables += x.PageTables
			u.VMMHeap += x.VMMHeap
			u.Sandboxes++
		}
	}
	if f.mode == On && u.Sandboxes > 0 {
		u.PoolFootprint += units.MiB
		u.Dictionaries = 2 * units.MiB
	}
	return u, nil
}

func (f *fakeFleet) Counters() Counters {
	c := Counters{IntegrityFailures: f.integrity}
	if f.mode == On {
		c.Latencies = map[string]report.Histogram{report.KindEvicted: {
			Total: 750 * time.Microsecond, Max: 310 * time.Microsecond,
			Buckets: []report.Bucket{{LE: 48 * time.Microsecond, Count: 9}, {LE: 320 * time.Microsecond, Count: 1}},
		}}
		c.Encoders = map[string]EncoderUse{"delta": {Pages: 3, Bytes: 900}}
		c.Faults = map[string]uint64{"minor": 7}
	}
	return c
}

func (f *fakeFleet) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for _, b := range f.boxes {
		if !b.isClosed() {
			return errors.New("a sandbox was left open")
		}
	}
	return nil
}

func (b *fakeBox) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}

func (b *fakeBox) Run(ctx context.Context, spec CallSpec) (CallResult, error) {
	b.mu.Lock()
	n := 0
	if spec.Shell != finalCommand {
		b.calls++
		n = b.calls
	}
	b.running = true
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.running = false
		b.mu.Unlock()
	}()
	res, err := b.fleet.answer(b.fleet.mode, b.name, n, spec)
	if !Sleep(ctx, res.Duration) {
		return CallResult{}, ctx.Err()
	}
	return res, err
}

func (b *fakeBox) Usage() (BoxUsage, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return BoxUsage{}, errors.New("closed")
	}
	u := BoxUsage{ResidentPrivate: 100 * units.MiB, VMMHeap: 30 * units.MiB}
	if b.fleet.mode == On {
		u.PageTables = units.MiB
		u.ResidentPrivate = 60 * units.MiB
		if !b.running {
			u.ResidentPrivate, u.Encoded, u.Pooled = 10*units.MiB, 4*units.MiB, 1000
		}
	}
	return u, nil
}

func (b *fakeBox) State() BoxState { return BoxState{Phase: Gap} }

func (b *fakeBox) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	return nil
}

// sameAnswers: every call takes 1 s, with compression 1.1 s of which 4 ms are
// stall, and prints what a command prints, with a duration that differs.
func sameAnswers(mode Mode, sandbox string, n int, _ CallSpec) (CallResult, error) {
	r := CallResult{Duration: time.Second, Stdout: fmt.Appendf(nil, "%s call %d\nRan 3 tests in 0.%d2s\n", sandbox, n, mode)}
	if mode == On {
		r.Duration, r.Stall, r.Faults = 1100*time.Millisecond, 4*time.Millisecond, 9
	}
	return r, nil
}

// plans makes n sandboxes of the given number of calls, 5 s of thinking before
// each.
func plans(n, calls int) []Plan {
	var out []Plan
	for i := range n {
		t := traj.Trajectory{ID: fmt.Sprintf("t%d", i+1)}
		for k := range calls {
			t.Steps = append(t.Steps, traj.Step{Shell: fmt.Sprintf("command %d", k+1), Think: 5 * time.Second})
		}
		out = append(out, Plan{Name: fmt.Sprintf("s%d", i+1), Trajectory: t})
	}
	return out
}
