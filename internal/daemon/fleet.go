package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/units"
)

// outputLimit bounds what a measured call's output may occupy, for each of its
// two streams: twice the largest of the recorded trajectories.
const outputLimit = 4 * units.MiB

// A FleetOptions says what the sandboxes of a fleet are.
type FleetOptions struct {
	Template   string
	Isolation  cohort.Isolation // what siblings share
	NoPrefetch bool
	Without    prefetch.Sources // of guesses that are off
}

// Fleets returns a factory of fleets for measurements.
func (d *Daemon) Fleets(o FleetOptions) bench.FleetFactory {
	return func(ctx context.Context, mode bench.Mode) (bench.Fleet, error) {
		f := &fleet{daemon: d, opts: o}
		if mode == bench.On {
			c, err := d.NewCohort(ctx, CohortOptions{Template: o.Template, Isolation: o.Isolation, Without: o.Without})
			if err != nil {
				return nil, err
			}
			f.cohort = c
		}
		return f, nil
	}
}

// fleet is the sandboxes of one run.
type fleet struct {
	daemon *Daemon
	opts   FleetOptions
	cohort *Cohort // nil: compression is off

	mu    sync.Mutex
	boxes []*box // guarded by mu
}

// box is one sandbox of a fleet.
type box struct {
	*sandbox.Sandbox

	closed atomic.Bool
	ahead  int64 // owned by Run's caller; pages restored ahead until the last call's end
}

// Close kills the sandbox. From then on it costs nothing and no longer counts
// in the fleet's usage; its counters stay.
func (b *box) Close() error {
	b.closed.Store(true)
	return b.Sandbox.Close()
}

// Start clones one sandbox.
func (f *fleet) Start(ctx context.Context, name string) (bench.Box, error) {
	b, err := f.clone(ctx, name)
	if err != nil {
		return nil, err
	}
	return b, nil
}

func (f *fleet) clone(ctx context.Context, name string) (*box, error) {
	s, err := f.daemon.Clone(ctx, CloneOptions{ID: name, Template: f.opts.Template, Cohort: f.cohort, NoPrefetch: f.opts.NoPrefetch})
	if err != nil {
		return nil, err
	}
	b := &box{Sandbox: s}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.boxes = append(f.boxes, b)
	return b, nil
}

func (f *fleet) all() []*box {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*box(nil), f.boxes...)
}

// Usage adds up the sandboxes and what their cohort keeps.
func (f *fleet) Usage() (bench.FleetUsage, error) {
	var u bench.FleetUsage
	for _, b := range f.all() {
		if b.closed.Load() {
			continue
		}
		bu, err := b.Sandbox.Usage()
		if b.closed.Load() {
			continue // closed meanwhile
		}
		if err != nil {
			return u, err
		}
		u.ResidentPrivate += bu.ResidentPrivate
		u.PageTables += bu.PageTables
		u.VMMHeap += bu.VMMHeap
		u.Pooled += bu.Kept
		u.Index += b.Predictions().Footprint
		u.Sandboxes++
	}
	if f.cohort != nil {
		st := f.cohort.cohort.Stats()
		u.PoolFootprint, u.Dictionaries = st.Pool.Footprint, st.Dictionaries
		u.Index += st.Index + f.cohort.cohort.Library().Size() + f.cohort.shared.History.Footprint()
	}
	return u, nil
}

// Counters merges the pagers' counters.
func (f *fleet) Counters() bench.Counters {
	c := bench.Counters{Faults: map[string]uint64{}, Encoders: map[string]bench.EncoderUse{}, Latencies: map[string]report.Histogram{}}
	for _, b := range f.all() {
		if err := b.Cause(); errors.Is(err, pager.ErrFatal) {
			c.IntegrityFailures = append(c.IntegrityFailures, err.Error())
		}
		st, on := b.Pager()
		if !on {
			continue
		}
		addLatencies(c.Latencies, st)
		c.Ahead.Add(aheadOf(b.Sandbox, st))
		cancels := b.Cancels()
		report.MergeAll(c.Latencies, map[string]report.Histogram{report.KindCancel: histogram(cancels)})
		c.CancelledPasses += uint64(cancels.Count)
		addFaults(c.Faults, st)
		addEncoders(c.Encoders, st)
		c.Evicted += st.Encoded + st.Zeros + st.Equal + st.Clean
		c.CleanDrops += st.Clean
		c.Incompressible += st.Kept
		c.Cancelled += st.Cancelled
		c.Passes += st.Passes
		c.Evicting += st.Evicting
		c.PoolFull += st.FullPasses
		if st.Mismatches > 0 {
			c.IntegrityFailures = append(c.IntegrityFailures, fmt.Sprintf("sandbox %s: %d encodings did not decode to their page", b.ID(), st.Mismatches))
		}
	}
	c.Prefetchers = f.prefetchers(c.Faults[report.KindEvicted] + c.Faults[report.KindZero] + c.Faults[report.KindTemplate])
	return c
}

// prefetchers says what the guesses were worth, all together first; nil if nobody guessed.
func (f *fleet) prefetchers(faults uint64) []report.Prefetcher {
	var sum prefetch.Stats
	for _, b := range f.all() {
		sum.Merge(b.Predictions())
	}
	if sum.Calls == 0 {
		return nil
	}
	row := func(name string, asked, held, useful int) report.Prefetcher {
		return report.Prefetcher{Name: name, Restored: uint64(asked), HeldOut: uint64(held), Missed: uint64(useful), Faults: faults} //nolint:gosec // G115: counts
	}
	rows := []report.Prefetcher{row(report.AllPrefetchers, sum.Asked, sum.Held, sum.Useful)}
	for _, s := range sum.Sources {
		if s.Asked+s.Held > 0 {
			rows = append(rows, row(s.Source.String(), s.Asked, s.Held, s.Useful))
		}
	}
	return rows
}

func addFaults(to map[string]uint64, st pager.Stats) {
	to[report.KindEvicted] += uint64(st.Blocking.Count)
	to[report.KindTemplate] += uint64(st.Template.Count)
	to[report.KindZero] += uint64(st.Zero.Count)
	to[report.KindProtected] += uint64(st.Protected.Count)
	to[report.KindStale] += st.Stale
}

func addEncoders(to map[string]bench.EncoderUse, st pager.Stats) {
	add := func(name string, pages uint64, bytes units.Bytes) {
		u := to[name]
		to[name] = bench.EncoderUse{Pages: u.Pages + pages, Bytes: u.Bytes + bytes}
	}
	add("zero", st.Zeros, 0)
	add("template", st.Equal, 0)
	for _, w := range st.Ways {
		add(w.Way.String(), w.Pages, w.Bytes)
	}
}

// addLatencies merges the distributions of one pager.
func addLatencies(to map[string]report.Histogram, st pager.Stats) {
	report.MergeAll(to, map[string]report.Histogram{
		report.KindEvicted: histogram(st.Blocking), report.KindPrefetched: histogram(st.Prefetched), report.KindPage: histogram(st.PrefetchedPage),
		report.KindTemplate: histogram(st.Template), report.KindZero: histogram(st.Zero),
		report.KindProtected: histogram(st.Protected), report.KindHeld: histogram(st.Held),
	})
}

// aheadOf counts what was there before the guest asked for it.
func aheadOf(s *sandbox.Sandbox, st pager.Stats) report.Ahead {
	n := s.Counts()
	return report.Ahead{
		Restored: n.Restored, Private: n.Private, Shared: n.Shared, Neighbours: n.Neighbours, MappedBack: st.MappedBack,
		Used: n.Used, Wasted: n.Wasted, NeighboursUsed: n.NeighboursUsed, NeighboursWasted: n.NeighboursWasted,
	}
}

// histogram converts a distribution.
func histogram(l pager.Latency) report.Histogram {
	h := report.Histogram{Total: l.Total, Max: l.Max}
	for le, n := range l.Buckets() {
		h.Buckets = append(h.Buckets, report.Bucket{LE: le, Count: n})
	}
	return h
}

// Close kills the sandboxes and frees what they shared.
func (f *fleet) Close() error {
	boxes := f.all()
	errs := make([]error, len(boxes), len(boxes)+1)
	var wg sync.WaitGroup
	for i, b := range boxes {
		wg.Go(func() { errs[i] = b.Sandbox.Close() })
	}
	wg.Wait()
	if f.cohort != nil {
		errs = append(errs, f.cohort.Close())
	}
	return errors.Join(errs...)
}

// Run runs one call and keeps its output up to outputLimit.
func (b *box) Run(ctx context.Context, spec bench.CallSpec) (bench.CallResult, error) {
	var stdout, stderr bounded
	watch := b.watchStall()
	call, err := b.Sandbox.Run(ctx, guestlink.Command{
		Shell: spec.Shell, Cwd: spec.Cwd, User: spec.User, Env: spec.Env, Timeout: spec.Timeout,
	}, &stdout, &stderr)
	res := bench.CallResult{
		Stdout: stdout.data, Stderr: stderr.data, Truncated: stdout.cut || stderr.cut,
		Exit: call.Exit.Code, Signal: call.Exit.Signal, TimedOut: call.Exit.TimedOut,
		Duration: call.Duration, Stall: call.Stall, Faults: call.Faults, Wasted: call.Wasted,
	}
	watch(&res)
	return res, err
}

// Announce passes on that the model has named the tool of its next call.
func (b *box) Announce(tool string) {
	b.Signal(policy.Signal{Kind: policy.SignalToolName, Tool: tool})
}

// Usage converts the sandbox's own account.
func (b *box) Usage() (bench.BoxUsage, error) {
	u, err := b.Sandbox.Usage()
	return bench.BoxUsage{
		ResidentPrivate: u.ResidentPrivate, Encoded: u.Encoded, PageTables: u.PageTables,
		VMMHeap: u.VMMHeap, Pooled: u.Kept,
	}, err
}

// State converts the sandbox's phase.
func (b *box) State() bench.BoxState {
	switch b.Phase() {
	case sandbox.Starting:
		return bench.BoxState{Phase: bench.Booting}
	case sandbox.Running:
		return bench.BoxState{Phase: bench.Running}
	case sandbox.Compressing:
		return bench.BoxState{Phase: bench.Compressing}
	case sandbox.Dead:
		return bench.BoxState{Phase: bench.Dead, Cause: b.Cause().Error()}
	case sandbox.Gap:
	}
	return bench.BoxState{Phase: bench.Gap}
}

// bounded keeps the first outputLimit bytes.
type bounded struct {
	data []byte
	cut  bool
}

func (w *bounded) Write(p []byte) (int, error) {
	keep := min(len(p), int(outputLimit)-len(w.data))
	w.data = append(w.data, p[:keep]...)
	w.cut = w.cut || keep < len(p)
	return len(p), nil
}
