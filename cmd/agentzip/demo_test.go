package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/report"
)

func demoFlagsOf(t *testing.T, args ...string) (f demoFlags, err error) {
	t.Helper()
	cmd := newDemoCmd()
	if err := cmd.ParseFlags(args); err != nil {
		return f, err
	}
	// The command's own flags are captured by its closure; a copy is read back.
	get := func(name string) string { return cmd.Flag(name).Value.String() }
	n, err := cmd.Flags().GetInt("sandboxes")
	if err != nil {
		t.Fatal(err)
	}
	scale, err := cmd.Flags().GetFloat64("gap-scale")
	if err != nil {
		t.Fatal(err)
	}
	repeat, err := cmd.Flags().GetInt("repeat")
	if err != nil {
		t.Fatal(err)
	}
	gap, err := cmd.Flags().GetDuration("max-gap")
	if err != nil {
		t.Fatal(err)
	}
	calls, err := cmd.Flags().GetInt("max-calls")
	if err != nil {
		t.Fatal(err)
	}
	return demoFlags{
		jobFlags: jobFlags{
			sandboxes: n, gapScale: scale, maxGap: gap, maxCalls: calls,
			trajectories: get("trajectories"), group: get("group"), match: get("match"), seed: 1,
		},
		repeat: repeat, order: get("order"), native: get("native"), isolation: get("isolation"),
	}, nil
}

func TestDemoFlagsThatMakeNoSenseAreRefusedBeforeAnythingStarts(t *testing.T) {
	for args, want := range map[string]string{
		"":                          "",
		"--order=on,off --repeat=2": "",
		"--sandboxes=0":             "--sandboxes 0",
		"--gap-scale=-1":            "--gap-scale -1",
		"--gap-scale=NaN":           "--gap-scale NaN",
		"--max-gap=-1s":             "negative",
		"--max-calls=-1":            "negative",
		"--order=on":                `--order "on"`,
		"--repeat=0":                "--repeat 0",
		"--native=maybe":            `--native "maybe"`,
		"--group=g":                 "need --trajectories",
		"--isolation=none":          `isolation "none"`,
	} {
		f, err := demoFlagsOf(t, strings.Fields(args)...)
		if err != nil {
			t.Fatal(err)
		}
		err = f.check()
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", args, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: got %v, want %q", args, err, want)
		case want != "" && exitCode(t.Context(), err) != 2:
			t.Errorf("%s: exit code %d, want 2", args, exitCode(t.Context(), err))
		}
	}
}

func TestDemoPlansTheScenarioOrWhatWasRecorded(t *testing.T) {
	f, err := demoFlagsOf(t)
	if err != nil {
		t.Fatal(err)
	}
	plans, notes, err := f.plans()
	if err != nil {
		t.Fatal(err)
	}
	if len(plans) != 4 || plans[3].Trajectory.ID != "scenario/options" || len(notes) != 0 {
		t.Errorf("got %d plans, notes %v", len(plans), notes)
	}
	file := filepath.Join(t.TempDir(), "trajectories.jsonl")
	steps := strings.TrimSuffix(strings.Repeat(`{"tool":"bash","args":{"cmd":"ls"}},`, recordedCalls+5), ",")
	if err := os.WriteFile(file, []byte(`{"id":"a","steps":[`+steps+`]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err = demoFlagsOf(t, "--trajectories="+file, "--sandboxes=2"); err != nil {
		t.Fatal(err)
	}
	if plans, notes, err = f.plans(); err != nil {
		t.Fatal(err)
	}
	if len(plans) != 2 || len(plans[0].Trajectory.Steps) != recordedCalls {
		t.Errorf("got %d plans of %d calls", len(plans), len(plans[0].Trajectory.Steps))
	}
	text := strings.Join(notes, "\n")
	if !strings.Contains(text, "1 sandboxes repeat") || !strings.Contains(text, "70 are commands (10 of them past --max-calls") {
		t.Errorf("notes:\n%s", text)
	}
	p := report.Plan{Trajectories: []report.Trajectory{{Drawn: 3}}}
	f.describe(&p)
	if p.Source != file || !strings.Contains(p.ThinkSource, "R2E-Gym") {
		t.Errorf("described as %q, %q", p.Source, p.ThinkSource)
	}
}
