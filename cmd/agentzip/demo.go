package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/report"
)

// defaultGapScale stretches thinking times a little: emulation makes a call 10-20
// times longer, so that at 1 a sandbox is busy for a third of the time where
// recorded agents are for 2-31 %. Twice as much would not fit into six minutes.
const defaultGapScale = 1.5

// demoFlags are the flags of `demo`, as given.
type demoFlags struct {
	jobFlags
	order      string
	repeat     int
	native     string
	isolation  string
	noPrefetch bool
	jsonFile   string
}

func newDemoCmd() *cobra.Command {
	f := demoFlags{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run the main job: agents in sandboxes, with and without compression",
		Long: `Clones sandboxes from a template, replays an agent's tool calls in each of them, all
at once, with the model's thinking time between calls: first with compression off, then
on. Compares every output and exit code of the two runs and prints what compression
saved and cost. Any difference is a failure (exit 1).

By default the agents are four of our own writing, at work on tornado. --trajectories
replays recorded ones: JSON lines of Claude Code, R2E-Gym, mini-swe-agent or agentseism
runs. Their commands run in the sandboxes only, unless --native=on.

The last line of stdout is for scripts and keeps its form:
  demo saved=91.2% latency=1.03x native=1.08x stall_p99_ms=4.2 block_p50_us=48 block_p99_us=310 integrity=ok`,
		Example: `  agentzip demo
  agentzip demo --gap-scale 0.5 --json report.json
  agentzip demo --trajectories recorded/ --match aiohttp --max-calls 20`,
		Args:    cobra.NoArgs,
		PreRunE: requireRoot,
		RunE:    func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	f.add(cmd, 4, defaultGapScale)
	fl := cmd.Flags()
	fl.StringVar(&f.order, "order", "off,on", "which run comes first: off,on or on,off")
	fl.IntVar(&f.repeat, "repeat", 1, "pairs of runs; every other pair in the other order")
	fl.StringVar(&f.native, "native", "auto", "also time the commands on this host without a VM: on, off, auto (our own scenario only)")
	addIsolation(cmd, &f.isolation)
	fl.BoolVar(&f.noPrefetch, "no-prefetch", false, "restore only what faults ask for")
	fl.StringVar(&f.jsonFile, "json", "", "write the whole report as JSON to this file (-: to stdout, and the table to stderr)")
	for name, complete := range map[string]cobra.CompletionFunc{
		"order":  cobra.FixedCompletions([]string{"off,on", "on,off"}, cobra.ShellCompDirectiveNoFileComp),
		"native": cobra.FixedCompletions([]string{"auto", "on", "off"}, cobra.ShellCompDirectiveNoFileComp),
	} {
		if err := cmd.RegisterFlagCompletionFunc(name, complete); err != nil {
			panic(err) // the flags are defined above
		}
	}
	cmd.AddCommand(newNativeReplayCmd())
	return cmd
}

// newNativeReplayCmd is the child that times commands without a VM. Not for
// people: it refuses to run outside the namespaces that `demo` starts it in.
func newNativeReplayCmd() *cobra.Command {
	return &cobra.Command{
		Use:    bench.NativeVerb,
		Short:  "Time a job's commands without a VM (started by agentzip itself)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.NativeMain(cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

// check refuses flags that make no sense, before anything is started.
func (f *demoFlags) check() error {
	switch {
	case f.order != "off,on" && f.order != "on,off":
		return usageError(fmt.Errorf("--order %q: use off,on or on,off", f.order))
	case f.repeat < 1 || f.repeat > 100:
		return usageError(fmt.Errorf("--repeat %d: use 1 to 100", f.repeat))
	case f.native != "auto" && f.native != "on" && f.native != "off":
		return usageError(fmt.Errorf("--native %q: use auto, on or off", f.native))
	}
	if err := f.jobFlags.check(); err != nil {
		return err
	}
	if _, err := cohort.ParseIsolation(f.isolation); err != nil {
		return usageError(fmt.Errorf("--isolation: %w", err))
	}
	return nil
}

func (f *demoFlags) run(cmd *cobra.Command) (err error) {
	if err := f.check(); err != nil {
		return err
	}
	isolation, err := cohort.ParseIsolation(f.isolation)
	if err != nil {
		return err
	}
	j, err := f.open(cmd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.daemon.Close()) }()
	ctx := cmd.Context()
	cfg := bench.Config{
		Fleet:     j.daemon.Fleets(daemon.FleetOptions{Template: f.template, Isolation: isolation, NoPrefetch: f.noPrefetch}),
		Sandboxes: j.plans, GapScale: f.gapScale, MaxGap: f.maxGap, Repeat: f.repeat, Display: j.display,
	}
	if f.order == "on,off" {
		cfg.First = bench.On
	}
	if f.native == "on" || f.native == "auto" && f.trajectories == "" {
		cfg.NativeReplay = nativeReplay(ctx, j.template.RootFile(), j.plans)
	}
	rep, err := bench.Measure(ctx, cfg)
	j.display.Close()
	if rep == nil {
		return err
	}
	f.label(rep, j, cfg.NativeReplay != nil)
	return errors.Join(err, f.write(cmd, rep))
}

// nativeReplay times the commands in a child of this program.
func nativeReplay(ctx context.Context, rootImage string, plans []bench.Plan) func() bench.NativeResult {
	return func() bench.NativeResult {
		self, err := os.Executable()
		if err != nil {
			return bench.NativeResult{Missing: err.Error()}
		}
		return bench.ReplayNative(ctx, bench.NativeSpec{Exe: []string{self, "demo", bench.NativeVerb}, RootImage: rootImage, Plans: plans})
	}
}

// write prints the table and stores the JSON.
func (f *demoFlags) write(cmd *cobra.Command, rep *report.Report) (err error) {
	switch f.jsonFile {
	case "":
		return rep.WriteText(cmd.OutOrStdout())
	case "-":
		return errors.Join(rep.WriteText(cmd.ErrOrStderr()), rep.WriteJSON(cmd.OutOrStdout()))
	}
	file, err := os.Create(f.jsonFile)
	if err != nil {
		err = fmt.Errorf("create report: %w", err)
	} else {
		err = errors.Join(rep.WriteJSON(file), file.Close())
	}
	// The table comes last, so that its last line is the output's last line.
	return errors.Join(err, rep.WriteText(cmd.OutOrStdout()))
}
