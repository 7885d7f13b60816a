package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/traj"
)

// recordedCalls is how many calls of a recorded trajectory are replayed unless
// --max-calls says otherwise: real ones run to 200, for half an hour.
const recordedCalls = 30

// jobFlags say what is replayed, and how: the flags that `demo`, `capture` and `bench restore` share.
type jobFlags struct {
	template     string
	sandboxes    int
	gapScale     float64
	maxGap       time.Duration
	maxCalls     int
	trajectories string
	group, match string
	seed         uint64
	plain        bool
}

// add defines the flags on cmd.
func (f *jobFlags) add(cmd *cobra.Command, sandboxes int, gapScale float64) {
	fl := cmd.Flags()
	fl.StringVarP(&f.template, "template", "t", demoTemplate, "template to clone")
	fl.IntVarP(&f.sandboxes, "sandboxes", "n", sandboxes, "sandboxes at once")
	fl.Float64Var(&f.gapScale, "gap-scale", gapScale, "multiply thinking times by this (1: as recorded)")
	fl.DurationVar(&f.maxGap, "max-gap", time.Minute, "cut thinking times at this, before scaling (0: never)")
	fl.IntVar(&f.maxCalls, "max-calls", 0, fmt.Sprintf("replay at most so many calls of each trajectory (0: all; of recorded ones %d)", recordedCalls))
	fl.StringVar(&f.trajectories, "trajectories", "", "replay recorded trajectories: a .jsonl or .jsonl.gz file, or a folder of them")
	fl.StringVar(&f.group, "group", "", "with --trajectories: only this group of groups.json")
	fl.StringVar(&f.match, "match", "", "with --trajectories: only ids, tasks or repositories that contain this")
	fl.Uint64Var(&f.seed, "seed", 1, "for thinking times that were not recorded")
	fl.BoolVar(&f.plain, "plain", false, "log lines instead of the live display")
	if err := cmd.RegisterFlagCompletionFunc("template", completeTemplateFlag); err != nil {
		panic(err) // the flag is defined above
	}
}

// check refuses flags that make no sense, before anything is started.
func (f *jobFlags) check() error {
	switch {
	case f.sandboxes < 1 || f.sandboxes > 256:
		return usageError(fmt.Errorf("--sandboxes %d: use 1 to 256", f.sandboxes))
	case !(f.gapScale >= 0 && f.gapScale <= 1000):
		return usageError(fmt.Errorf("--gap-scale %g: use 0 to 1000", f.gapScale))
	case f.maxGap < 0 || f.maxCalls < 0:
		return usageError(errors.New("--max-gap and --max-calls must not be negative"))
	case f.trajectories == "" && (f.group != "" || f.match != ""):
		return usageError(errors.New("--group and --match need --trajectories"))
	}
	return nil
}

// plans loads the trajectories and gives each sandbox its own. The notes say
// what was left out or made up.
func (f *jobFlags) plans() (plans []bench.Plan, notes []string, err error) {
	trs, maxCalls := []traj.Trajectory(nil), f.maxCalls
	if f.trajectories == "" {
		trs, err = traj.Scenario()
	} else {
		trs, err = traj.Load(traj.Selection{Path: f.trajectories, Group: f.group, Match: f.match, MinSteps: 3, Seed: f.seed})
		if maxCalls == 0 {
			maxCalls = recordedCalls
		}
	}
	if err != nil {
		return nil, nil, err
	}
	plans, repeated, dropped := bench.PlanSandboxes(trs, f.sandboxes, maxCalls)
	if repeated > 0 {
		notes = append(notes, fmt.Sprintf("%d sandboxes repeat the trajectory of another, shifted in time", repeated))
	}
	var tally traj.Tally
	cut := 0
	for i, p := range plans {
		tally.Add(p.Trajectory.Tally)
		cut += dropped[i]
	}
	if f.trajectories != "" {
		notes = append(notes, fmt.Sprintf("recorded calls: %d are commands (%d of them past --max-calls, not replayed), %d need no sandbox, %d cannot be mapped, %d files without recorded content",
			tally.Mapped, cut, tally.NoSandbox, tally.Unmappable, tally.StandIns))
	}
	return plans, notes, nil
}

// A job is what the verbs that replay agents have opened. Owned by the verb; close it.
type job struct {
	daemon   *daemon.Daemon
	template *template.Template
	plans    []bench.Plan
	notes    []string // what was left out or made up
	display  report.Display
}

// open loads the plans, opens the daemon and its template, and begins to show progress.
func (f *jobFlags) open(cmd *cobra.Command) (*job, error) {
	plans, notes, err := f.plans()
	if err != nil {
		return nil, err
	}
	d, err := daemon.Open(daemon.Options{StateDir: stateDir(), LibDir: libDir(), Log: slog.Default()})
	if err != nil {
		return nil, err
	}
	ctx := cmd.Context()
	tmpl, _, err := d.Template(ctx, f.template)
	if err != nil {
		return nil, errors.Join(withHint(err, "run `agentzip setup`, or name a template with --template"), d.Close())
	}
	return &job{daemon: d, template: tmpl, plans: plans, notes: notes, display: f.display(ctx, cmd.ErrOrStderr())}, nil
}

// label says in a report where and from what its figures come. native: the calls were also
// to be timed without a VM.
func (f *jobFlags) label(rep *report.Report, j *job, native bool) {
	m := report.ThisMachine()
	m.QEMU, m.Accel = j.template.Host.QEMU, cmp.Or(string(j.template.Hardware.Accel), "tcg")
	rep.Machine = m
	rep.Tool = toolName()
	rep.Template = report.Template{Name: j.template.Name, Digest: j.template.Input, MemoryMB: int64(j.template.Hardware.Memory) >> 20}
	rep.Notes = append(j.notes, rep.Notes...)
	if !native {
		rep.Summary.NativeMissing = "not asked for (--native=on)"
	}
	f.describe(&rep.Plan)
}

// toolName names this program and its revision in reports.
func toolName() string { return "agentzip " + readVersion().Revision }

// source says where the trajectories come from.
func (f *jobFlags) source() string {
	if f.trajectories == "" {
		return "built-in"
	}
	return f.trajectories
}

// describe adds to the plan what only the flags know.
func (f *jobFlags) describe(p *report.Plan) {
	p.Source, p.Seed, p.ThinkSource = f.source(), f.seed, "of the built-in scenario, after recorded agents"
	if f.trajectories == "" {
		return
	}
	p.ThinkSource = "as recorded"
	for _, t := range p.Trajectories {
		if t.Drawn > 0 {
			p.ThinkSource = "where not recorded " + traj.ThinkSource
		}
	}
}

func (f *jobFlags) display(ctx context.Context, w io.Writer) report.Display {
	if f.plain || !isTerminal(w) {
		return report.NewPlain(w)
	}
	return report.NewLive(ctx, w)
}
