package main

import "github.com/spf13/cobra"

func newBenchCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure parts of AgentZip: encoders on captured pages, restores in sandboxes",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newBenchCodecCmd(), newBenchSoakCmd(), newBenchRestoreCmd())
	return cmd
}
