package policy

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/units"
)

// roomy is a host of 16 GiB with nothing to worry about.
func roomy(at time.Time) HostSample {
	return HostSample{At: at, Total: 16 * units.GiB, Available: 8 * units.GiB, StallKnown: true}
}

func TestWhatMakesAHostShort(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(*HostSample)
		want   Level
	}{
		{"nothing", func(*HostSample) {}, Normal},
		{"little is available", func(s *HostSample) { s.Available = 700 * units.MiB }, Tight},
		{"less than the floor is available", func(s *HostSample) { s.Available = 400 * units.MiB }, Full},
		{"the calls to come need what is available", func(s *HostSample) { s.Reserve = 7900 * units.MiB }, Full},
		{"tasks wait for memory", func(s *HostSample) { s.Some = 15 }, Tight},
		{"all tasks wait for memory", func(s *HostSample) { s.Full = 20 }, Full},
		{"tasks may wait, but that is not known", func(s *HostSample) { s.Some, s.Full, s.StallKnown = 99, 99, false }, Normal},
		{"a pool is nearly full", func(s *HostSample) { s.PoolUsed = 0.95 }, Tight},
	} {
		s := roomy(epoch)
		c.change(&s)
		if got := NewPressure(Limits{}).Note(s); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestALevelEndsOnlyAfterACalmTime(t *testing.T) {
	t.Parallel()
	p := NewPressure(Limits{})
	short := roomy(epoch)
	short.Available = 0
	p.Note(short)
	for _, c := range []struct {
		after time.Duration
		want  Level
	}{{time.Second, Full}, {9 * time.Second, Full}, {10 * time.Second, Normal}} {
		if got := p.Note(roomy(epoch.Add(c.after))); got != c.want {
			t.Errorf("%v later: got %v, want %v", c.after, got, c.want)
		}
	}
}

func TestAHostRefusesWhatItCouldNotGiveBack(t *testing.T) {
	t.Parallel()
	p := NewPressure(Limits{})
	if err := p.Admit(units.GiB); err != nil {
		t.Errorf("before the first sample: %v", err)
	}
	s := roomy(epoch)
	s.Reserve = 7 * units.GiB
	p.Note(s)
	if err := p.Admit(100 * units.MiB); err != nil {
		t.Errorf("100 MiB of the GiB that is left: %v", err)
	}
	var r *Refusal
	if err := p.Admit(700 * units.MiB); !errors.As(err, &r) || r.Reserve != s.Reserve {
		t.Errorf("more than what is above the floor: got %v, want a refusal", err)
	}
}

func TestANeedRemembersTheLargestCallForAWhile(t *testing.T) {
	t.Parallel()
	var n Need
	if n.Bytes() != FirstNeed {
		t.Errorf("before the first call: %v", n.Bytes())
	}
	n.Note(20 * units.MiB)
	n.Note(units.MiB)
	if got := n.Bytes(); got < 15*units.MiB {
		t.Errorf("after one smaller call: %v", got)
	}
	for range 50 {
		n.Note(units.MiB)
	}
	if got := n.Bytes(); got != units.MiB {
		t.Errorf("after many smaller calls: %v, want 1 MiB", got)
	}
}

func TestALevelNeverLiesBelowWhatTheSampleCallsFor(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p, at := NewPressure(Limits{}), epoch
		for range rapid.IntRange(1, 100).Draw(t, "samples") {
			at = at.Add(time.Duration(rapid.IntRange(1, 8000).Draw(t, "ms")) * time.Millisecond)
			s := roomy(at)
			s.Available = units.Bytes(rapid.Int64Range(0, int64(2*units.GiB)).Draw(t, "available"))
			s.Some = rapid.Float64Range(0, 30).Draw(t, "some")
			alone := NewPressure(Limits{}).Note(s)
			if got := p.Note(s); got < alone {
				t.Fatalf("got %v, the sample alone calls for %v", got, alone)
			}
			if p.Level() == Full && p.Admit(0) == nil {
				t.Fatal("a full host takes a sandbox")
			}
		}
	})
}
