package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/units"
)

// summarise turns the runs into a report.
func summarise(cfg *Config, runs []*run, native NativeResult) *report.Report {
	rep := &report.Report{Schema: report.Schema, Plan: planOf(cfg), Notes: append([]string{}, native.Notes...)}
	rep.Differences, rep.IntegrityFailures, rep.NotCompared = []report.Difference{}, []string{}, []string{}
	first := firstOf(runs, Off) // nil if only compression was asked for: nothing to compare with
	for _, r := range runs {
		if first != nil && r != first {
			d, n := compare(first, r)
			rep.Differences = append(rep.Differences, d...)
			rep.NotCompared = append(rep.NotCompared, n...)
		}
		rep.IntegrityFailures = append(rep.IntegrityFailures, r.counters.IntegrityFailures...)
		if r.failures > 0 {
			rep.Notes = append(rep.Notes, fmt.Sprintf("run %d: %d of %d memory samples failed: %v", r.number, r.failures, r.failures+len(r.samples), r.failure))
		}
		rep.Runs = append(rep.Runs, recordRun(r, native))
	}
	for i := range cfg.Sandboxes {
		rep.Sandboxes = append(rep.Sandboxes, sandboxRow(runs, i))
	}
	rep.Summary = total(runs, native)
	rep.Summary.Intact = len(rep.Differences) == 0 && len(rep.IntegrityFailures) == 0
	rep.Activity = activity(runs)
	rep.Latencies, rep.Prefetchers = latenciesOf(runs), prefetchersOf(runs)
	return rep
}

func firstOf(runs []*run, mode Mode) *run {
	for _, r := range runs {
		if r.mode == mode {
			return r
		}
	}
	return nil
}

func planOf(cfg *Config) report.Plan {
	p := report.Plan{GapScale: cfg.GapScale, MaxGapS: cfg.MaxGap.Seconds(), Repeat: cfg.Repeat, Order: cfg.First.String(), Signals: cfg.Signals}
	if !cfg.Alone {
		p.Order += "," + other(cfg.First).String()
	}
	for _, sb := range cfg.Sandboxes {
		t := report.Trajectory{
			Sandbox: sb.Name, ID: sb.Trajectory.ID, Task: sb.Trajectory.Task,
			Dropped: sb.Trajectory.Tally.Unmappable, StandIns: sb.Trajectory.Tally.StandIns, Drawn: sb.Trajectory.Tally.Drawn,
		}
		for _, s := range sb.Trajectory.Steps {
			t.Commands = append(t.Commands, s.Shell)
			t.GapsS = append(t.GapsS, cfg.gap(s).Seconds())
		}
		p.Trajectories = append(p.Trajectories, t)
	}
	return p
}

// pairing sums what both runs of a pair did in the calls that both made.
type pairing struct {
	off, on         time.Duration
	stalls          []time.Duration
	native, stalled time.Duration
	nativeEach      []time.Duration
}

// add adds the calls of lane i of the runs without and with compression. A call
// that timed out on either side is no pair.
func (p *pairing) add(a, b *run, i int, native NativeResult) {
	la, lb := a.lanes[i], b.lanes[i]
	for n := range min(len(la.calls), len(lb.calls)) {
		x, y := la.calls[n], lb.calls[n]
		if y.err == nil {
			p.stalls = append(p.stalls, y.res.Stall)
		}
		if x.err != nil || y.err != nil || x.res.TimedOut || y.res.TimedOut {
			continue
		}
		p.off += x.res.Duration
		p.on += y.res.Duration
		if d := nativeOf(native, i, n); d > 0 {
			p.native += d
			p.stalled += y.res.Stall
			p.nativeEach = append(p.nativeEach, d)
		}
	}
}

func nativeOf(r NativeResult, lane, call int) time.Duration {
	if lane >= len(r.Durations) || call >= len(r.Durations[lane]) {
		return 0
	}
	return r.Durations[lane][call]
}

// pairs calls f with each pair of runs; where all runs are of one mode, with each run as
// both sides of a pair.
func pairs(runs []*run, f func(off, on *run)) {
	if !compared(runs) {
		for _, r := range runs {
			f(r, r)
		}
		return
	}
	for k := 0; k+1 < len(runs); k += 2 {
		a, b := runs[k], runs[k+1]
		if a.mode == On {
			a, b = b, a
		}
		f(a, b)
	}
}

// compared reports whether there are runs of both modes.
func compared(runs []*run) bool { return firstOf(runs, Off) != nil && firstOf(runs, On) != nil }

func ratio(a, b time.Duration) float64 {
	if a <= 0 || b <= 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func saved(off, on float64) (float64, bool) {
	if off <= 0 {
		return 0, false
	}
	return 1 - on/off, true
}

func sandboxRow(runs []*run, i int) report.Sandbox {
	row := report.Sandbox{Name: runs[0].lanes[i].plan.Name, Calls: len(runs[0].lanes[i].calls)}
	var p pairing
	pairs(runs, func(off, on *run) { p.add(off, on, i, NativeResult{}) })
	row.PrivateOff = meanOver(runs, Off, func(r *run) (float64, bool) { return laneAverage(r, i) })
	row.PrivateOn = meanOver(runs, On, func(r *run) (float64, bool) { return laneAverage(r, i) })
	if compared(runs) {
		row.Saved, _ = saved(row.PrivateOff, row.PrivateOn)
		row.LatencyRatio = ratio(p.on, p.off)
	}
	row.Stall = report.QuantilesOf(p.stalls)
	row.HeapOn = meanOver(runs, On, func(r *run) (float64, bool) {
		from, to, _ := r.lanes[i].window()
		var pts []point
		for _, s := range r.samples {
			if u := s.boxes[i]; u != nil {
				pts = append(pts, point{s.at, float64(u.VMMHeap)})
			}
		}
		return timeAverage(pts, from, to)
	})
	return row
}

func laneAverage(r *run, i int) (float64, bool) {
	from, to, _ := r.lanes[i].window()
	return timeAverage(lanePoints(r.samples, i), from, to)
}

// fleetAverage averages a figure of the fleet over the run's window.
func fleetAverage(f func(FleetUsage) units.Bytes) func(*run) (float64, bool) {
	return func(r *run) (float64, bool) {
		from, to, _ := r.window()
		return timeAverage(fleetPoints(r.samples, func(u FleetUsage) float64 { return float64(f(u)) }), from, to)
	}
}

// meanOver averages a figure over the runs of one mode; 0 when none has it.
func meanOver(runs []*run, mode Mode, f func(*run) (float64, bool)) float64 {
	sum, n := 0.0, 0
	for _, r := range runs {
		if r.mode != mode {
			continue
		}
		if v, ok := f(r); ok {
			sum += v
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return sum / float64(n)
}

func total(runs []*run, native NativeResult) report.Summary {
	var s report.Summary
	for _, l := range runs[0].lanes {
		s.Calls += len(l.calls)
	}
	s.PrivateOff = meanOver(runs, Off, fleetAverage(FleetUsage.Private))
	s.PrivateOn = meanOver(runs, On, fleetAverage(FleetUsage.Private))
	if compared(runs) {
		s.Saved, s.SavedKnown = saved(s.PrivateOff, s.PrivateOn)
	}
	heap := fleetAverage(func(u FleetUsage) units.Bytes { return u.VMMHeap })
	s.VMMHeapOff, s.VMMHeapOn = meanOver(runs, Off, heap), meanOver(runs, On, heap)
	var p pairing
	pairs(runs, func(off, on *run) {
		for i := range off.lanes {
			p.add(off, on, i, native)
		}
	})
	if compared(runs) {
		s.LatencyRatio = ratio(p.on, p.off)
	}
	s.Stall = report.QuantilesOf(p.stalls)
	s.NativeRatio = ratio(p.native+p.stalled, p.native)
	s.NativeCalls = len(p.nativeEach)
	s.NativeP50MS = float64(report.QuantilesOf(p.nativeEach).P50) / float64(time.Millisecond)
	if s.NativeRatio == 0 {
		s.NativeMissing = native.Missing
	}
	latencies := latenciesOf(runs)
	s.Blocking, s.Prefetched = latencies[report.KindEvicted].Quantiles(), latencies[report.KindPrefetched].Quantiles()
	return s
}

// latenciesOf merges the distributions of the runs with compression.
func latenciesOf(runs []*run) map[string]report.Histogram {
	all := map[string]report.Histogram{}
	for _, r := range runs {
		if r.mode == On {
			report.MergeAll(all, r.counters.Latencies)
		}
	}
	return all
}

// prefetchersOf adds up what the sources of guesses did in the runs with compression.
func prefetchersOf(runs []*run) []report.Prefetcher {
	var all []report.Prefetcher
	for _, r := range runs {
		for _, p := range r.counters.Prefetchers {
			i := slices.IndexFunc(all, func(x report.Prefetcher) bool { return x.Name == p.Name })
			if i < 0 {
				all = append(all, p)
				continue
			}
			x := &all[i]
			x.Restored, x.HeldOut, x.Missed, x.Faults = x.Restored+p.Restored, x.HeldOut+p.HeldOut, x.Missed+p.Missed, x.Faults+p.Faults
		}
	}
	return all
}

func activity(runs []*run) report.Activity {
	a := report.Activity{Faults: map[string]uint64{}, Encoders: map[string]report.Encoder{}}
	for _, r := range runs {
		if r.mode != On {
			continue
		}
		c := r.counters
		for k, n := range c.Faults {
			a.Faults[k] += n
		}
		for k, e := range c.Encoders {
			x := a.Encoders[k]
			a.Encoders[k] = report.Encoder{Pages: x.Pages + e.Pages, Bytes: x.Bytes + int64(e.Bytes)}
		}
		a.Evicted += c.Evicted
		a.CleanDrops += c.CleanDrops
		a.Incompressible += c.Incompressible
		a.Cancelled += c.Cancelled
		a.CancelledPasses += c.CancelledPasses
		a.Passes += c.Passes
		a.EvictingS += c.Evicting.Seconds()
		a.PoolFull += c.PoolFull
		a.Ahead.Add(c.Ahead)
	}
	return a
}

func recordRun(r *run, native NativeResult) report.Run {
	from, to, _ := r.window()
	out := report.Run{Mode: r.mode.String(), StartupS: r.startup.Seconds(), WallS: r.wall.Seconds(), FromS: from.Seconds(), ToS: to.Seconds()}
	for i, l := range r.lanes {
		for n, c := range l.calls {
			out.Calls = append(out.Calls, report.Call{
				Sandbox: l.plan.Name, N: n + 1, StartS: c.start.Seconds(), MS: ms(c.res.Duration), StallMS: ms(c.res.Stall),
				NativeMS: ms(nativeOf(native, i, n)), Faults: c.res.Faults, Exit: c.res.Exit, Signal: c.res.Signal, TimedOut: c.res.TimedOut,
				OutBytes: len(c.res.Stdout) + len(c.res.Stderr), Ahead: c.res.Ahead, Wasted: c.res.Wasted,
				Class: string(l.plan.Trajectory.Steps[n].Kind), Kinds: kindsOf(c.res.Kinds), Ways: kindsOf(c.res.Ways), Progress: progressOf(c.res.Progress),
			})
		}
	}
	for k := range r.samples {
		out.Samples = append(out.Samples, r.samples[k].record())
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func kindsOf(kinds map[string]FaultCost) map[string]report.FaultCost {
	var out map[string]report.FaultCost
	for k, c := range kinds {
		if c.Count == 0 {
			continue
		}
		if out == nil {
			out = map[string]report.FaultCost{}
		}
		out[k] = report.FaultCost{Count: c.Count, MS: ms(c.Stall)}
	}
	return out
}

func progressOf(points []StallAt) (out []report.StallAt) {
	for _, p := range points {
		out = append(out, report.StallAt{MS: ms(p.After), StallMS: ms(p.Stall)})
	}
	return out
}
