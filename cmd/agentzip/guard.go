package main

import (
	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/vmm"
)

// newGuardCmd is the process that outlives us by a moment: vmm starts it beside
// the VMs, and it removes what a killed agentzip leaves behind. Not for people.
func newGuardCmd() *cobra.Command {
	return &cobra.Command{
		Use:    vmm.GuardVerb + " RUNDIR",
		Short:  "Clean up after a killed agentzip (started by agentzip itself)",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE:   func(_ *cobra.Command, args []string) error { return vmm.GuardMain(args[0]) },
	}
}
