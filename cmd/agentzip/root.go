package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/lmittmann/tint"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentzip/agentzip/internal/vmm"
)

// newRootCmd builds the whole command tree. Every call returns a fresh one.
func newRootCmd() *cobra.Command {
	var logLevel string
	root := &cobra.Command{
		Use:   "agentzip",
		Short: "Sandboxes for AI agents at a fraction of the memory",
		Long: `AgentZip clones microVM sandboxes from a template, compresses their private
pages while the agent waits for its model, and restores them on demand.

Start with:  agentzip doctor     does this machine have what it takes?
             agentzip setup      build the template of the demo
             agentzip demo       run the main job and print what it saved`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return setUpLog(cmd.ErrOrStderr(), logLevel)
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.PersistentFlags().StringVar(&logLevel, "log-level", "warn", "what to log on stderr: debug, info, warn, error")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError(fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath()))
	})
	root.AddCommand(
		newBenchCmd(),
		newCaptureCmd(),
		newDemoCmd(),
		newDoctorCmd(),
		newGuardCmd(),
		newKeyCmd(),
		newRunCmd(),
		newServeCmd(),
		newSetupCmd(),
		newTemplateCmd(),
		newVersionCmd(),
	)
	wrapArgs(root)
	return root
}

// wrapArgs turns cobra's complaints about positional arguments into usage
// errors (exit code 2), in the whole tree below c.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError(fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath()))
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

// setUpLog points slog's default logger at w: coloured on a terminal, plain in
// a file.
func setUpLog(w io.Writer, level string) error {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return usageError(fmt.Errorf("--log-level %q: use debug, info, warn or error", level))
	}
	slog.SetDefault(slog.New(tint.NewTextHandler(w, &tint.Options{
		Level:      l,
		TimeFormat: time.TimeOnly,
		NoColor:    !isTerminal(w),
	})))
	return nil
}

// isTerminal reports whether w is a terminal a person looks at.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// printJSON writes v as indented JSON, the form of every --json flag.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}

// oneLine folds an error of several lines (errors.Join, a compiler's output)
// into one, since a script reads the last line of stderr.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// stateDir is where templates and caches live.
func stateDir() string { return envOr("AGENTZIP_STATE_DIR", vmm.DefaultStateDir) }

func envOr(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}

// errNotRoot says why a verb that starts VMs cannot go on.
var errNotRoot = errors.New("not root: cgroups, userfaultfd and unprivileged VMMs need it; use sudo")

// requireRoot is the PreRunE of verbs that start VMs.
func requireRoot(*cobra.Command, []string) error {
	if os.Geteuid() != 0 {
		return errNotRoot
	}
	return nil
}
