package traj

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

func scenario(t *testing.T) []Trajectory {
	t.Helper()
	s, err := Scenario()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestScenarioIsFourDifferentTrajectoriesOf10To14Calls(t *testing.T) {
	t.Parallel()
	s := scenario(t)
	if len(s) != 4 {
		t.Fatalf("got %d trajectories, want 4", len(s))
	}
	seen := map[string]bool{}
	for _, tr := range s {
		if len(tr.Steps) < 10 || len(tr.Steps) > 14 {
			t.Errorf("%s has %d calls, want 10 to 14", tr.ID, len(tr.Steps))
		}
		if tr.Task == "" || seen[tr.Task] {
			t.Errorf("%s: task %q is empty or not its own", tr.ID, tr.Task)
		}
		seen[tr.Task] = true
	}
}

func TestScenarioThinkTimesFollowTheRecordedOnes(t *testing.T) {
	t.Parallel()
	var think []time.Duration
	for _, tr := range scenario(t) {
		var sum time.Duration
		for _, s := range tr.Steps {
			think = append(think, s.Think)
			sum += s.Think
		}
		// The demo's time budget: gaps of one trajectory at scale 1.
		if sum > 85*time.Second {
			t.Errorf("%s thinks for %v in all, over the demo's budget of 85 s", tr.ID, sum)
		}
	}
	slices.Sort(think)
	at := func(p float64) time.Duration { return think[int(p*float64(len(think)-1)+0.5)] }
	for _, b := range []struct {
		name     string
		got      time.Duration
		min, max float64
	}{
		{"p10", at(0.1), 2.0, 2.8},
		{"p50", at(0.5), 4.0, 4.8},
		{"p90", at(0.9), 10.5, 13},
		{"max", at(1), 15, 20},
	} {
		if s := b.got.Seconds(); s < b.min || s > b.max {
			t.Errorf("think %s is %.1f s, want %.1f to %.1f", b.name, s, b.min, b.max)
		}
	}
}

func TestScenarioMixesKindsLikeTheRecordedOnes(t *testing.T) {
	t.Parallel()
	count := map[Kind]int{}
	total := 0
	for _, tr := range scenario(t) {
		for _, s := range tr.Steps {
			count[s.Kind]++
			total++
		}
	}
	for _, b := range []struct {
		name     string
		kinds    []Kind
		min, max float64
	}{
		{"list and search", []Kind{List, Search}, 0.18, 0.30},
		{"read", []Kind{Read}, 0.14, 0.28},
		{"edit and write", []Kind{Edit, Write}, 0.15, 0.28},
		{"test and python", []Kind{Test, Python}, 0.22, 0.36},
		{"git", []Kind{Git}, 0.02, 0.14},
	} {
		n := 0
		for _, k := range b.kinds {
			n += count[k]
			delete(count, k)
		}
		if share := float64(n) / float64(total); share < b.min || share > b.max {
			t.Errorf("share of %s is %.2f, want %.2f to %.2f", b.name, share, b.min, b.max)
		}
	}
	for k, n := range count {
		t.Errorf("%d steps of kind %q, which the statistics do not know", n, k)
	}
}

func TestEveryScenarioCommandIsValidShell(t *testing.T) {
	t.Parallel()
	bash := needBash(t)
	check := func(name, text string) {
		if out, err := exec.CommandContext(t.Context(), bash, "-n", "-c", text).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
	for _, tr := range scenario(t) {
		for i, s := range tr.Steps {
			check(tr.ID+" "+s.Tool, s.Shell)
			if strings.Contains(s.Shell, "date") && !strings.Contains(s.Shell, "updated") || strings.Contains(s.Shell, "mktemp") || strings.Contains(s.Shell, "$RANDOM") {
				t.Errorf("%s call %d prints what no two runs share:\n%s", tr.ID, i+1, s.Shell)
			}
		}
	}
}

func TestScenarioTextWithMistakesIsRefused(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"text before the first step": "task: x\nls\n-- list 1 --\nls\n",
		"a step without a command":   "task: x\n-- list 1 --\n-- list 2 --\nls\n",
		"a think time of no number":  "task: x\n-- list soon --\nls\n",
	} {
		if _, err := parseScenario("x", text); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func needBash(t *testing.T) string {
	t.Helper()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash")
	}
	return bash
}
