package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/traj"
)

func benchRestoreFlagsOf(t *testing.T, args string) *benchRestoreFlags {
	t.Helper()
	f := &benchRestoreFlags{}
	cmd := f.command()
	if err := cmd.ParseFlags(strings.Fields(args)); err != nil {
		t.Fatal(err)
	}
	f.shorten(cmd)
	return f
}

func TestBenchRestoreRefusesFlagsThatMakeNoSense(t *testing.T) {
	for args, want := range map[string]string{
		"":                      "",
		"--modes=on":            "",
		"--modes=off":           `--modes "off"`,
		"--ablation=maybe":      `--ablation "maybe"`,
		"--signals=maybe":       `--signals "maybe"`,
		"--native=maybe":        `--native "maybe"`,
		"--storm=-1":            "--storm takes",
		"--idle=2000":           "--idle 0 to 1024",
		"--isolation=none":      `isolation "none"`,
		"--gap-scale=-1":        "--gap-scale -1",
		"--quick --sandboxes=0": "--sandboxes 0",
	} {
		err := benchRestoreFlagsOf(t, args).check()
		switch {
		case want == "" && err != nil:
			t.Errorf("%q: %v", args, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%q: got %v, want an error with %q", args, err, want)
		}
	}
}

func TestQuickShortensOnlyWhatWasNotGiven(t *testing.T) {
	f := benchRestoreFlagsOf(t, "--quick --storm=8 --max-calls=3")
	if f.sandboxes != quickSandboxes || f.gapScale != quickGapScale || f.native != "off" || f.ablation != "off" || f.idle != 0 {
		t.Errorf("not short: %+v", f)
	}
	if f.storm != 8 || f.maxCalls != 3 {
		t.Errorf("what was given is not what is done: storm %d, max-calls %d", f.storm, f.maxCalls)
	}
	full := benchRestoreFlagsOf(t, "")
	if full.sandboxes != 16 || full.gapScale != restoreGapScale || full.storm != 8 || full.idle != 64 || full.ablation != "on" {
		t.Errorf("not the published measurement: %+v", full)
	}
}

func TestTheAblationIsShorterThanTheJobAndLeavesItAsItIs(t *testing.T) {
	trs, err := traj.Scenario()
	if err != nil {
		t.Fatal(err)
	}
	plans, _, _ := bench.PlanSandboxes(trs, 16, 0)
	cfg := benchRestoreFlagsOf(t, "--modes=on,off").config(&job{plans: plans}, cohort.Isolation(0))
	if got := cfg.Main.First; got != bench.On {
		t.Errorf("the first run is %v, want on", got)
	}
	if n := len(cfg.Ablation.Plans); n != ablationSandboxes {
		t.Errorf("the ablation has %d sandboxes, want %d", n, ablationSandboxes)
	}
	again, _, _ := bench.PlanSandboxes(trs, 16, 0)
	if diff := cmp.Diff(again, cfg.Main.Sandboxes); diff != "" {
		t.Errorf("the job was cut too (-want +got):\n%s", diff)
	}
	for _, p := range cfg.Ablation.Plans {
		if n := len(p.Trajectory.Steps); n > ablationCalls {
			t.Errorf("sandbox %s has %d calls, want at most %d", p.Name, n, ablationCalls)
		}
	}
	if kind := cfg.Storm.Step.Kind; kind != traj.Python {
		t.Errorf("the storm runs a %s, want Python", kind)
	}
}
