package main

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/vmm"
)

func newTemplateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "template",
		Aliases: []string{"templates"},
		Short:   "Build, list, inspect and remove templates",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newTemplateBuildCmd(),
		newTemplateListCmd(),
		newTemplateInspectCmd(),
		newTemplateRmCmd(),
	)
	return cmd
}

// withLauncher opens the store and gives f a way to get VMs. The host is opened
// only when f asks (QEMU may not be installed before), and closed, with all its
// VMs, when f returns.
func withLauncher(f func(*template.Store, func() (template.Launcher, error)) error) (err error) {
	store, err := template.Open("")
	if err != nil {
		return err
	}
	var host *vmm.Host
	defer func() {
		if host == nil {
			return
		}
		if cerr := host.Close(); cerr != nil && err == nil {
			err = fmt.Errorf("close VMM host: %w", cerr)
		}
	}()
	return f(store, func() (template.Launcher, error) {
		if host == nil {
			h, err := vmm.OpenHost(vmm.HostOptions{Logger: slog.Default()})
			if err != nil {
				return nil, err
			}
			host = h
		}
		return host, nil
	})
}

// completeTemplates completes the first argument with the names of templates.
func completeTemplates(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return templateNames(), cobra.ShellCompDirectiveNoFileComp
}

// templateNames lists the templates that are there, with what their clones share.
func templateNames() []string {
	store, err := template.Open("")
	if err != nil {
		return nil // completion has nowhere to complain
	}
	list, err := store.List()
	if err != nil {
		return nil
	}
	var names []string
	for _, t := range list {
		if t.Err == nil {
			names = append(names, cobra.CompletionWithDesc(t.Name, t.Manifest.Source.Kind()+", "+t.Manifest.Resident.String()+" shared"))
		}
	}
	return names
}
