package prefetch

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// faults returns one read fault on each of n evicted pages from the first on.
func faults(first units.Frame, n int) []pager.Touch {
	var out []pager.Touch
	for i := range n {
		out = append(out, pager.Touch{Frame: first + units.Frame(i), Kind: pager.KindEvicted})
	}
	return out
}

// runCall lets the sandbox touch pages in one call, all evicted, and returns what was asked for
// before. What was asked for is not seen.
func runCall(p *Predictor, c Call, touches []pager.Touch) (asked []pager.Touch) {
	asked = p.Begin(c)
	there := map[units.Frame]bool{}
	for _, t := range asked {
		there[t.Frame] = true
	}
	p.Faulted(slices.DeleteFunc(slices.Clone(touches), func(t pager.Touch) bool { return there[t.Frame] }))
	p.End(nil)
	p.Settle(nil, true)
	return asked
}

func TestASandboxIsToldWhatItsSiblingsTouchedInThisKindOfCall(t *testing.T) {
	t.Parallel()
	h := NewHistory(Options{HoldOut: 1 << 30})
	git, sed := faults(1000, 100), faults(5000, 50)
	for range 3 {
		p := h.NewPredictor("sibling", nil)
		runCall(p, Call{Number: 1, Kind: "git"}, git)
		runCall(p, Call{Number: 2, Kind: "sed"}, sed)
	}
	p := h.NewPredictor("new", nil)
	got := p.Begin(Call{Number: 20, Kind: "git"})
	want := slices.Clone(git)
	for i := range want {
		want[i].Kind = pager.KindUnknown
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("before the first call (-want +got):\n%s", d)
	}
}

func TestPagesComeInTheOrderOfTheirFirstTouch(t *testing.T) {
	t.Parallel()
	h := NewHistory(Options{HoldOut: 1 << 30})
	p := h.NewPredictor("s", nil)
	late, early := faults(0, 3), faults(64*500, 3)
	for range 2 {
		p.Begin(Call{Kind: "x"})
		p.Faulted(early)
		p.Faulted(late)
		p.End(nil)
		p.Settle(nil, true)
	}
	var got []units.Frame
	for _, x := range p.Begin(Call{Kind: "x"}) {
		got = append(got, x.Frame)
	}
	if d := cmp.Diff([]units.Frame{32000, 32001, 32002, 0, 1, 2}, got); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
}

func TestSharedPagesAreAskedForOnlyWhenTheyWerePromised(t *testing.T) {
	t.Parallel()
	h := NewHistory(Options{HoldOut: 1 << 30})
	p := h.NewPredictor("s", func(units.Frame) bool { return false })
	written := []pager.Touch{{Frame: 70, Write: true, Kind: pager.KindPrivate}, {Frame: 71, Write: true, Kind: pager.KindPrivate}}
	var promised []pager.Touch
	for range 40 {
		p.Begin(Call{Kind: "x"})
		promised = p.End(nil)
		p.Settle(written, true)
	}
	want := []pager.Touch{{Frame: 70, Write: true}, {Frame: 71, Write: true}}
	if d := cmp.Diff(want, promised); d != "" {
		t.Errorf("promised (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want, p.Begin(Call{Kind: "x"})); d != "" {
		t.Errorf("asked for (-want +got):\n%s", d)
	}
	other := h.NewPredictor("other", func(units.Frame) bool { return false })
	other.Begin(Call{Kind: "x"})
	other.End(nil)
	other.Settle([]pager.Touch{{Frame: 300, Write: true, Kind: pager.KindPrivate}}, true)
	other.promised = nil
	if got := other.Begin(Call{Kind: "x"}); len(got) != 0 {
		t.Errorf("asked for %v, which is mapped", got)
	}
}

// A page that was restored and of which nothing was seen must not count as useful.
func TestASourceThatIsWrongIsTurnedDownAndComesBack(t *testing.T) {
	t.Parallel()
	h := NewHistory(Options{HoldOut: 16})
	p := h.NewPredictor("s", nil)
	call := Call{Kind: "x"}
	right, at := faults(0, 400), 0
	for range 8 {
		at = len(runCall(p, call, right))
	}
	if at < 350 {
		t.Fatalf("%d of 400 pages are asked for, want nearly all", at)
	}
	// From now on the guest touches other pages each time.
	for i := range 12 {
		at = len(runCall(p, call, faults(units.Frame(10000+1000*i), 400)))
	}
	if at > 100 {
		t.Errorf("%d pages are still asked for, though none is touched", at)
	}
	if s := p.Stats(); s.Useful >= s.Held {
		t.Errorf("%d of %d pages left out were useful, want fewer", s.Useful, s.Held)
	}
	for range 10 {
		at = len(runCall(p, call, right))
	}
	if at < 350 {
		t.Errorf("%d of 400 pages are asked for after the guest came back, want nearly all", at)
	}
}

func TestWhatAPredictorDoesIsBoundedAndRepeatable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		type step struct {
			kind    string
			touches []pager.Touch
			whole   bool
		}
		frame := rapid.Uint32Range(0, 1<<17)
		touch := rapid.Custom(func(t *rapid.T) pager.Touch {
			return pager.Touch{Frame: units.Frame(frame.Draw(t, "frame")), Write: rapid.Bool().Draw(t, "write"), Kind: pager.Kind(rapid.IntRange(0, 5).Draw(t, "kind"))} //nolint:gosec // G115: small
		})
		var steps []step
		for range rapid.IntRange(1, 30).Draw(t, "calls") {
			steps = append(steps, step{
				kind:    rapid.StringMatching("[a-c]?").Draw(t, "kind"),
				touches: rapid.SliceOfN(touch, 0, 200).Draw(t, "touches"), whole: rapid.Bool().Draw(t, "whole"),
			})
		}
		limit := rapid.IntRange(1, 300).Draw(t, "limit")
		run := func() (all [][]pager.Touch) {
			h := NewHistory(Options{Pages: limit, Seed: 7})
			p := h.NewPredictor("s", func(f units.Frame) bool { return f%3 != 0 })
			for i, s := range steps {
				got := p.Begin(Call{Number: i + 1, Kind: s.kind})
				if len(got) > limit {
					t.Fatalf("%d pages asked for, at most %d may be", len(got), limit)
				}
				seen := map[units.Frame]bool{}
				for _, x := range got {
					if seen[x.Frame] {
						t.Fatalf("frame %d is asked for twice", x.Frame)
					}
					seen[x.Frame] = true
				}
				all = append(all, got, p.Faulted(s.touches), p.End(nil))
				p.Settle(s.touches, s.whole)
				if n := p.Footprint(); n > 100*units.KiB {
					t.Fatalf("the predictor occupies %v", n)
				}
			}
			return all
		}
		if d := cmp.Diff(run(), run()); d != "" {
			t.Fatalf("two runs differ:\n%s", d)
		}
	})
}
