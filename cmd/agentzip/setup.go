package main

import (
	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
)

// demoTemplate is the built-in template that the demo and the tests clone.
const demoTemplate = "tornado"

func newSetupCmd() *cobra.Command {
	var names []string
	cmd := &cobra.Command{
		Use:   "setup",
		Short: "Make this machine ready: packages and templates",
		Long: `Installs what is missing of QEMU, mmdebstrap and e2fsprogs, and builds templates.
What is done already is skipped.`,
		Args:    cobra.NoArgs,
		PreRunE: requireRoot,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range names {
				if _, err := template.Builtin(name); err != nil {
					return usageError(err)
				}
			}
			return withLauncher(func(store *template.Store, launcher func() (template.Launcher, error)) error {
				progress := newProgress(cmd.ErrOrStderr())
				defer progress.close()
				return store.Setup(cmd.Context(), template.SetupOptions{
					Templates: names,
					Launcher:  launcher,
					Agent:     libFile("agentzip-guest"),
				}, progress.event)
			})
		},
	}
	cmd.Flags().StringSliceVar(&names, "template", []string{demoTemplate}, "built-in templates to build (comma separated; empty for none)")
	_ = cmd.RegisterFlagCompletionFunc("template", completeBuiltins) // fails only for an unknown flag
	return cmd
}
