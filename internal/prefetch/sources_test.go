package prefetch

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/units"
)

func all(units.Frame) bool { return true }

// Bit planes are numbers: one a page, from 0 to the highest.
func TestHeatOfAPageIsANumberThatStaysInItsBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var c cell
		var want [blockPages]int
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			mask, add := rapid.Uint64().Draw(t, "mask"), rapid.Bool().Draw(t, "up")
			if add {
				up(c.level[:], mask)
			} else {
				down(c.level[:], mask)
			}
			for i := range want {
				if mask>>i&1 == 0 {
					continue
				}
				if add {
					want[i] = min(want[i]+1, maxHeat)
				} else {
					want[i] = max(want[i]-1, 0)
				}
			}
		}
		hottest := 0
		for i, w := range want {
			hottest = max(hottest, w)
			if got := c.heat(uint(i)); got != w { //nolint:gosec // G115: below 64
				t.Fatalf("page %d has heat %d, want %d", i, got, w)
			}
		}
		if got := c.hottest(); got != hottest {
			t.Fatalf("the hottest page has %d, want %d", got, hottest)
		}
	})
}

func TestAWalkGoesOnThoughAnotherOneTakesTurnsWithIt(t *testing.T) {
	t.Parallel()
	var s strides
	var a, b []units.Frame
	for i := range units.Frame(5) {
		a = s.follow(1000+i, 3, all, nil)
		b = s.follow(9000-2*i, 3, all, nil)
	}
	if d := cmp.Diff([]units.Frame{1005, 1006, 1007}, a); d != "" {
		t.Errorf("upwards (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]units.Frame{8990, 8988, 8986}, b); d != "" {
		t.Errorf("downwards, every other page (-want +got):\n%s", d)
	}
}

func TestAStrideNeedsAMajority(t *testing.T) {
	t.Parallel()
	var s strides
	for i, f := range []units.Frame{100, 101, 109, 104, 130, 111} {
		if got := s.follow(f, 4, all, nil); i > 2 && got != nil {
			t.Errorf("after frame %d: %v, want nothing", f, got)
		}
	}
	s = strides{}
	for _, f := range []units.Frame{100, 101, 102, 120, 103, 104} { // one stray access
		s.follow(f, 1, all, nil)
	}
	if d := cmp.Diff([]units.Frame{106}, s.follow(105, 1, all, nil)); d != "" {
		t.Errorf("after a stray access (-want +got):\n%s", d)
	}
}

func TestWhatFollowedAPageFollowsItAgain(t *testing.T) {
	t.Parallel()
	l := links{size: 64}
	if got := l.follow(1, 5, all, nil); got != nil {
		t.Errorf("before anything was learned: %v", got)
	}
	order := []units.Frame{7, 500, 3, 90000, 4}
	for i := range order[1:] {
		l.learn(order[i], order[i+1])
	}
	if d := cmp.Diff([]units.Frame{500, 3, 90000, 4}, l.follow(7, 9, all, nil)); d != "" {
		t.Errorf("after 7 (-want +got):\n%s", d)
	}
	not3 := func(f units.Frame) bool { return f != 3 }
	if d := cmp.Diff([]units.Frame{500, 90000}, l.follow(7, 2, not3, nil)); d != "" {
		t.Errorf("after 7, frame 3 is there already (-want +got):\n%s", d)
	}
	l.learn(4, 7)
	if got := l.follow(7, 1000, func(units.Frame) bool { return false }, nil); got != nil {
		t.Errorf("round a circle: %v", got)
	}
}

func TestAnEstimateForgetsWhatWasLongAgo(t *testing.T) {
	t.Parallel()
	e := guess(0.9)
	for range 3 {
		e.observe(sample{touched: 0, seen: 1000})
	}
	if e.p() > 0.1 {
		t.Errorf("still %.2f after three calls without a hit", e.p())
	}
	e.observe(sample{touched: 64, seen: 64})
	e.observe(sample{touched: 64, seen: 64})
	if e.p() < 0.6 {
		t.Errorf("only %.2f after two calls of hits", e.p())
	}
}
