package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/sandbox"
)

// runFailed is the exit code of `run` when the command's own is not known, as
// for docker run and chroot.
const runFailed = 125

// timedOut is the exit code of a command that --timeout ended, as for timeout(1).
const timedOut = 124

// signalBase is added to a signal's number, as shells do.
const signalBase = 128

// signalNumber finds a signal by the name that the guest tells, which is that of
// os.ProcessState; 0 if there is none. The guest runs on our own architecture.
func signalNumber(name string) int {
	name = strings.TrimSuffix(name, " (core dumped)")
	for n := 1; n <= 64; n++ {
		if syscall.Signal(n).String() == name {
			return n
		}
	}
	return 0
}

// runFlags are the flags of `run`, as given.
type runFlags struct {
	template      string
	user, cwd     string
	env           []string
	timeout       time.Duration
	isolation     string
	noCompression bool
	stdin         bool
	stats         bool
}

func newRunCmd() *cobra.Command {
	f := runFlags{}
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Clone a sandbox, run one command in it, and throw it away",
		Long: `Clones a sandbox from a template, runs COMMAND in it, streams its output and exits
with its code (124 if --timeout ended it, 128+N for signal N, 125 if agentzip itself
failed). A single argument with spaces is run as a shell line. The sandbox has no
network unless its template was built with one; nothing of it is left afterwards.`,
		Example: `  agentzip run -- uname -a
  agentzip run --template tornado --cwd /testbed -- 'git log --oneline | head -3'
  echo 'print(6*7)' | agentzip run -i -- python3 -`,
		Args:    cobra.MinimumNArgs(1),
		PreRunE: requireRoot,
		RunE: func(cmd *cobra.Command, args []string) error {
			command, err := f.command(cmd, args)
			if err != nil {
				return err
			}
			return f.run(cmd, command)
		},
	}
	fl := cmd.Flags()
	fl.SetInterspersed(false) // flags after COMMAND are COMMAND's
	fl.StringVarP(&f.template, "template", "t", "", "template to clone (default: the only one, or tornado)")
	fl.StringVarP(&f.user, "user", "u", "user", "account in the guest")
	fl.StringVarP(&f.cwd, "cwd", "w", "", "working folder in the guest (default: the account's home)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "NAME=VALUE for the command (repeatable)")
	fl.DurationVar(&f.timeout, "timeout", 0, "kill the command after this time, for example 30s (default: none)")
	fl.BoolVar(&f.noCompression, "no-compression", false, "leave the sandbox's memory alone")
	addIsolation(cmd, &f.isolation)
	fl.BoolVarP(&f.stdin, "interactive", "i", false, "pass standard input to the command")
	fl.BoolVar(&f.stats, "stats", false, "afterwards, say on stderr what memory the sandbox used and what the call waited for")
	if err := cmd.RegisterFlagCompletionFunc("template", completeTemplateFlag); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

// command turns flags and arguments into what the guest runs.
func (f *runFlags) command(cmd *cobra.Command, args []string) (guestlink.Command, error) {
	c := guestlink.Command{Cwd: f.cwd, User: f.user, Timeout: f.timeout, Env: map[string]string{}}
	if _, err := cohort.ParseIsolation(f.isolation); err != nil {
		return c, usageError(fmt.Errorf("--isolation: %w", err))
	}
	if f.timeout < 0 {
		return c, usageError(fmt.Errorf("--timeout %s: must not be negative", f.timeout))
	}
	for _, kv := range f.env {
		name, value, ok := strings.Cut(kv, "=")
		if !ok || name == "" {
			return c, usageError(fmt.Errorf("--env %q: use NAME=VALUE", kv))
		}
		c.Env[name] = value
	}
	if len(args) == 1 && strings.ContainsAny(args[0], " \t\n") {
		c.Shell = args[0]
	} else {
		c.Args = args
	}
	if f.stdin {
		c.Stdin = cmd.InOrStdin()
	}
	return c, nil
}

func (f *runFlags) run(cmd *cobra.Command, command guestlink.Command) (err error) {
	ctx := cmd.Context()
	var code int
	defer func() {
		switch {
		case err != nil:
			err = &exitError{code: runFailed, err: err}
		case code != 0:
			err = &exitError{code: code}
		}
	}()
	d, err := daemon.Open(daemon.Options{StateDir: stateDir(), LibDir: libDir(), Log: slog.Default()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	opts := daemon.CloneOptions{Template: f.template, Settings: &guestlink.Settings{Internet: new(true)}}
	if opts.Template == "" {
		if opts.Template, err = defaultTemplate(d); err != nil {
			return err
		}
	}
	if !f.noCompression {
		isolation, perr := cohort.ParseIsolation(f.isolation)
		if perr != nil {
			return perr
		}
		siblings, cerr := d.NewCohort(ctx, daemon.CohortOptions{Template: opts.Template, Isolation: isolation})
		if cerr != nil {
			return cerr
		}
		defer func() { err = errors.Join(err, siblings.Close()) }()
		opts.Cohort = siblings
	}
	sb, err := d.Clone(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sb.Close()) }()
	call, err := sb.Run(ctx, command, cmd.OutOrStdout(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	code = commandCode(call.Exit)
	if f.stats {
		return printRunStats(cmd.ErrOrStderr(), sb, call)
	}
	return nil
}

// commandCode is the exit code a shell would give.
func commandCode(e guestlink.Exit) int {
	switch {
	case e.TimedOut:
		return timedOut
	case e.Signal != "":
		if n := signalNumber(e.Signal); n != 0 {
			return signalBase + n
		}
		return runFailed
	case e.Code < 0:
		return runFailed
	}
	return e.Code
}

// printRunStats says what the call cost.
func printRunStats(w io.Writer, sb *sandbox.Sandbox, call sandbox.Call) error {
	u, err := sb.Usage()
	if err != nil {
		return err
	}
	t := sb.Timing()
	_, err = fmt.Fprintf(w, "agentzip: cloned in %d ms (QEMU %d, state %d); call %.2f s, of it %.1f ms waiting for %d faults; %s private, %s VMM heap\n",
		(t.Spawn + t.QMP + t.Load).Milliseconds(), (t.Spawn + t.QMP).Milliseconds(), t.Load.Milliseconds(),
		call.Duration.Seconds(), float64(call.Stall.Microseconds())/1e3, call.Faults, u.ResidentPrivate, u.VMMHeap)
	if err != nil {
		return fmt.Errorf("write statistics: %w", err)
	}
	return nil
}

// preferred is the template of `run` when there are several.
const preferred = "tornado"

// defaultTemplate picks the template when none was named.
func defaultTemplate(d *daemon.Daemon) (string, error) {
	list, err := d.Store().List()
	if err != nil {
		return "", err
	}
	if len(list) == 1 {
		return list[0].Name, nil
	}
	for _, t := range list {
		if t.Name == preferred {
			return t.Name, nil
		}
	}
	if len(list) == 0 {
		return "", errors.New("there is no template yet: run `agentzip setup`")
	}
	names := make([]string, len(list))
	for i, t := range list {
		names[i] = t.Name
	}
	return "", fmt.Errorf("there are several templates: pick one with --template (%s)", strings.Join(names, ", "))
}

// completeTemplateFlag completes names of templates in the store.
func completeTemplateFlag(cmd *cobra.Command, _ []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	return completeTemplates(cmd, nil, toComplete)
}
