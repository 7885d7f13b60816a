package restores

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/report"
)

// everything is a measurement of all parts in a world of fakes.
func everything(w *world) Config {
	p := plans(2, 2)
	return Config{
		Main:     bench.Config{Fleet: w.factory(Variant{Name: "main"}), Sandboxes: p, GapScale: 2},
		Ablation: Ablation{Variants: []Variant{{Name: "all"}, {Name: "nothing ahead", NoPrefetch: true}}, Plans: p[:1], GapScale: 1},
		Fleet:    w.factory, Colony: w.colony,
		Storm: Storm{Sandboxes: 3, Rounds: 2, Step: p[0].Trajectory.Steps[1]},
		Idle:  Idle{Sandboxes: 4, Step: p[0].Trajectory.Steps[0]},
		Cores: 2,
	}
}

func TestAMeasurementHasAllItsParts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.parks, w.slowest = true, 1
		rep, err := Measure(t.Context(), everything(w))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]bench.Mode{bench.Off, bench.On, bench.Off, bench.On, bench.On}, w.modes); diff != "" {
			t.Errorf("runs (-want +got):\n%s", diff)
		}
		if w.started != w.closed || w.started != 3+1+4 {
			t.Errorf("%d sandboxes started, %d closed, want 8 of both", w.started, w.closed)
		}
		if w.passes != 2*3+4 {
			t.Errorf("%d passes, want one before each round of the storm and one before the sleep: 10", w.passes)
		}
		line := rep.LastLine()
		const want = "restore block_p50_us=48 block_p99_us=48 block_max_us=48 prefetch_page_p50_us=4 stall_p50_ms=2.0 stall_p99_ms=2 " +
			"latency=1.10x native=n/a saved=90.0% coverage=80% accuracy=80% cancel_p99_us=400 idle_mb="
		if !strings.HasPrefix(line, want) {
			t.Errorf("last line:\n%s\nwant\n%s...", line, want)
		}
	})
}

func TestTheAblationHoldsVariantsAgainstOneRunWithoutCompression(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		cfg := everything(w)
		cfg.Storm, cfg.Idle = Storm{}, Idle{}
		rep, err := Measure(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if len(rep.Ablation) != 2 {
			t.Fatalf("%d rows, want 2", len(rep.Ablation))
		}
		all, none := rep.Ablation[0], rep.Ablation[1]
		for _, c := range []struct {
			name      string
			got, want float64
		}{
			{"latency of all", all.Latency, 1.1},
			{"latency with nothing ahead", none.Latency, 1.5},
			{"blocked share of all", all.BlockedShare(), 0.3},
			{"blocked share with nothing ahead", none.BlockedShare(), 1},
			{"faults per call of all", all.FaultsPerCall(), 40},
			{"faults per call with nothing ahead", none.FaultsPerCall(), 110},
			{"accuracy", all.Accuracy, 0.8},
		} {
			if c.got < c.want-1e-6 || c.got > c.want+1e-6 {
				t.Errorf("%s: got %g, want %g", c.name, c.got, c.want)
			}
		}
		if !w.variants[len(w.variants)-1].NoPrefetch {
			t.Errorf("the last fleet was of %+v, want the variant without restores ahead", w.variants[len(w.variants)-1])
		}
	})
}

func TestAStormComparesTheWorstSandboxWithTheMedian(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.slowest = 2
		cfg := everything(w)
		got, err := cfg.storm(t.Context(), newProgress(nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		median, worst := got.Spread()
		if median != 100*time.Microsecond || worst != time.Millisecond {
			t.Errorf("p99 in the median sandbox %v, in the worst %v; want 100 us and 1 ms", median, worst)
		}
		for _, r := range got.Rows { // what a sandbox did before the storm is not in it
			if n := r.Faults.Count(); n != 2*20 {
				t.Errorf("sandbox %s has %d faults, want 20 in each of two rounds", r.Name, n)
			}
			if r.MS != 2000 {
				t.Errorf("sandbox %s took %g ms a call, want 2000", r.Name, r.MS)
			}
		}
	})
}

func TestIdleSandboxesAreAccountedForAtRestAndParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.parks = true
		cfg := everything(w)
		res, err := cfg.idle(t.Context(), newProgress(nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		if len(res.States) != 2 || res.Best().Name != stateParked {
			t.Fatalf("states %+v, want at rest and parked, and parked counts", res.States)
		}
		part := func(s IdleState, name string) float64 {
			for _, p := range s.Parts {
				if strings.HasPrefix(p.Name, name) {
					return p.Bytes
				}
			}
			t.Fatalf("no part %s", name)
			return 0
		}
		resting, parked := res.States[0], res.States[1]
		if part(resting, "VMM: heap") <= 0 || part(resting, "kernel: other") <= 0 {
			t.Error("a VMM at rest occupies nothing")
		}
		for _, name := range []string{"VMM: heap", "VMM: translated", "kernel: page tables", "kernel: other"} {
			if got := part(parked, name); got != 0 {
				t.Errorf("parked, %s: %g bytes, want none: there is no process", name, got)
			}
		}
		if got := part(parked, "pool"); got != 500*1024 {
			t.Errorf("pool: %g bytes each, want 512000: what was there before is not theirs", got)
		}
		if got := part(parked, "page tables of the pager"); got != 16*1024 {
			t.Errorf("page tables: %g bytes each, want 16384", got)
		}
	})
}

func TestWhereNothingCanBeParkedTheReportSaysSo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg := everything(newWorld())
		res, err := cfg.idle(t.Context(), newProgress(nil, nil))
		if err != nil {
			t.Fatal(err)
		}
		if len(res.States) != 1 || res.NotParked == "" || res.Best().Name != stateResting {
			t.Errorf("got %+v, want only the state at rest, and why", res)
		}
	})
}

func TestASandboxThatFailsEndsItsPartAndNothingIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.failsCall = 1
		cfg := everything(w)
		if _, err := cfg.storm(t.Context(), newProgress(nil, nil)); err == nil || !strings.Contains(err.Error(), "sandbox i2") {
			t.Errorf("got %v, want an error that names sandbox i2", err)
		}
		if w.started != w.closed {
			t.Errorf("%d sandboxes started, %d closed", w.started, w.closed)
		}
	})
}

func TestADifferenceEndsTheMeasurementWithAReport(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		cfg := everything(w)
		cfg.Main.Fleet = func(ctx context.Context, mode bench.Mode) (bench.Fleet, error) {
			f, err := w.factory(Variant{})(ctx, mode)
			return brokenFleet{f}, err
		}
		rep, err := Measure(t.Context(), cfg)
		if !errors.Is(err, bench.ErrIntegrity) || rep == nil || rep.Main.Summary.Intact {
			t.Fatalf("got %v, %v; want a report and ErrIntegrity", rep, err)
		}
		if w.started > 0 {
			t.Error("the storm came after a run that had lost pages")
		}
	})
}

// brokenFleet reports a page that is not what it was.
type brokenFleet struct{ bench.Fleet }

func (b brokenFleet) Counters() bench.Counters {
	return bench.Counters{IntegrityFailures: []string{"frame 7"}, Latencies: map[string]report.Histogram{}}
}
