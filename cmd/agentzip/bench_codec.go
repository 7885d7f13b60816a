package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/bench/pagesets"
)

// benchCodecFlags are the flags of `bench codec`.
type benchCodecFlags struct {
	siblings  []int
	rows      []string
	recall    int
	publicRec int
	jsonFile  string
	plotFile  string
	benchFile string
}

func newBenchCodecCmd() *cobra.Command {
	f := benchCodecFlags{}
	cmd := &cobra.Command{
		Use:   "codec DIR",
		Short: "Measure how small and how fast pages become, on a capture",
		Long: `Replays the gaps of a capture (agentzip capture DIR) without VMs: every page that
changed is stored as in a pass of eviction, everything that is kept is counted after each
gap, and at the end every page is loaded and compared. One row for each encoder alone,
the paper's three, zswap-like zstd and LZ4, each addition of AgentZip, and AgentZip with
one part off. A page that comes back wrong is a failure (exit 1).

Times are of one core; on a busy machine compare rows of one run only. --bench writes
lines for benchstat.

The last line of stdout is for scripts and keeps its form:
  codec saved16=97.1% saved4=95.0% paper3=88.0% meta=3.2% enc_hit_pages_s=130000 enc_pages_s=31000 dec_p50_us=3.0 dec_zstd_p50_us=9.8 wrong=0`,
		Example: `  agentzip capture pages && agentzip bench codec pages
  agentzip bench codec pages --rows agentzip,paper --siblings 16 --json codec.json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args[0]) },
	}
	fl := cmd.Flags()
	fl.IntSliceVar(&f.siblings, "siblings", []int{0, 4}, "how many siblings; 0 is all. All rows for the first number, the main ones for the others")
	fl.StringSliceVar(&f.rows, "rows", nil, "only these rows (default: all)")
	fl.IntVar(&f.recall, "recall", 100, "compare the sketch index with brute force on so many pages (0: do not)")
	fl.IntVar(&f.publicRec, "recall-public", 10, "of them so many against template and root image too: a second a page")
	fl.StringVar(&f.jsonFile, "json", "", "write all figures as JSON to this file (-: to stdout, and the table to stderr)")
	fl.StringVar(&f.plotFile, "plot", "", "draw what each row keeps, as SVG, to this file")
	fl.StringVar(&f.benchFile, "bench", "", "write lines for benchstat to this file")
	if err := cmd.RegisterFlagCompletionFunc("rows", completeRows); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

func completeRows(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, r := range pagesets.Rows() {
		names = append(names, r.Name+"\t"+r.Note)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// jobs lists what is to be measured.
func (f *benchCodecFlags) jobs() (rows []pagesets.Row, counts []int, err error) {
	rows = pagesets.Rows()
	if len(f.rows) > 0 {
		rows = rows[:0:0]
		for _, name := range f.rows {
			r, ok := pagesets.RowNamed(name)
			if !ok {
				var names []string
				for _, r := range pagesets.Rows() {
					names = append(names, r.Name)
				}
				return nil, nil, usageError(fmt.Errorf("--rows %q: use some of %s", name, strings.Join(names, ", ")))
			}
			rows = append(rows, r)
		}
	}
	for _, n := range f.siblings {
		if n < 0 || n > 1000 {
			return nil, nil, usageError(fmt.Errorf("--siblings %d: use 0 (all) to 1000", n))
		}
	}
	if len(f.siblings) == 0 || f.recall < 0 || f.publicRec < 0 {
		return nil, nil, usageError(errors.New("--siblings needs a number, --recall and --recall-public must not be negative"))
	}
	return rows, f.siblings, nil
}

func (f *benchCodecFlags) run(cmd *cobra.Command, dir string) (err error) {
	rows, counts, err := f.jobs()
	if err != nil {
		return err
	}
	ctx, progress := cmd.Context(), cmd.ErrOrStderr()
	set, err := pagesets.Open(ctx, dir)
	if err != nil {
		return withHint(err, "make one with `agentzip capture DIR`")
	}
	defer func() { err = errors.Join(err, set.Close()) }()
	rep := set.NewReport(toolName())
	all := len(set.Info().Siblings)
	start := time.Now()
	done := map[string]bool{}
	for i, n := range counts {
		if n == 0 || n > all {
			n = all
		}
		for _, row := range rows {
			main := row.Name == pagesets.RowAll || row.Name == pagesets.RowPaper || row.Name == pagesets.RowZswap
			key := fmt.Sprintf("%s/%d", row.Name, n)
			if done[key] || i > 0 && !main {
				continue
			}
			done[key] = true
			res, err := set.Run(ctx, row, n)
			if err != nil {
				return fmt.Errorf("row %s: %w", row.Name, err)
			}
			rep.Results = append(rep.Results, res)
			note(progress, start, "%-12s %2d siblings  saved %5.2f %%  %6.0f pages/s  wrong %d", row.Name, n, 100*res.Saved, res.StoreRate(), res.Wrong)
		}
	}
	if f.recall > 0 && all > 1 && (len(f.rows) == 0 || slices.Contains(f.rows, pagesets.RowAll)) {
		if rep.Recall, err = set.Recall(ctx, f.recall, f.publicRec); err != nil {
			return err
		}
		note(progress, start, "recall of the sketch index: %.0f %%", 100*rep.Recall.Gain())
	}
	if err := f.write(cmd, rep); err != nil {
		return err
	}
	if n := rep.Wrong(); n > 0 {
		return fmt.Errorf("%d pages came back wrong: this must not happen; please report it with the capture", n)
	}
	return nil
}

// note prints a line of progress.
func note(w io.Writer, start time.Time, format string, args ...any) {
	_, _ = fmt.Fprintf(w, "%6.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...)) // progress only
}

func (f *benchCodecFlags) write(cmd *cobra.Command, rep *pagesets.Report) error {
	table := cmd.OutOrStdout()
	if f.jsonFile == "-" {
		table = cmd.ErrOrStderr()
		if err := rep.WriteJSON(cmd.OutOrStdout()); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		file  string
		write func(io.Writer) error
	}{{f.jsonFile, rep.WriteJSON}, {f.plotFile, rep.WritePlot}, {f.benchFile, rep.WriteBench}} {
		if x.file == "" || x.file == "-" {
			continue
		}
		if err := writeFile(x.file, x.write); err != nil {
			return err
		}
	}
	return rep.WriteText(table)
}

// writeFile creates a file and lets write fill it.
func writeFile(path string, write func(io.Writer) error) (err error) {
	out, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	return write(out)
}
