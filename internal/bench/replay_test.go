package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/traj"
)

// replayOnce runs Replay on one fake fleet in a bubble of synthetic time.
func replayOnce(t *testing.T, c Config, a answer) (err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeFleet{mode: c.First, answer: a}
		c.Sandboxes, c.GapScale = plans(2, 3), 1
		c.Fleet = func(context.Context, Mode) (Fleet, error) { return f, nil }
		err = Replay(t.Context(), c)
		if !f.closed {
			t.Error("the fleet was left open")
		}
	})
	return err
}

func TestCallEndsAreToldBetweenTheCallsAndTheThinkingTimeGoesOn(t *testing.T) {
	for name, looks := range map[string]time.Duration{"for two of the five seconds": 2 * time.Second, "for longer than the five seconds": 7 * time.Second} {
		var mu sync.Mutex
		got := map[int][]string{}
		err := replayOnce(t, Config{First: Off, OnCallEnd: func(ctx context.Context, e CallEnd) error {
			b := e.Box.(*fakeBox)
			b.mu.Lock()
			if b.running || b.closed || b.calls != e.Call {
				t.Errorf("told of call %d: running %v, closed %v, calls %d", e.Call, b.running, b.closed, b.calls)
			}
			b.mu.Unlock()
			if since := time.Since(e.Begin); since != e.End {
				t.Errorf("told %v after the run's start, the call ended after %v", since, e.End)
			}
			mu.Lock()
			got[e.Sandbox] = append(got[e.Sandbox], fmt.Sprintf("%d %s %v-%v", e.Call, e.Step.Shell, e.Start, e.End))
			mu.Unlock()
			Sleep(ctx, looks)
			return nil
		}}, sameAnswers)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		pause := max(looks, 5*time.Second)
		var want []string
		for i, start := range []time.Duration{5 * time.Second, 6*time.Second + pause, 7*time.Second + 2*pause} {
			want = append(want, fmt.Sprintf("%d command %d %v-%v", i+1, i+1, start, start+time.Second))
		}
		if d := cmp.Diff(map[int][]string{0: want, 1: want}, got); d != "" {
			t.Errorf("looking %s: calls (-want +got):\n%s", name, d)
		}
	}
}

func TestAnErrorOfWhoLooksEndsTheReplay(t *testing.T) {
	full := errors.New("disk full")
	told := 0
	err := replayOnce(t, Config{First: Off, OnCallEnd: func(_ context.Context, e CallEnd) error {
		if e.Sandbox == 1 {
			return nil
		}
		told++
		return full
	}}, sameAnswers)
	if !errors.Is(err, full) || !strings.Contains(err.Error(), "sandbox s1 after call 1") || told != 1 {
		t.Errorf("got %v after %d calls, want the error of s1's first", err, told)
	}
}

func TestASandboxThatFailsFailsTheReplay(t *testing.T) {
	err := replayOnce(t, Config{First: On}, func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
		if s == "s2" && n == 2 {
			return CallResult{}, errors.New("the VMM has ended")
		}
		if m != On {
			t.Error("replayed in the other mode")
		}
		return sameAnswers(m, s, n, spec)
	})
	if err == nil || !strings.Contains(err.Error(), "sandbox s2: the VMM has ended") {
		t.Errorf("got %v", err)
	}
}

func TestAnInterruptedReplayIsAnError(t *testing.T) {
	interrupted := errors.New("interrupted")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(8*time.Second, func() { cancel(interrupted) })
		f := &fakeFleet{answer: sameAnswers}
		err := Replay(ctx, Config{
			Sandboxes: plans(2, 3), GapScale: 1, Fleet: func(context.Context, Mode) (Fleet, error) { return f, nil },
			OnCallEnd: func(ctx context.Context, _ CallEnd) error {
				if !Sleep(ctx, time.Hour) {
					return context.Cause(ctx)
				}
				return nil
			},
		})
		if !errors.Is(err, interrupted) || !f.closed {
			t.Errorf("got %v, closed %v", err, f.closed)
		}
	})
}

func TestCallsWaitForTheirTurn(t *testing.T) {
	for _, c := range []struct{ parallel, most int }{{0, 2}, {1, 1}, {2, 2}} {
		var mu sync.Mutex
		now, most, calls := 0, 0, 0
		err := replayOnce(t, Config{Parallel: c.parallel}, func(m Mode, s string, n int, spec CallSpec) (CallResult, error) {
			if n == 0 { // the final state is no call
				return CallResult{}, nil
			}
			mu.Lock()
			now++
			calls++
			most = max(most, now)
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			now--
			mu.Unlock()
			return CallResult{}, nil
		})
		if err != nil || most != c.most || calls != 6 {
			t.Errorf("parallel %d: %d calls, %d at once (%v), want 6, %d", c.parallel, calls, most, err, c.most)
		}
	}
}

// hearing is a sandbox that notes when calls were announced.
type hearing struct {
	Box

	heard *[]string
	begin time.Time
}

func (h hearing) Announce(tool string) {
	*h.heard = append(*h.heard, fmt.Sprintf("%s at %v", tool, time.Since(h.begin)))
}

// hearingFleet makes such sandboxes.
type hearingFleet struct {
	Fleet

	heard *[]string
}

func (f hearingFleet) Start(ctx context.Context, name string) (Box, error) {
	b, err := f.Fleet.Start(ctx, name)
	return hearing{b, f.heard, time.Now()}, err
}

func TestCallsAreAnnouncedWithTheLeadThatWasRecorded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := plans(1, 3)
		steps := p[0].Trajectory.Steps
		for i := range steps {
			steps[i].Kind, steps[i].Tool, steps[i].Lead = traj.Python, "Bash", time.Second
		}
		steps[2].Lead = 20 * time.Second // longer than the gap: at its beginning
		var heard []string
		cfg := Config{Sandboxes: p, GapScale: 2, First: On, Signals: true, Fleet: func(_ context.Context, m Mode) (Fleet, error) {
			return hearingFleet{&fakeFleet{mode: m, answer: sameAnswers}, &heard}, nil
		}, Display: silent{}}
		if err := Replay(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		want := []string{"Bash at 9s", "Bash at 20.1s", "Bash at 22.2s"} // calls at 10, 21.1 and 32.2 s, each 1.1 s long
		if d := cmp.Diff(want, heard); d != "" {
			t.Errorf("announced (-want +got):\n%s", d)
		}
	})
}

func TestSignalsForSandboxesThatTakeNoneAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeFleet{mode: On, answer: sameAnswers}
		cfg := Config{Sandboxes: plans(2, 1), First: On, Signals: true, Fleet: func(context.Context, Mode) (Fleet, error) { return f, nil }, Display: silent{}}
		if err := Replay(t.Context(), cfg); !errors.Is(err, ErrNoSignals) {
			t.Errorf("got %v, want ErrNoSignals", err)
		}
		if !f.closed {
			t.Error("the fleet was left open")
		}
	})
}
