package main

import (
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
)

// templateLine is one template in `template list --json`.
type templateLine struct {
	Name     string      `json:"name"`
	Source   string      `json:"source,omitempty"`
	Created  *time.Time  `json:"created,omitempty"`
	Memory   units.Bytes `json:"memory,omitempty"`   // of a guest
	Resident units.Bytes `json:"resident,omitempty"` // shared by all clones
	Disk     units.Bytes `json:"disk"`               // of the template's files
	Error    string      `json:"error,omitempty"`    // why it cannot be used
}

func newTemplateListCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the templates of this host",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := template.Open("")
			if err != nil {
				return err
			}
			list, err := store.List()
			if err != nil {
				return err
			}
			lines := make([]templateLine, 0, len(list)) // not nil: JSON says [], not null
			for _, t := range list {
				lines = append(lines, lineOf(t))
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), lines)
			}
			if len(lines) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "no templates yet; `agentzip setup` builds the demo's")
				return nil
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tSOURCE\tMEMORY\tSHARED\tDISK\tCREATED")
			for _, l := range lines {
				if l.Error != "" {
					fmt.Fprintf(w, "%s\tunusable: %s\n", l.Name, oneLine(l.Error))
					continue
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", l.Name, l.Source, l.Memory, l.Resident, l.Disk, l.Created.Local().Format(time.DateTime))
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func lineOf(t template.Summary) templateLine {
	l := templateLine{Name: t.Name, Disk: units.Bytes(t.Disk)}
	if t.Err != nil {
		l.Error = t.Err.Error()
		return l
	}
	m := t.Manifest
	l.Source, l.Created, l.Memory, l.Resident = m.Source.Kind(), &m.Created, m.Hardware.Memory, m.Resident
	return l
}
