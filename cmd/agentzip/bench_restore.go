package main

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/bench/restores"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/traj"
)

// restoreGapScale stretches thinking times as emulation stretches calls, 10-20 times: so a
// sandbox waits for its model as large a part of the time as on hardware.
const restoreGapScale = 10

// Sizes of `bench restore --quick`: below 90 s, for counts. Its times say little.
const (
	quickSandboxes = 4
	quickCalls     = 6
	quickGapScale  = 0.5
)

// The ablation's runs are short, because there are many: what a prefetcher is worth shows
// after a few calls.
const (
	ablationSandboxes = 4
	ablationCalls     = 8
	ablationGapScale  = 1
)

// stormRounds is how often the sandboxes of the storm wake: a p99 of a few dozen faults is
// their maximum, of five times as many it is not.
const stormRounds = 5

// benchRestoreFlags are the flags of `bench restore`, as given.
type benchRestoreFlags struct {
	jobFlags
	modes     string
	native    string
	isolation string
	quick     bool
	ablation  string
	signals   string
	storm     int
	idle      int
	jsonFile  string
	plotFile  string
}

func newBenchRestoreCmd() *cobra.Command { return (&benchRestoreFlags{}).command() }

// command is the command that fills f.
func (f *benchRestoreFlags) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Measure what restoring pages costs those who wait for them",
		Long: `Replays the main job without and with compression, as demo does, and says what the
restores of pages cost: the distributions, the stall of each call and where it comes from.

Thinking times are stretched by --gap-scale, because emulation stretches calls.

--quick makes everything short, for counts of faults and pages: times need an idle machine
and full length.

The last line of stdout is for scripts and keeps its form:
  restore block_p50_us=45 block_p99_us=600 block_max_us=4000 prefetch_page_p50_us=4 stall_p50_ms=0.4 stall_p99_ms=12 latency=1.02x native=1.06x saved=95.1% coverage=93% accuracy=78% cancel_p99_us=400 idle_mb=11.5 idle_kvm_mb=5.2`,
		Example: `  agentzip bench restore
  agentzip bench restore --quick --modes on
  agentzip bench restore --trajectories recorded/ --match aiohttp --max-calls 20 --json restore.json.gz`,
		Args:    cobra.NoArgs,
		PreRunE: requireRoot,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.shorten(cmd)
			return f.run(cmd)
		},
	}
	f.add(cmd, 16, restoreGapScale)
	fl := cmd.Flags()
	fl.StringVar(&f.modes, "modes", "off,on", "the runs of the job: off,on or on,off (a pair), or only on")
	fl.StringVar(&f.native, "native", "auto", "also time the commands on this host without a VM: on, off, auto (our own scenario only)")
	addIsolation(cmd, &f.isolation)
	fl.BoolVar(&f.quick, "quick", false, fmt.Sprintf("short: %d sandboxes, %d calls, gaps x %g unless given, only the runs of the job", quickSandboxes, quickCalls, quickGapScale))
	fl.StringVar(&f.ablation, "ablation", "on", "also short runs without each prefetcher, and without any: on, off")
	fl.StringVar(&f.signals, "signals", "off", "announce each call when its tool was known, with the recorded lead or one drawn for its kind: on, off")
	fl.IntVar(&f.storm, "storm", 8, "also wake so many compressed sandboxes at the same instant (0: do not)")
	fl.IntVar(&f.idle, "idle", 64, "also say what each of so many idle sandboxes occupies (0: do not)")
	fl.StringVar(&f.plotFile, "plot", "", "draw the distributions, as SVG, to this file")
	fl.StringVar(&f.jsonFile, "json", "", "write all figures as JSON to this file, compressed if it ends in .gz")
	for name, complete := range map[string]cobra.CompletionFunc{
		"modes":    cobra.FixedCompletions([]string{"off,on", "on,off", "on"}, cobra.ShellCompDirectiveNoFileComp),
		"native":   cobra.FixedCompletions([]string{"auto", "on", "off"}, cobra.ShellCompDirectiveNoFileComp),
		"signals":  cobra.FixedCompletions([]string{"on", "off"}, cobra.ShellCompDirectiveNoFileComp),
		"ablation": cobra.FixedCompletions([]string{"on", "off"}, cobra.ShellCompDirectiveNoFileComp),
	} {
		if err := cmd.RegisterFlagCompletionFunc(name, complete); err != nil {
			panic(err) // the flags are defined above
		}
	}
	return cmd
}

// shorten sets what --quick implies and was not given.
func (f *benchRestoreFlags) shorten(cmd *cobra.Command) {
	if !f.quick {
		return
	}
	given := cmd.Flags().Changed
	if !given("sandboxes") {
		f.sandboxes = quickSandboxes
	}
	if !given("max-calls") {
		f.maxCalls = quickCalls
	}
	if !given("gap-scale") {
		f.gapScale = quickGapScale
	}
	if !given("native") {
		f.native = "off"
	}
	if !given("ablation") {
		f.ablation = "off"
	}
	if !given("storm") {
		f.storm = 0
	}
	if !given("idle") {
		f.idle = 0
	}
}

// check refuses flags that make no sense, before anything is started.
func (f *benchRestoreFlags) check() error {
	switch {
	case f.modes != "off,on" && f.modes != "on,off" && f.modes != "on":
		return usageError(fmt.Errorf("--modes %q: use off,on or on,off or on", f.modes))
	case f.native != "auto" && f.native != "on" && f.native != "off":
		return usageError(fmt.Errorf("--native %q: use auto, on or off", f.native))
	case f.ablation != "on" && f.ablation != "off":
		return usageError(fmt.Errorf("--ablation %q: use on or off", f.ablation))
	case f.signals != "on" && f.signals != "off":
		return usageError(fmt.Errorf("--signals %q: use on or off", f.signals))
	case f.storm < 0 || f.storm > 256 || f.idle < 0 || f.idle > 1024:
		return usageError(errors.New("--storm takes 0 to 256 sandboxes, --idle 0 to 1024"))
	}
	if _, err := cohort.ParseIsolation(f.isolation); err != nil {
		return usageError(fmt.Errorf("--isolation: %w", err))
	}
	return f.jobFlags.check()
}

func (f *benchRestoreFlags) run(cmd *cobra.Command) (err error) {
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
	cfg := f.config(j, isolation)
	if f.native == "on" || f.native == "auto" && f.trajectories == "" {
		cfg.Main.NativeReplay = nativeReplay(ctx, j.template.RootFile(), j.plans)
	}
	rep, err := restores.Measure(ctx, cfg)
	j.display.Close()
	if rep == nil {
		return err
	}
	f.label(rep.Main, j, cfg.Main.NativeReplay != nil)
	return errors.Join(err, f.write(cmd, rep))
}

// config says what is measured.
func (f *benchRestoreFlags) config(j *job, isolation cohort.Isolation) restores.Config {
	options := daemon.FleetOptions{Template: f.template, Isolation: isolation}
	cfg := restores.Config{
		Main: bench.Config{
			Fleet: j.daemon.Fleets(options), Sandboxes: j.plans, GapScale: f.gapScale, MaxGap: f.maxGap, Display: j.display, Alone: f.modes == "on", Signals: f.signals == "on",
		},
		Fleet: func(v restores.Variant) bench.FleetFactory {
			o := options
			o.NoPrefetch, o.Without = v.NoPrefetch, v.Without
			return j.daemon.Fleets(o)
		},
		Colony: j.daemon.Colonies(options),
		Storm:  restores.Storm{Sandboxes: f.storm, Rounds: stormRounds, Step: restores.PickStep(j.plans, traj.Python, traj.Test)},
		Idle:   restores.Idle{Sandboxes: f.idle, Step: restores.PickStep(j.plans)},
		Cores:  runtime.NumCPU(),
	}
	if strings.HasPrefix(f.modes, "on") {
		cfg.Main.First = bench.On
	}
	if f.ablation == "on" {
		cfg.Ablation = restores.Ablation{
			Variants: restores.Variants(),
			Plans:    shortPlans(j.plans, ablationSandboxes, ablationCalls), GapScale: min(f.gapScale, ablationGapScale),
		}
	}
	return cfg
}

// shortPlans are the first calls of the first sandboxes.
func shortPlans(plans []bench.Plan, sandboxes, calls int) []bench.Plan {
	short := slices.Clone(plans[:min(len(plans), sandboxes)])
	for i := range short {
		steps := &short[i].Trajectory.Steps
		*steps = (*steps)[:min(len(*steps), calls)]
	}
	return short
}

// write stores the JSON and prints the table, whose last line is the output's last line.
func (f *benchRestoreFlags) write(cmd *cobra.Command, rep *restores.Report) error {
	var err error
	if f.jsonFile != "" {
		err = writeFile(f.jsonFile, func(w io.Writer) error {
			if strings.HasSuffix(f.jsonFile, ".gz") {
				return rep.WriteGzip(w)
			}
			return rep.WriteJSON(w)
		})
	}
	if f.plotFile != "" {
		err = errors.Join(err, writeFile(f.plotFile, rep.WritePlot))
	}
	return errors.Join(err, rep.WriteText(cmd.OutOrStdout()))
}
