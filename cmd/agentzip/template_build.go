package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/vmm"
)

// buildFlags are the flags of `template build`, as given.
type buildFlags struct {
	debian     []string
	setup      []string
	oci, dir   string
	memory     sizeFlag
	disk       sizeFlag
	vcpus      int
	accel, cpu string
	network    bool
	warmUp     []string
	workDir    string
	deadPages  string
	force      bool
	asJSON     bool
}

// deadPages are the words --dead-pages takes.
var deadPages = []string{
	string(template.DeadZero), string(template.DeadReport), string(template.DeadBoth), string(template.DeadOff),
}

func newTemplateBuildCmd() *cobra.Command {
	var f buildFlags
	cmd := &cobra.Command{
		Use:   "build NAME",
		Short: "Build a template from Debian packages, an OCI image or a folder",
		Long: `Makes a root image, boots it once, runs the warm-up commands and saves memory and
device state. Sandboxes are clones of that moment.

Without a source, NAME must be one of the built-in templates, which need no
further flags. A template whose inputs have not changed is not built again.`,
		Example: `  agentzip template build tornado
  agentzip template build py --debian python3,git --warm-up 'python3 -c "import json"'
  agentzip template build mine --oci ./image.tar --memory 1GiB
  agentzip template build tree --dir ./rootfs`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeBuiltins,
		PreRunE:           requireRoot,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := f.spec(cmd, args[0])
			if err != nil {
				return err
			}
			return withLauncher(func(store *template.Store, launcher func() (template.Launcher, error)) error {
				if spec.Launcher, err = launcher(); err != nil {
					return err
				}
				progress := newProgress(cmd.ErrOrStderr())
				defer progress.close()
				t, err := store.Build(cmd.Context(), spec, progress.event)
				if err != nil {
					return err
				}
				defer t.Close() //nolint:errcheck // only looked at
				if f.asJSON {
					return printJSON(cmd.OutOrStdout(), t.Manifest)
				}
				return nil
			})
		},
	}
	fl := cmd.Flags()
	fl.StringSliceVar(&f.debian, "debian", nil, "packages of a Debian root image (comma separated)")
	fl.StringArrayVar(&f.setup, "setup", nil, "shell script to run as root in the Debian image before it is cached (repeatable)")
	fl.StringVar(&f.oci, "oci", "", "OCI image: registry reference, layout folder or tarball")
	fl.StringVar(&f.dir, "dir", "", "folder with a root file system")
	fl.Var(&f.memory, "memory", "guest memory, for example 512MiB")
	fl.Var(&f.disk, "disk", "writable disk, sparse, for example 4GiB")
	fl.IntVar(&f.vcpus, "vcpus", 0, "virtual CPUs (default 1)")
	fl.StringVar(&f.accel, "accel", "", "tcg or kvm (default tcg; see agentzip doctor)")
	fl.StringVar(&f.cpu, "cpu", "", "QEMU CPU model (default max for tcg, host for kvm)")
	fl.BoolVar(&f.network, "network", false, "give clones a user-mode network")
	fl.StringArrayVar(&f.warmUp, "warm-up", nil, "shell command to run before the snapshot (repeatable)")
	fl.StringVar(&f.workDir, "workdir", "", "where warm-up commands start (default: the user's home)")
	fl.StringVar(&f.deadPages, "dead-pages", string(template.DefaultDeadPages),
		"pages the guest frees: zero (cleared by its kernel), report (through a balloon device), both, off")
	fl.BoolVar(&f.force, "force", false, "build even if nothing has changed")
	fl.BoolVar(&f.asJSON, "json", false, "print the manifest as JSON when done")
	return cmd
}

// spec turns name and flags into what the builder takes. Flags of a built-in
// template override its own values.
func (f *buildFlags) spec(cmd *cobra.Command, name string) (template.BuildSpec, error) {
	spec := template.BuildSpec{Name: name}
	sources := 0
	for _, flag := range []string{"debian", "oci", "dir"} {
		if cmd.Flags().Changed(flag) {
			sources++
		}
	}
	switch {
	case sources > 1:
		return spec, usageError(errors.New("give one of --debian, --oci and --dir, not several"))
	case len(f.debian) > 0:
		spec.Source.Debian = &rootfs.Debian{Suite: template.Suite, Packages: f.debian, Setup: f.setup}
	case f.oci != "":
		spec.Source.OCI = f.oci
	case f.dir != "":
		spec.Source.Directory = f.dir
	default:
		var err error
		if spec, err = template.Builtin(name); err != nil {
			return spec, usageError(withHint(err, "or give one of --debian, --oci and --dir"))
		}
	}
	if len(f.setup) > 0 && len(f.debian) == 0 {
		return spec, usageError(errors.New("--setup goes with --debian only"))
	}
	switch vmm.Accel(f.accel) {
	case "", vmm.TCG, vmm.KVM:
	default:
		return spec, usageError(fmt.Errorf("--accel %q: use tcg or kvm", f.accel))
	}
	if !slices.Contains(deadPages, f.deadPages) {
		return spec, usageError(fmt.Errorf("--dead-pages %q: use %s", f.deadPages, strings.Join(deadPages, ", ")))
	}
	flags := cmd.Flags()
	if flags.Changed("memory") {
		spec.Hardware.Memory = f.memory.bytes
	}
	if flags.Changed("disk") {
		spec.Disk = f.disk.bytes
	}
	if flags.Changed("warm-up") {
		spec.WarmUp = f.warmUp
	}
	if flags.Changed("workdir") {
		spec.WorkDir = f.workDir
	}
	spec.Hardware.VCPUs, spec.Hardware.Accel, spec.Hardware.CPU = f.vcpus, vmm.Accel(f.accel), f.cpu
	if flags.Changed("network") {
		spec.Hardware.Network = f.network
	}
	spec.DeadPages = template.DeadPages(f.deadPages)
	spec.Agent, spec.Force = libFile("agentzip-guest"), f.force
	return spec, nil
}

func completeBuiltins(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return template.BuiltinNames(), cobra.ShellCompDirectiveNoFileComp
}
