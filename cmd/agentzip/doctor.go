package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/doctor"
)

func newDoctorCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Test whether this machine can run sandboxes",
		Long: `Tries everything that sandboxes need, in small, and says what works, what makes
them slower, and what is missing, each with the fix.

Exit code: 0 if sandboxes can run (ok or degraded), 1 if something is missing.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rep, err := doctor.Run(cmd.Context(), doctor.RealHost(stateDir(), libDir()))
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), rep)
			} else {
				err = rep.WriteText(cmd.OutOrStdout())
			}
			if err == nil && rep.Overall == doctor.Missing {
				err = errors.New("this machine lacks something that sandboxes need: see the lines marked missing")
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
