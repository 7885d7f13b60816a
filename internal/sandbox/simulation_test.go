package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/units"
)

// A simulated sandbox has a real rhythm, follower, predictor and share of its cohort; its
// memory, its agent and the clock are fakes. One seed is one schedule: all of it runs in a
// bubble in which time passes only when everybody waits, and what happens is drawn from the
// seed.
type simulated struct {
	memory *fakeMemory
	ahead  *follower
	shared *Compression
	rhythm *policy.Rhythm
	rand   *rand.Rand
	owned  map[units.Frame]bool // pages that the guest has of its own

	waited, touched int // by calls after the first three of each kind
	seen            map[string]int
	calls, passes   int
	fault           error
}

// programs are what the calls of the simulation touch.
var programs = map[string][]units.Frame{
	"git":    frames(0, 150),
	"grep":   frames(100, 120), // shares pages with git
	"pytest": frames(1000, 400),
}

func (s *simulated) failf(format string, args ...any) {
	if s.fault == nil {
		s.fault = fmt.Errorf(format, args...)
	}
}

// act does what is due, as breathe does.
func (s *simulated) act(a policy.Action) {
	switch a {
	case policy.Compress, policy.Park:
		if s.rhythm.Calls() > 0 {
			s.failf("a pass while a call runs")
		}
		s.passes++
		reach := s.shared.reach(s.rhythm.InGap(time.Now()))
		whole := reach == policy.Warm || a == policy.Park
		for _, f := range slices.Sorted(maps.Keys(s.owned)) {
			if whole || s.rand.IntN(2) == 0 {
				s.memory.evictAll(f)
			}
		}
		s.ahead.tell(order{what: orderLooked, pass: whole})
	case policy.Restore:
		s.ahead.tell(order{what: orderAnnounce, kind: s.rhythm.Tool()})
	case policy.Withdraw:
		s.ahead.tell(order{what: orderWithdraw})
	case policy.None, policy.Stop, policy.Wake:
	}
	synctest.Wait()
}

// pass lets time pass; the rhythm is asked whenever it wants to be.
func (s *simulated) pass(d time.Duration) {
	end := time.Now().Add(d)
	for {
		due, ok := s.rhythm.Deadline()
		if !ok || due.After(end) {
			time.Sleep(time.Until(end))
			return
		}
		time.Sleep(time.Until(due))
		s.act(s.rhythm.Tick(time.Now()))
	}
}

// call runs one call of a kind: three in four of its pages, in order, and a few of nobody's.
func (s *simulated) call(kind string) {
	if s.rhythm.CallStarts(time.Now()) == policy.Stop {
		if gap, known := s.rhythm.LastGap(); known {
			s.shared.noteGap(gap)
		}
	}
	s.ahead.begin(kind)
	time.Sleep(30 * time.Millisecond) // of its start: the shell, the interpreter
	s.calls++
	s.seen[kind]++
	for _, f := range programs[kind] {
		if s.rand.IntN(4) > 0 {
			s.touch(f, s.seen[kind] > 3)
		}
		if s.rand.IntN(50) == 0 {
			s.touch(units.Frame(4000+s.rand.IntN(4000)), false)
		}
	}
	synctest.Wait()
	s.ahead.end()
	s.rhythm.CallEnds(time.Now())
	synctest.Wait()
}

func (s *simulated) touch(f units.Frame, counts bool) {
	s.owned[f] = true
	n := s.memory.touch(f)
	if counts {
		s.waited, s.touched = s.waited+n, s.touched+1
	}
}

// live is the agent.
func (s *simulated) live(steps int) {
	kinds := []string{"git", "grep", "pytest"}
	for range steps {
		kind := kinds[s.rand.IntN(len(kinds))]
		gap := time.Duration(s.rand.ExpFloat64() * 5 * float64(time.Second))
		switch s.rand.IntN(8) {
		case 0: // a person is away
			s.pass(time.Duration(s.rand.IntN(3600)) * time.Second)
		case 1: // it is told ahead, rightly
			s.pass(gap)
			s.act(s.rhythm.Signal(time.Now(), policy.Signal{Kind: policy.SignalToolName, Tool: kind}))
			s.pass(time.Second)
		case 2: // or wrongly, or of nothing that comes
			s.pass(gap)
			s.act(s.rhythm.Signal(time.Now(), policy.Signal{Kind: policy.SignalDispatch, Tool: "git"}))
			s.pass(time.Duration(s.rand.IntN(60)) * time.Second)
		case 3:
			s.act(s.rhythm.Signal(time.Now(), policy.Signal{Kind: policy.SignalRequest}))
			s.pass(gap)
		case 4: // calls follow at once
		default:
			s.pass(gap)
		}
		s.call(kind)
	}
	s.pass(time.Hour)
}

// simulate runs one schedule and returns what came of it.
func simulate(t *testing.T, seed uint64, steps int) (end simulated) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMemory()
		m.batch = 500 * time.Microsecond
		shared := &Compression{History: prefetch.NewHistory(prefetch.Options{Seed: seed})}
		s := &simulated{
			memory: m, shared: shared, rhythm: policy.NewRhythm(time.Now(), policy.Times{}), rand: rand.New(rand.NewPCG(seed, 1)), //nolint:gosec // it is to repeat
			ahead: newFollower(m, shared.History.NewPredictor("s", m.isEvicted), func() bool { return true }, slog.New(slog.DiscardHandler)),
			owned: map[units.Frame]bool{}, seen: map[string]int{},
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.ahead.run(ctx) })
		s.live(steps)
		cancel()
		running.Wait()
		end = *s
	})
	return end
}

func TestInASimulatedLifeMostPagesAreThereWhenTheyAreTouched(t *testing.T) {
	const steps = 60
	waited, touched := 0, 0
	for seed := range uint64(20) {
		s := simulate(t, seed, steps)
		if s.fault != nil {
			t.Fatalf("seed %d: %v", seed, s.fault)
		}
		if s.calls != steps || s.passes < steps/3 {
			t.Errorf("seed %d: %d calls, %d passes", seed, s.calls, s.passes)
		}
		if s.rhythm.State() != policy.Away {
			t.Errorf("seed %d: an hour after the last call it is %v", seed, s.rhythm.State())
		}
		for f := range s.owned {
			if !s.memory.evicted[f] {
				t.Errorf("seed %d: frame %d is not evicted in the end", seed, f)
				break
			}
		}
		waited, touched = waited+s.waited, touched+s.touched
	}
	t.Logf("%d of %d touches waited: coverage %.1f %%", waited, touched, 100-100*float64(waited)/float64(touched))
	if waited*10 > touched {
		t.Errorf("%d of %d touches of known kinds of calls waited, want at most one in ten", waited, touched)
	}
}

func TestOneSeedIsOneSchedule(t *testing.T) {
	a, b := simulate(t, 7, 30), simulate(t, 7, 30)
	if a.waited != b.waited || a.touched != b.touched || a.passes != b.passes || !slices.Equal(a.memory.restored, b.memory.restored) {
		t.Errorf("two runs of a seed differ: %d and %d waited, %d and %d passes, %d and %d pages restored",
			a.waited, b.waited, a.passes, b.passes, len(a.memory.restored), len(b.memory.restored))
	}
	if c := simulate(t, 8, 30); a.touched == c.touched {
		t.Error("another seed is the same schedule")
	}
}
