package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/units"
)

// captureGapScale keeps thinking times short: nothing happens in them that would change a
// page. At 0 all sandboxes would run in step with the slowest of the two cores.
const captureGapScale = 0.1

func newCaptureCmd() *cobra.Command {
	f := jobFlags{}
	cmd := &cobra.Command{
		Use:   "capture DIR",
		Short: "Write the private pages of siblings at every gap to a folder",
		Long: `Replays the main job in sandboxes of one cohort, without compression, and writes what
each of them holds after every call to DIR: all private pages, with the content of those
that changed since the gap before, and the template's memory and root image beside them.
Benchmarks replay such a page set without virtual machines.

DIR must not exist. It appears when everything is in it: after Ctrl-C or an error there is
no DIR, and a full disk is an error. It holds what the agents had in memory: treat it as
you would treat their files.

Agents and their flags are those of ` + "`agentzip demo`" + `. The last line of stdout is for scripts:
  capture dir=DIR siblings=16 gaps=204 private=1105233 changed=301224 bytes=261095424 seconds=310`,
		Example: `  agentzip capture pages
  agentzip capture pages --trajectories recorded/ --match tornado --max-calls 20`,
		Args:    cobra.ExactArgs(1),
		PreRunE: requireRoot,
		RunE:    func(cmd *cobra.Command, args []string) error { return runCapture(cmd, f, args[0]) },
	}
	f.add(cmd, 16, captureGapScale)
	return cmd
}

func runCapture(cmd *cobra.Command, f jobFlags, dir string) (err error) {
	if err := f.check(); err != nil {
		return err
	}
	j, err := f.open(cmd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.daemon.Close()) }()
	for _, n := range j.notes {
		j.display.Event(n)
	}
	info, err := j.daemon.Capture(cmd.Context(), daemon.CaptureOptions{
		Dir: dir, Template: f.template, Plans: j.plans, GapScale: f.gapScale, MaxGap: f.maxGap,
		Tool: toolName(), Source: f.source(), Display: j.display,
	})
	j.display.Close()
	if err != nil {
		return err
	}
	return writeCapture(cmd.OutOrStdout(), dir, &info)
}

// writeCapture prints what was captured.
func writeCapture(w io.Writer, dir string, info *capture.Info) error {
	private, changed, gone := info.Totals()
	share := 100 * float64(changed) / cmp.Or(float64(private), 1)
	_, err := fmt.Fprintf(w, `template   %s, %v of memory, of it %v that is not zero; root image %v
siblings   %d, %d gaps
pages      %d private over all gaps, %d of them (%.1f %%) new or changed, %d gone
folder     %s: %v (memory %v, root image %v, pages %v)

capture dir=%s siblings=%d gaps=%d private=%d changed=%d bytes=%d seconds=%.0f
`,
		info.Template.Name, info.Memory.Size, units.Bytes(info.Memory.Pages)*units.PageSize, info.Root.Size,
		len(info.Siblings), len(info.Gaps), private, changed, share, gone,
		dir, info.Bytes(), units.Bytes(info.Memory.Length), units.Bytes(info.Root.Length),
		info.Bytes()-units.Bytes(info.Memory.Length+info.Root.Length),
		dir, len(info.Siblings), len(info.Gaps), private, changed, info.Bytes(), info.Wall.Seconds())
	if err != nil {
		return fmt.Errorf("print what was captured: %w", err)
	}
	return nil
}
