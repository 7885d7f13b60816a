package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
)

func newTemplateRmCmd() *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME...",
		Aliases:           []string{"remove"},
		Short:             "Remove templates that no sandbox uses",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeTemplates,
		RunE: func(_ *cobra.Command, args []string) error {
			store, err := template.Open("")
			if err != nil {
				return err
			}
			var errs []error
			for _, name := range args {
				errs = append(errs, store.Remove(name))
			}
			return errors.Join(errs...)
		},
	}
}
