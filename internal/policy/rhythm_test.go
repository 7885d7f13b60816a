package policy

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Unix(1_700_000_000, 0)

func TestAGapOpensOnlyAfterTheSettleTime(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, 50*time.Millisecond, time.Second)
	if got := r.Tick(epoch.Add(49 * time.Millisecond)); got != None {
		t.Errorf("tick before the settle time: got %v, want none", got)
	}
	if got := r.Tick(epoch.Add(50 * time.Millisecond)); got != Compress {
		t.Errorf("tick at the settle time: got %v, want compress", got)
	}
	if !r.Open() {
		t.Error("the gap is not open after the first pass was due")
	}
}

func TestACallClosesTheGapOnce(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, 0, 0)
	r.Tick(epoch.Add(DefaultSettle))
	if got := r.CallStarts(); got != Stop {
		t.Errorf("first call: got %v, want stop", got)
	}
	if got := r.CallStarts(); got != None {
		t.Errorf("second, parallel call: got %v, want none", got)
	}
	if _, due := r.Deadline(); due {
		t.Error("something is due while calls run")
	}
}

func TestParallelCallsKeepTheGapClosedUntilTheLastEnds(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, 0, 0)
	r.CallStarts()
	r.CallStarts()
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

func TestAnHourAloneCostsFewPasses(t *testing.T) {
	t.Parallel()
	r := NewRhythm(epoch, 0, 0)
	passes := 0
	for now := epoch; now.Before(epoch.Add(time.Hour)); now, _ = r.Deadline() {
		if r.Tick(now) == Compress {
			passes++
		}
	}
	if passes < 3 || passes > 10 {
		t.Errorf("got %d passes in an hour, want 3 to 10", passes)
	}
}

func TestEndingACallThatNeverStartedPanics(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	NewRhythm(epoch, 0, 0).CallEnds(epoch)
}

func TestCompressionNeverRunsInsideAToolWindow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := NewRhythm(epoch, 0, 0)
		now, running, lastEnd := epoch, 0, epoch
		for range rapid.IntRange(1, 200).Draw(t, "events") {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "ms")) * time.Millisecond)
			switch rapid.IntRange(0, 2).Draw(t, "event") {
			case 0:
				wasOpen := r.Open()
				if got := r.CallStarts(); (got == Stop) != wasOpen {
					t.Fatalf("call with the gap open=%v: got %v", wasOpen, got)
				}
				running++
			case 1:
				if running > 0 {
					running--
					r.CallEnds(now)
					lastEnd = now
				}
			case 2:
				got := r.Tick(now)
				if got == Compress && (running > 0 || now.Sub(lastEnd) < DefaultSettle) {
					t.Fatalf("compress with %d calls running, %v after the last", running, now.Sub(lastEnd))
				}
			}
			if r.Open() && running > 0 {
				t.Fatal("the gap is open while a call runs")
			}
			if r.Calls() != running {
				t.Fatalf("got %d calls, want %d", r.Calls(), running)
			}
		}
	})
}
