package policy

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var epoch = time.Unix(1_700_000_000, 0)

// due runs what is due until at and returns it.
func due(r *Rhythm, at time.Time) (got []Action) {
	for {
		next, ok := r.Deadline()
		if !ok || next.After(at) {
			return got
		}
		if a := r.Tick(next); a != None {
			got = append(got, a)
		}
	}
}

func TestAGapOpensOnlyAfterTheSettleTime(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{Settle: 50 * time.Millisecond})
	if got := r.Tick(epoch.Add(49 * time.Millisecond)); got != None {
		t.Errorf("tick before the settle time: got %v, want none", got)
	}
	if got := r.Tick(epoch.Add(50 * time.Millisecond)); got != Compress {
		t.Errorf("tick at the settle time: got %v, want compress", got)
	}
	if r.State() != Gap {
		t.Errorf("after the first pass was due: %v, want gap", r.State())
	}
}

func TestACallClosesTheGapOnce(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	r.Tick(epoch.Add(DefaultSettle))
	if got := r.CallStarts(epoch.Add(time.Second)); got != Stop {
		t.Errorf("first call: got %v, want stop", got)
	}
	if got := r.CallStarts(epoch.Add(time.Second)); got != None {
		t.Errorf("second, parallel call: got %v, want none", got)
	}
	if _, due := r.Deadline(); due {
		t.Error("something is due while calls run")
	}
}

func TestParallelCallsKeepTheGapClosedUntilTheLastEnds(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	r.CallStarts(epoch)
	r.CallStarts(epoch)
	r.CallEnds(epoch.Add(time.Second))
	if got := r.Tick(epoch.Add(time.Hour)); got != None {
		t.Errorf("tick with one call left: got %v, want none", got)
	}
	end := epoch.Add(2 * time.Hour)
	r.CallEnds(end)
	if got := r.Tick(end.Add(DefaultSettle)); got != Compress {
		t.Errorf("tick after the last call: got %v, want compress", got)
	}
}

func TestAnHourAloneCostsFewPassesAndEndsParked(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	got := due(r, epoch.Add(time.Hour))
	if n := len(got); n < 4 || n > 10 || got[n-1] != Park {
		t.Errorf("got %v, want 3 to 9 passes and park", got)
	}
	never := NewRhythm(epoch, Times{HumanGap: -1})
	for _, a := range due(never, epoch.Add(time.Hour)) {
		if a == Park {
			t.Error("parked although that is off")
		}
	}
}

func TestAnAnnouncedCallIsRestoredForAndTheGapStaysClosed(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	due(r, epoch.Add(2*time.Second))
	at := epoch.Add(3 * time.Second)
	if got := r.Signal(at, Signal{Kind: SignalToolName, Tool: "pytest"}); got != Restore || r.Tool() != "pytest" {
		t.Errorf("tool name: got %v for %q, want restore for pytest", got, r.Tool())
	}
	if got := r.Signal(at.Add(time.Second), Signal{Kind: SignalArguments, Tool: "pytest"}); got != None {
		t.Errorf("arguments of the same call: got %v, want none", got)
	}
	if got := due(r, at.Add(DefaultPatience)); got != nil {
		t.Errorf("while the call is waited for: got %v", got)
	}
	if got := r.CallStarts(at.Add(20 * time.Second)); got != Stop {
		t.Errorf("the call: got %v, want stop", got)
	}
}

func TestAWrongSignalGoesBackToTheGap(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	due(r, epoch.Add(2*time.Second))
	at := epoch.Add(3 * time.Second)
	r.Signal(at, Signal{Kind: SignalDispatch})
	want := []Action{Withdraw, Compress}
	if diff := cmp.Diff(want, due(r, at.Add(DefaultPatience+time.Millisecond))); diff != "" {
		t.Errorf("after the patience (-want +got):\n%s", diff)
	}
}

func TestRestoringWaitsForTheLead(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	due(r, epoch.Add(500*time.Millisecond))
	at := epoch.Add(500 * time.Millisecond)
	if got := r.Signal(at, Signal{Kind: SignalToolName, Tool: "write", Lead: 8 * time.Second}); got != None {
		t.Errorf("8 s ahead: got %v, want none", got)
	}
	want := []Action{Compress, Compress, Restore} // the gap goes on meanwhile
	if diff := cmp.Diff(want, due(r, at.Add(8*time.Second))); diff != "" {
		t.Errorf("until it is time (-want +got):\n%s", diff)
	}
	r = NewRhythm(epoch, Times{})
	r.Signal(at, Signal{Kind: SignalToolName, Tool: "write", Lead: 8 * time.Second})
	if got := r.Signal(at.Add(time.Second), Signal{Kind: SignalDispatch}); got != Restore {
		t.Errorf("it is dispatched early: got %v, want restore", got)
	}
}

func TestASignalOfAnotherToolRestoresForThatOne(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	r.Signal(epoch, Signal{Kind: SignalToolName})
	if got := r.Signal(epoch, Signal{Kind: SignalToolName, Tool: "grep"}); got != Restore {
		t.Errorf("now the tool is known: got %v, want restore", got)
	}
}

func TestARequestOpensTheGapWithoutSettling(t *testing.T) {
	t.Parallel()
	for _, k := range []SignalKind{SignalRequest, SignalResult} {
		r := NewRhythm(epoch, Times{})
		r.Signal(epoch, Signal{Kind: k})
		if got := r.Tick(epoch); got != Compress {
			t.Errorf("%v: got %v, want compress", k, got)
		}
	}
}

func TestAPersonWhoLeavesParksAndARequestWakes(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	if got := r.Signal(epoch, Signal{Kind: SignalHumanGap}); got != Park {
		t.Errorf("human gap: got %v, want park", got)
	}
	if got := r.Signal(epoch, Signal{Kind: SignalHumanGap}); got != None {
		t.Errorf("again: got %v, want none", got)
	}
	if got := due(r, epoch.Add(time.Hour)); got != nil {
		t.Errorf("while parked: got %v", got)
	}
	back := epoch.Add(2 * time.Hour)
	if got := r.Signal(back, Signal{Kind: SignalRequest}); got != Wake {
		t.Errorf("request: got %v, want wake", got)
	}
	if got := r.Tick(back.Add(DefaultSettle)); got != Compress {
		t.Errorf("what waking brought back: got %v, want compress", got)
	}
}

func TestAWrongSignalToAParkedSandboxEndsParked(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	at := epoch.Add(time.Hour)
	due(r, at)
	if got := r.Signal(at, Signal{Kind: SignalToolName}); got != Restore {
		t.Errorf("tool name: got %v, want restore", got)
	}
	want := []Action{Withdraw, Park}
	if diff := cmp.Diff(want, due(r, at.Add(time.Minute))); diff != "" {
		t.Errorf("no call came (-want +got):\n%s", diff)
	}
}

func TestHurryMakesAPassDueOnlyInAGap(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	due(r, epoch.Add(10*time.Second))
	at := epoch.Add(10 * time.Second)
	r.Hurry(at)
	if got := r.Tick(at); got != Compress {
		t.Errorf("in the gap: got %v, want compress", got)
	}
	r.CallStarts(at)
	r.Hurry(at)
	if got := r.Tick(at); got != None {
		t.Errorf("in a call: got %v, want none", got)
	}
}

func TestEndingACallThatNeverStartedPanics(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	NewRhythm(epoch, Times{}).CallEnds(epoch)
}

func TestGapsAreMeasuredBetweenCalls(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, Times{})
	r.CallStarts(epoch.Add(time.Second))
	if _, known := r.LastGap(); known {
		t.Error("the time before the first call counts as a gap")
	}
	r.CallEnds(epoch.Add(2 * time.Second))
	if got := r.InGap(epoch.Add(5 * time.Second)); got != 3*time.Second {
		t.Errorf("in the gap for %v, want 3 s", got)
	}
	r.CallStarts(epoch.Add(7 * time.Second))
	if got, known := r.LastGap(); !known || got != 5*time.Second {
		t.Errorf("got a gap of %v, %v, want 5 s", got, known)
	}
}

func TestAllNamesOfSignalsAreParsed(t *testing.T) {
	t.Parallel()
	for k := range numSignals {
		if got, err := ParseSignal(k.String()); err != nil || got != k {
			t.Errorf("%v: got %v, %v", k, got, err)
		}
	}
	if _, err := ParseSignal("unknown"); err == nil {
		t.Error("an unknown name was parsed")
	}
}

// model says what a rhythm may answer, from what was told it and what it has answered so far.
type model struct {
	running  int
	lastEnd  time.Time
	open     bool      // a request or result was told since: no need to settle
	restored time.Time // when Restore was answered, if nothing has ended that; else zero
	parked   bool
	mayPark  bool // human_gap was told
}

// check fails if the action is not allowed at now.
func (m *model) check(t *rapid.T, now time.Time, a Action) {
	t.Helper()
	switch a {
	case Compress:
		if m.running > 0 || !m.restored.IsZero() || m.parked {
			t.Fatalf("compress with %d calls, restored at %v, parked %v", m.running, m.restored, m.parked)
		}
		if !m.open && now.Sub(m.lastEnd) < DefaultSettle {
			t.Fatalf("compress %v after the last call", now.Sub(m.lastEnd))
		}
	case Restore:
		if m.running > 0 {
			t.Fatal("restore ahead while a call runs")
		}
		m.restored, m.parked = now, false
	case Withdraw:
		if m.restored.IsZero() {
			t.Fatal("withdraw without a restore")
		}
		m.restored = time.Time{}
	case Park:
		if m.running > 0 || m.parked || !m.mayPark && now.Sub(m.lastEnd) < DefaultHumanGap {
			t.Fatalf("park with %d calls, parked %v, %v after the last", m.running, m.parked, now.Sub(m.lastEnd))
		}
		m.parked, m.restored = true, time.Time{}
	case Wake:
		if !m.parked {
			t.Fatal("wake without a park")
		}
		m.parked, m.mayPark = false, false
		m.lastEnd = now // it settles as after a call
	case Stop, None:
	}
}

func TestNoSequenceOfCallsSignalsAndTimeMakesARhythmContradictItself(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r, m, now := NewRhythm(epoch, Times{}), &model{lastEnd: epoch}, epoch
		settle := func() { // all that is due until now
			for range 100 {
				next, ok := r.Deadline()
				if !ok || next.After(now) {
					return
				}
				m.check(t, now, r.Tick(now))
			}
			t.Fatal("something stays due for ever")
		}
		scale := []time.Duration{time.Millisecond, 20 * time.Millisecond, time.Second, 100 * time.Second}
		for range rapid.IntRange(1, 200).Draw(t, "events") {
			to := now.Add(time.Duration(rapid.IntRange(0, 10).Draw(t, "n")) * rapid.SampledFrom(scale).Draw(t, "unit"))
			for { // time passes, and the owner is punctual
				next, ok := r.Deadline()
				if !ok || next.After(to) {
					break
				}
				now = next
				settle()
			}
			now = to
			switch rapid.IntRange(0, 3).Draw(t, "event") {
			case 0:
				a := r.CallStarts(now)
				if (a == Stop) != (m.running == 0) {
					t.Fatalf("call beside %d others: got %v", m.running, a)
				}
				m.running++
				m.restored, m.parked, m.mayPark = time.Time{}, false, false
			case 1:
				if m.running > 0 {
					m.running--
					r.CallEnds(now)
					m.lastEnd, m.open = now, false
				}
			case 2:
				s := Signal{
					Kind: SignalKind(rapid.IntRange(0, int(numSignals)-1).Draw(t, "signal")),
					Tool: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "tool"),
					Lead: rapid.SampledFrom([]time.Duration{0, 2 * time.Second}).Draw(t, "lead"),
				}
				if m.running == 0 {
					m.open = m.open || s.Kind == SignalRequest || s.Kind == SignalResult
					m.mayPark = m.mayPark || s.Kind == SignalHumanGap
				}
				m.check(t, now, r.Signal(now, s))
			case 3:
				r.Hurry(now)
				m.open = m.open || m.running == 0
			}
			settle()
			if r.Calls() != m.running || (r.State() == Window) != (m.running > 0) {
				t.Fatalf("%d calls in state %v, want %d", r.Calls(), r.State(), m.running)
			}
			if !m.restored.IsZero() && m.running == 0 && r.State() != Announced {
				t.Fatalf("pages were restored for a call that comes, in state %v", r.State())
			}
		}
	})
}
