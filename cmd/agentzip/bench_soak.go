package main

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/bench/pagesets"
)

func newBenchSoakCmd() *cobra.Command {
	o := pagesets.SoakOptions{}
	cmd := &cobra.Command{
		Use:   "soak DIR",
		Short: "Store and load captured and mutated pages until one comes back wrong",
		Long: `Takes pages of a capture, changes some of their words, ranges and places, stores them in
one cohort from several workers, loads each later and compares all of it, while
dictionaries are trained and entries moved. A page that comes back wrong is a failure
(exit 1). A hundred million rounds take about an hour of two cores.

The last line of stdout is for scripts: soak rounds=100000000 wrong=0 pages_s=51000`,
		Example: "  agentzip bench soak pages --rounds 1e8",
		Args:    cobra.ExactArgs(1),
	}
	var rounds float64
	fl := cmd.Flags()
	fl.Float64Var(&rounds, "rounds", 1e7, "pages to store and load (1e8 may be written so)")
	fl.IntVar(&o.Workers, "workers", runtime.NumCPU(), "goroutines at once")
	fl.Uint64Var(&o.Seed, "seed", 1, "for what is mutated and how")
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		if rounds < 1 || rounds > 1e12 || o.Workers < 1 || o.Workers > 1024 {
			return usageError(fmt.Errorf("--rounds %g --workers %d: use 1 to 1e12 rounds and 1 to 1024 workers", rounds, o.Workers))
		}
		o.Rounds = int64(rounds)
		set, err := pagesets.Open(cmd.Context(), args[0])
		if err != nil {
			return withHint(err, "make one with `agentzip capture DIR`")
		}
		defer func() { err = errors.Join(err, set.Close()) }()
		start, last := time.Now(), time.Time{}
		o.Progress = func(r pagesets.SoakResult) {
			if time.Since(last) < 10*time.Second {
				return
			}
			last = time.Now()
			left := time.Duration(float64(r.Took) * float64(o.Rounds-r.Rounds) / float64(max(1, r.Rounds)))
			note(cmd.ErrOrStderr(), start, "%d of %d rounds, %.0f a second, wrong %d, %v left", r.Rounds, o.Rounds, float64(r.Rounds)/r.Took.Seconds(), r.Wrong, left.Round(time.Second))
		}
		res, err := set.Soak(cmd.Context(), o)
		out := cmd.OutOrStdout()
		for _, way := range slices.Sorted(maps.Keys(res.Ways)) {
			if _, err := fmt.Fprintf(out, "%-10s %12d pages\n", way, res.Ways[way]); err != nil {
				return err
			}
		}
		if _, perr := fmt.Fprintf(out, "refused    %12d pages (they do not shrink)\n\nsoak rounds=%d wrong=%d pages_s=%.0f\n", res.Refused, res.Rounds, res.Wrong, float64(res.Rounds)/max(0.001, res.Took.Seconds())); perr != nil {
			err = errors.Join(err, perr)
		}
		return err
	}
	return cmd
}
