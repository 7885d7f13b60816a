package main

import (
	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/cohort"
)

// addIsolation gives cmd the flag that says what the sandboxes of a run may share.
func addIsolation(cmd *cobra.Command, to *string) {
	cmd.Flags().StringVar(to, "isolation", cohort.Shared.String(),
		"what sandboxes share beside the template: cohort (equal and similar pages, dictionaries), strict (nothing)")
	if err := cmd.RegisterFlagCompletionFunc("isolation",
		cobra.FixedCompletions([]string{cohort.Shared.String(), cohort.Strict.String()}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is defined above
	}
}
