package bench

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
)

type answer = func(Mode, string, int, CallSpec) (CallResult, error)

// measure runs Measure on fake fleets in a bubble of synthetic time.
func measure(t *testing.T, change func(*Config, *[]*fakeFleet), a answer) (rep *report.Report, fleets []*fakeFleet, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Sandboxes: plans(2, 3), GapScale: 1, SampleEvery: 100 * time.Millisecond}
		cfg.Fleet = func(_ context.Context, m Mode) (Fleet, error) {
			f := &fakeFleet{mode: m, answer: a}
			fleets = append(fleets, f)
			return f, nil
		}
		if change != nil {
			change(&cfg, &fleets)
		}
		rep, err = Measure(t.Context(), cfg)
	})
	for _, f := range fleets {
		if !f.closed {
			t.Error("a fleet was left open")
		}
	}
	return rep, fleets, err
}

func near(t *testing.T, name string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got-want) > tolerance {
		t.Errorf("%s is %g, want %g within %g", name, got, want, tolerance)
	}
}

func TestMeasureComputesTheFiguresFromBothRuns(t *testing.T) {
	rep, fleets, err := measure(t, func(c *Config, _ *[]*fakeFleet) {
		c.NativeReplay = func() NativeResult {
			return NativeResult{Durations: [][]time.Duration{{50 * time.Millisecond, 50 * time.Millisecond, 50 * time.Millisecond}, {50 * time.Millisecond, 0, 50 * time.Millisecond}}}
		}
	}, sameAnswers)
	if err != nil {
		t.Fatal(err)
	}
	if len(fleets) != 2 || fleets[0].mode != Off || fleets[1].mode != On {
		t.Fatalf("got %d fleets, want one off, then one on", len(fleets))
	}
	s := rep.Summary
	const mib = 1 << 20
	// The window of the run with compression: 3 calls of 1.1 s, 2 gaps of 5 s.
	// A call: 2 x (60 + 1) + 3; a gap: 2 x (10 + 4 + 1) + 3 MiB.
	want := (3.3*125 + 10*33) / 13.3
	near(t, "private memory off (MiB)", s.PrivateOff/mib, 200, 0.001)
	near(t, "private memory on (MiB)", s.PrivateOn/mib, want, 1.5) // samples are 0.1 s apart
	near(t, "saved", s.Saved, 1-s.PrivateOn/s.PrivateOff, 1e-9)
	near(t, "latency ratio", s.LatencyRatio, 1.1, 1e-9)
	near(t, "native ratio", s.NativeRatio, 54.0/50, 1e-9)
	near(t, "VMM heap (MiB)", s.VMMHeapOn/mib, 60, 0.001)
	near(t, "private memory of a sandbox (MiB)", rep.Sandboxes[0].PrivateOn/mib, want/2, 1)
	near(t, "latency of a sandbox", rep.Sandboxes[0].LatencyRatio, 1.1, 1e-9)
	if s.Calls != 6 || s.NativeCalls != 5 || s.Stall.P99 != 4*time.Millisecond || s.Stall.Count != 6 {
		t.Errorf("got %d calls, %d native, stall %+v", s.Calls, s.NativeCalls, s.Stall)
	}
	if !strings.HasSuffix(rep.LastLine(), "latency=1.10x native=1.08x stall_p99_ms=4.0 block_p50_us=48 block_p99_us=310 integrity=ok") {
		t.Errorf("last line: %s", rep.LastLine())
	}
	if len(rep.Runs) != 2 || len(rep.Runs[1].Calls) != 6 || len(rep.Runs[1].Samples) < 100 {
		t.Errorf("raw data is missing: %d runs", len(rep.Runs))
	}
}

func TestThePartsOfTheSandboxesAddUpToTheFleet(t *testing.T) {
	rep, _, err := measure(t, nil, sameAnswers)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rep.Runs {
		for _, s := range r.Samples {
			sum, running := int64(0), 0
			for _, v := range s.Sandboxes {
				if v >= 0 {
					sum += v
					running++
				}
			}
			total := s.Resident + s.Pool + s.PageTables + s.Dictionaries + s.Index
			if running > 0 && (sum < total-2 || sum > total+2) {
				t.Fatalf("%s at %.1f s: sandboxes add up to %d, the fleet is %d", r.Mode, s.S, sum, total)
			}
		}
	}
}

func TestAnyDifferenceFailsTheMeasurement(t *testing.T) {
	spoil := func(sandbox string, n int, f func(*CallResult)) answer {
		return func(m Mode, s string, k int, spec CallSpec) (CallResult, error) {
			r, err := sameAnswers(m, s, k, spec)
			if m == On && s == sandbox && k == n {
				f(&r)
			}
			return r, err
		}
	}
	for _, c := range []struct {
		name string
		a    answer
		want report.Difference
		diff string // in Difference.Diff
	}{
		{
			"one byte of stdout", spoil("s2", 2, func(r *CallResult) { r.Stdout[3] = 'C' }),
			report.Difference{Run: 2, Sandbox: "s2", Call: 2, Command: "command 2", Field: "stdout"},
			"- s2 call 2\n",
		},
		{
			"a line on stderr", spoil("s1", 1, func(r *CallResult) { r.Stderr = []byte("warning\n") }),
			report.Difference{Run: 2, Sandbox: "s1", Call: 1, Command: "command 1", Field: "stderr"},
			"+ warning",
		},
		{
			"the exit code", spoil("s1", 3, func(r *CallResult) { r.Exit = 1 }),
			report.Difference{Run: 2, Sandbox: "s1", Call: 3, Command: "command 3", Field: "exit"},
			"exit 0 without compression, 1 with",
		},
		{
			"a signal", spoil("s1", 3, func(r *CallResult) { r.Signal = "SIGSEGV" }),
			report.Difference{Run: 2, Sandbox: "s1", Call: 3, Command: "command 3", Field: "signal"},
			"SIGSEGV",
		},
		{
			"a timeout with compression only", spoil("s1", 3, func(r *CallResult) { r.TimedOut = true }),
			report.Difference{Run: 2, Sandbox: "s1", Call: 3, Command: "command 3", Field: "timeout"},
			"with compression only",
		},
		{
			"the final state of the work tree", spoil("s2", 0, func(r *CallResult) { r.Stdout = []byte("other\n") }),
			report.Difference{Run: 2, Sandbox: "s2", Command: finalCommand, Field: "stdout"},
			"+ other",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			rep, _, err := measure(t, nil, c.a)
			if !errors.Is(err, ErrIntegrity) || rep == nil {
				t.Fatalf("got %v, want ErrIntegrity and a report", err)
			}
			if len(rep.Differences) != 1 {
				t.Fatalf("got %d differences, want 1: %+v", len(rep.Differences), rep.Differences)
			}
			got := rep.Differences[0]
			if !strings.Contains(got.Diff, c.diff) {
				t.Errorf("diff %q does not contain %q", got.Diff, c.diff)
			}
			got.Diff = ""
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("difference (-want +got):\n%s", d)
			}
			if !strings.HasSuffix(rep.LastLine(), "integrity=FAILED") {
				t.Errorf("last line: %s", rep.LastLine())
			}
		})
	}
}

func TestASandboxThatDiesWithCompressionIsADifference(t *testing.T) {
	rep, _, err := measure(t, nil, func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
		if m == On && s == "s2" && n == 2 {
			return CallResult{}, errors.New("page 7 damaged")
		}
		return sameAnswers(m, s, n, spec)
	})
	if !errors.Is(err, ErrIntegrity) {
		t.Fatalf("got %v, want ErrIntegrity", err)
	}
	if len(rep.Differences) != 1 || rep.Differences[0].Call != 2 || !strings.Contains(rep.Differences[0].Diff, "page 7 damaged") {
		t.Errorf("got %+v", rep.Differences)
	}
}

func TestAnIntegrityFailureOfThePagerFailsTheMeasurement(t *testing.T) {
	rep, _, err := measure(t, func(c *Config, fleets *[]*fakeFleet) {
		make := c.Fleet
		c.Fleet = func(ctx context.Context, m Mode) (Fleet, error) {
			f, err := make(ctx, m)
			if m == On {
				(*fleets)[len(*fleets)-1].integrity = []string{"s1 page 0x1234 zstd: checksum"}
			}
			return f, err
		}
	}, sameAnswers)
	if !errors.Is(err, ErrIntegrity) || len(rep.IntegrityFailures) != 1 {
		t.Fatalf("got %v, want ErrIntegrity and the failure in the report", err)
	}
}

func TestWithoutABaselineThereIsNoReport(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config, *[]*fakeFleet)
		a      answer
		want   string
	}{
		"a sandbox dies without compression": {nil, func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
			if m == Off && n == 2 {
				return CallResult{}, errors.New("guest panicked")
			}
			return sameAnswers(m, s, n, spec)
		}, "guest panicked"},
		"memory cannot be measured": {func(c *Config, fleets *[]*fakeFleet) {
			make := c.Fleet
			c.Fleet = func(ctx context.Context, m Mode) (Fleet, error) {
				f, err := make(ctx, m)
				(*fleets)[len(*fleets)-1].usageError = errors.New("no pagemap")
				return f, err
			}
		}, sameAnswers, "no pagemap"},
		"a sandbox does not start": {func(c *Config, fleets *[]*fakeFleet) {
			make := c.Fleet
			c.Fleet = func(ctx context.Context, m Mode) (Fleet, error) {
				f, err := make(ctx, m)
				(*fleets)[len(*fleets)-1].startError = errors.New("no memory")
				return f, err
			}
		}, sameAnswers, "no memory"},
		"nothing to replay": {func(c *Config, _ *[]*fakeFleet) { c.Sandboxes = nil }, sameAnswers, "nothing to replay"},
	} {
		t.Run(name, func(t *testing.T) {
			rep, _, err := measure(t, c.change, c.a)
			if err == nil || rep != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got report %v and error %v, want %q", rep != nil, err, c.want)
			}
		})
	}
}

func TestCallsThatTimeOutInBothRunsAreNotPairedNorCompared(t *testing.T) {
	rep, _, err := measure(t, nil, func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
		r, err := sameAnswers(m, s, n, spec)
		if n == 2 {
			r.TimedOut = true
			r.Stdout = []byte{byte('0' + m)} // how far it got differs
			r.Duration = time.Duration(1+m) * time.Minute
		}
		if n == 3 && m == Off {
			r.TimedOut = true
		}
		return r, err
	})
	if err != nil {
		t.Fatal(err)
	}
	near(t, "latency ratio", rep.Summary.LatencyRatio, 1.1, 1e-9)
	if len(rep.NotCompared) != 2 {
		t.Errorf("not compared: %v, want call 3 of both sandboxes", rep.NotCompared)
	}
}

func TestRepeatsAlternateTheOrder(t *testing.T) {
	c := Config{First: On, Repeat: 3}
	if d := cmp.Diff([]Mode{On, Off, Off, On, On, Off}, c.modes()); d != "" {
		t.Errorf("modes (-want +got):\n%s", d)
	}
	rep, fleets, err := measure(t, func(c *Config, _ *[]*fakeFleet) { c.First, c.Repeat = On, 2 }, sameAnswers)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "latency ratio", rep.Summary.LatencyRatio, 1.1, 1e-9)
	if len(fleets) != 4 || rep.Summary.Stall.Count != 12 || rep.Plan.Order != "on,off" {
		t.Errorf("%d fleets, %d stalls, order %s", len(fleets), rep.Summary.Stall.Count, rep.Plan.Order)
	}
}

func TestACancelledMeasurementEndsAtOnceAndLeavesNothing(t *testing.T) {
	cause := errors.New("interrupted")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		f := &fakeFleet{answer: func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
			return CallResult{Duration: time.Hour}, nil
		}}
		time.AfterFunc(30*time.Second, func() { cancel(cause) })
		begin := time.Now()
		rep, err := Measure(ctx, Config{Sandboxes: plans(3, 2), GapScale: 1, Fleet: func(context.Context, Mode) (Fleet, error) { return f, nil }})
		if !errors.Is(err, cause) || rep != nil {
			t.Errorf("got report %v and error %v, want the cause", rep != nil, err)
		}
		if d := time.Since(begin); d != 30*time.Second {
			t.Errorf("ended after %v, want 30 s", d)
		}
		if !f.closed {
			t.Error("the fleet was left open")
		}
	})
}

func TestAHungSandboxEndsItsTrajectory(t *testing.T) {
	_, _, err := measure(t, func(c *Config, _ *[]*fakeFleet) { c.CallTimeout = time.Minute },
		func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
			return CallResult{Duration: time.Hour}, nil
		})
	if err == nil || !strings.Contains(err.Error(), "no answer") {
		t.Errorf("got %v, want the hung sandbox named", err)
	}
}

func TestGapsAreCutThenScaled(t *testing.T) {
	t.Parallel()
	c := Config{GapScale: 0.5, MaxGap: 4 * time.Second}
	for think, want := range map[time.Duration]time.Duration{3 * time.Second: 1500 * time.Millisecond, time.Minute: 2 * time.Second, 0: 0} {
		p := plans(1, 1)[0].Trajectory.Steps[0]
		p.Think = think
		if got := c.gap(p); got != want {
			t.Errorf("gap after %v is %v, want %v", think, got, want)
		}
	}
}

func TestTrajectoriesAreRepeatedAndCut(t *testing.T) {
	t.Parallel()
	ps := plans(2, 5)
	got, repeated, dropped := PlanSandboxes([]traj.Trajectory{ps[0].Trajectory, ps[1].Trajectory}, 3, 4)
	if len(got) != 3 || repeated != 1 || got[2].Shift != repeatShift || got[2].Trajectory.ID != "t1" || len(got[1].Trajectory.Steps) != 4 {
		t.Errorf("got %+v, repeated %d", got, repeated)
	}
	if d := cmp.Diff([]int{1, 1, 1}, dropped); d != "" {
		t.Errorf("dropped (-want +got):\n%s", d)
	}
	if len(ps[0].Trajectory.Steps) != 5 {
		t.Error("cutting changed the source")
	}
}

func TestMain(m *testing.M) {
	if runNativeChildOfTest() {
		return
	}
	goleak.VerifyTestMain(m)
}
