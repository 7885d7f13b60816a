package restores

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
	"github.com/agentzip/agentzip/internal/units"
)

// world makes fleets and colonies that exist only in memory, and notes what was done to them.
type world struct {
	variants []Variant
	modes    []bench.Mode

	parks     bool // sandboxes can be parked
	slowest   int  // the sandbox of a colony whose faults take ten times as long; -1: none
	failsCall int  // the sandbox of a colony whose calls fail; -1: none

	mu      sync.Mutex
	started int // guarded by mu
	closed  int // guarded by mu
	passes  int // guarded by mu
}

func newWorld() *world { return &world{slowest: -1, failsCall: -1} }

// factory makes fleets of a variant. With compression a call takes 1.1 s, and has 30 blocking
// restores and 70 pages ahead; with nothing ahead it takes 1.5 s and has 100.
func (w *world) factory(v Variant) bench.FleetFactory {
	return func(_ context.Context, mode bench.Mode) (bench.Fleet, error) {
		w.variants, w.modes = append(w.variants, v), append(w.modes, mode)
		return &fakeFleet{mode: mode, variant: v}, nil
	}
}

type fakeFleet struct {
	mode    bench.Mode
	variant Variant
}

func (f *fakeFleet) Start(context.Context, string) (bench.Box, error) { return &fakeBox{fleet: f}, nil }
func (f *fakeFleet) Close() error                                     { return nil }

func (f *fakeFleet) Usage() (bench.FleetUsage, error) {
	if f.mode == bench.Off {
		return bench.FleetUsage{ResidentPrivate: 100 * units.MiB, VMMHeap: 100 * units.MiB}, nil
	}
	return bench.FleetUsage{ResidentPrivate: 10 * units.MiB, VMMHeap: 90 * units.MiB}, nil
}

func (f *fakeFleet) Counters() bench.Counters {
	if f.mode == bench.Off {
		return bench.Counters{}
	}
	return bench.Counters{
		Latencies: map[string]report.Histogram{
			report.KindEvicted:   uniform(60, 48*time.Microsecond),
			report.KindPage:      uniform(140, 4*time.Microsecond),
			report.KindProtected: uniform(20, 30*time.Microsecond),
			report.KindCancel:    uniform(3, 400*time.Microsecond),
		},
		Prefetchers: []report.Prefetcher{
			{Name: report.AllPrefetchers, Restored: 1000, HeldOut: 50, Missed: 40, Faults: 200},
			{Name: "hot set", Restored: 600, HeldOut: 40, Missed: 36, Faults: 200},
			{Name: "stride", Restored: 5, HeldOut: 2, Faults: 200},
		},
	}
}

func uniform(n uint64, d time.Duration) report.Histogram {
	return report.Histogram{Total: time.Duration(n) * d, Max: d, Buckets: []report.Bucket{{LE: d, Count: n}}}
}

type fakeBox struct{ fleet *fakeFleet }

func (b *fakeBox) Usage() (bench.BoxUsage, error) {
	return bench.BoxUsage{ResidentPrivate: 10 * units.MiB}, nil
}
func (b *fakeBox) State() bench.BoxState { return bench.BoxState{Phase: bench.Gap} }
func (b *fakeBox) Close() error          { return nil }

func (b *fakeBox) Run(_ context.Context, _ bench.CallSpec) (bench.CallResult, error) {
	if b.fleet.mode == bench.Off {
		time.Sleep(time.Second)
		return bench.CallResult{Duration: time.Second}, nil
	}
	res := bench.CallResult{Duration: 1100 * time.Millisecond, Stall: 2 * time.Millisecond, Faults: 40, Ahead: 70}
	evicted := uint64(30)
	if b.fleet.variant.NoPrefetch {
		res.Duration, evicted, res.Ahead, res.Faults = 1500*time.Millisecond, 100, 0, 110
	}
	res.Kinds = map[string]bench.FaultCost{
		report.KindEvicted:   {Count: evicted, Stall: 1500 * time.Microsecond},
		report.KindProtected: {Count: 10, Stall: 500 * time.Microsecond},
		report.KindZero:      {},
	}
	res.Progress = []bench.StallAt{{After: 10 * time.Millisecond, Stall: time.Millisecond}, {After: res.Duration, Stall: res.Stall}}
	time.Sleep(res.Duration)
	return res, nil
}

// colony makes sandboxes whose process is the test's own.
func (w *world) colony(context.Context) (Colony, error) { return &fakeColony{world: w}, nil }

type fakeColony struct {
	world *world

	mu    sync.Mutex
	boxes []*fakeSleeper // guarded by mu
}

func (c *fakeColony) Start(_ context.Context, name string) (Sleeper, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.world.mu.Lock()
	c.world.started++
	c.world.mu.Unlock()
	s := &fakeSleeper{world: c.world, name: name}
	c.boxes = append(c.boxes, s)
	return s, nil
}

func (c *fakeColony) Usage() (bench.FleetUsage, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := bench.FleetUsage{PoolFootprint: 100 * units.KiB}
	for _, b := range c.boxes {
		if !b.closed {
			u.PoolFootprint += 500 * units.KiB
			u.PageTables += 16 * units.KiB
		}
	}
	return u, nil
}

func (c *fakeColony) Close() error {
	for _, b := range c.boxes {
		if err := b.Close(); err != nil {
			return err
		}
	}
	return nil
}

type fakeSleeper struct {
	world  *world
	name   string
	calls  int
	parked bool
	closed bool
	faults report.Histogram
}

func nameIndex(name string) (i int) {
	if _, err := fmt.Sscanf(name, "i%d", &i); err != nil {
		panic(err)
	}
	return i - 1
}

func (s *fakeSleeper) Run(context.Context, bench.CallSpec) (bench.CallResult, error) {
	if nameIndex(s.name) == s.world.failsCall {
		return bench.CallResult{}, errors.New("link down")
	}
	s.calls++
	d := 100 * time.Microsecond
	if nameIndex(s.name) == s.world.slowest {
		d *= 10
	}
	s.faults.Merge(uniform(20, d))
	time.Sleep(2 * time.Second)
	return bench.CallResult{Duration: 2 * time.Second, Stall: 20 * d}, nil
}

func (s *fakeSleeper) Compress(context.Context) error {
	s.world.mu.Lock()
	defer s.world.mu.Unlock()
	s.world.passes++
	return nil
}

func (s *fakeSleeper) Park(context.Context) error {
	if !s.world.parks {
		return fmt.Errorf("park: %w", errors.ErrUnsupported)
	}
	s.parked = true
	return nil
}

func (s *fakeSleeper) Faults() report.Histogram { return s.faults }

func (s *fakeSleeper) Process() (Process, error) {
	if s.parked {
		return Process{}, nil
	}
	return Process{PID: os.Getpid(), Kernel: units.GiB}, nil
}

func (s *fakeSleeper) Close() error {
	if !s.closed {
		s.closed = true
		s.world.mu.Lock()
		defer s.world.mu.Unlock()
		s.world.closed++
	}
	return nil
}

// plans makes n sandboxes with calls of two kinds and 5 s before each.
func plans(n, calls int) (out []bench.Plan) {
	for i := range n {
		t := traj.Trajectory{ID: fmt.Sprintf("t%d", i+1)}
		for k := range calls {
			t.Steps = append(t.Steps, traj.Step{Shell: fmt.Sprintf("command %d", k+1), Kind: []traj.Kind{traj.Read, traj.Python}[k%2], Think: 5 * time.Second})
		}
		out = append(out, bench.Plan{Name: fmt.Sprintf("s%d", i+1), Trajectory: t})
	}
	return out
}
