package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
)

func newTemplateInspectCmd() *cobra.Command {
	var asJSON, verify bool
	cmd := &cobra.Command{
		Use:               "inspect NAME",
		Short:             "Show what a template was made of, and check that it is whole",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeTemplates,
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := template.Open("")
			if err != nil {
				return err
			}
			if verify {
				t, err := store.Load(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				defer t.Close() //nolint:errcheck // only looked at
			}
			m, err := store.Inspect(args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), m)
			}
			return writeManifest(cmd.OutOrStdout(), m)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the manifest as JSON")
	cmd.Flags().BoolVar(&verify, "verify", true, "compare every file with its digest, and the template with this host")
	return cmd
}

// writeManifest prints a manifest for people; its lists are cut to their length.
func writeManifest(out io.Writer, m *template.Manifest) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("name", "%s", m.Name)
	row("created", "%s", m.Created.Local().Format(time.DateTime))
	row("source", "%s (%s)", m.Source.Kind(), m.Source.Digest)
	row("guest", "%s, %d vCPU, %s", m.Hardware.Memory, m.Hardware.VCPUs, m.Hardware.Accel)
	row("shared memory", "%s", m.Resident)
	row("dead pages", "%s", m.DeadPages.Mode())
	row("kernel", "%s (%s %s)", m.Kernel.Release, m.Kernel.Package, m.Kernel.Version)
	row("built with", "QEMU %s", m.Host.QEMU)
	row("packages", "%d", len(m.Packages))
	row("warm-up", "%s", strings.Join(m.WarmUp, "\n\t"))
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		row("file", "%s, %s", name, units.Bytes(m.Files[name].Size))
	}
	return w.Flush()
}
