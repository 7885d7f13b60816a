package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"agentzip": main})
}

// The transcripts of testdata/script run the command as a person would, each
// with a state folder of its own.
func TestTranscripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("AGENTZIP_STATE_DIR", env.WorkDir+"/state")
			env.Setenv("AGENTZIP_RUN_DIR", env.WorkDir+"/run")
			env.Setenv("AGENTZIP_LIBDIR", env.WorkDir+"/lib")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"exit": exitsWith},
		Condition: func(cond string) (bool, error) {
			if cond == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %q", cond)
		},
	})
}

// exitsWith runs `exit CODE PROGRAM ARGS...` and compares the exit code, which
// `! exec` alone does not tell.
func exitsWith(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	if err != nil {
		got = strings.TrimPrefix(err.Error(), "exit status ")
	}
	if got != args[0] {
		ts.Fatalf("%s exited with %s, want %s", strings.Join(args[1:], " "), got, args[0])
	}
}

func TestEveryVerbHasHelpAndIsInOrder(t *testing.T) {
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short help %q, want a clause without a full stop", c.CommandPath(), c.Short)
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(newRootCmd())
}

func TestExitCodesAndErrorLinesFollowFromTheError(t *testing.T) {
	interrupted, cancel := context.WithCancelCause(t.Context())
	cancel(errInterrupted{syscall.SIGTERM})
	tests := []struct {
		name string
		ctx  context.Context
		err  error
		code int
		line string
	}{
		{"no error", t.Context(), nil, 0, ""},
		{"any error is 1", t.Context(), errors.New("disk full"), 1, "agentzip: disk full"},
		{"usage is 2", t.Context(), usageError(errors.New("no such flag")), 2, "agentzip: no such flag"},
		{"a hint follows the reason", t.Context(), withHint(errors.New("disk full"), "free some"), 1, "agentzip: disk full: free some"},
		{"several errors are one line", t.Context(), errors.Join(errors.New("a"), errors.New("b")), 1, "agentzip: a; b"},
		{"a guest's exit code is passed on in silence", t.Context(), &exitError{code: 77}, 77, ""},
		{
			"SIGTERM is 143", interrupted, fmt.Errorf("boot: %w", context.Canceled), 143,
			"agentzip: interrupted by terminated; everything it had started is stopped",
		},
		{"an error while being interrupted is still told", interrupted, errors.New("cgroup is busy"), 143, "agentzip: cgroup is busy"},
		{"a guest's code beats the signal", interrupted, &exitError{code: 3}, 3, ""},
		{"a verb that finished in spite of the signal succeeded", interrupted, nil, 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := exitCode(tt.ctx, tt.err); got != tt.code {
				t.Errorf("exit code %d, want %d", got, tt.code)
			}
			if got := errorLine(tt.ctx, tt.err); got != tt.line {
				t.Errorf("line %q, want %q", got, tt.line)
			}
		})
	}
}

func TestASignalCancelsTheContextWithItsName(t *testing.T) {
	ctx, stop := withSignals(t.Context())
	defer stop()
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the context lives on")
	}
	if got := exitCode(ctx, ctx.Err()); got != 130 {
		t.Errorf("exit code %d, want 130", got)
	}
}

func TestSizesNeedAUnit(t *testing.T) {
	tests := []struct {
		text string
		want units.Bytes // 0: refused
	}{
		{"512MiB", 512 * units.MiB},
		{"1GiB", units.GiB},
		{"4G", 4 * units.GiB},
		{"64K", 64 * units.KiB},
		{"512", 0},
		{"-1GiB", 0},
		{"0MiB", 0},
		{"1.5GiB", 0},
		{"GiB", 0},
		{"", 0},
		{"9999999999GiB", 0},
		{"1MB", 0},
	}
	for _, tt := range tests {
		var s sizeFlag
		err := s.Set(tt.text)
		if (err == nil) != (tt.want != 0) || s.bytes != tt.want {
			t.Errorf("%q: got %d (%v), want %d", tt.text, s.bytes, err, tt.want)
		}
	}
}

// build plays a build of two steps with two events in the same moment and one
// after a pause.
func build(p *progress, pause func()) {
	p.event(template.Event{Step: "boot", Message: "starting"})
	p.event(template.Event{Step: "boot", Message: "agent answers", Done: 1, Total: 4})
	pause()
	p.event(template.Event{Step: "boot", Message: "warming\nup", Done: 2, Total: 4})
	p.event(template.Event{Step: "boot", Message: "ready", Finished: true})
	p.event(template.Event{Step: "save", Message: "74 MiB"})
	p.close()
}

func TestProgressInAFileIsALineNowAndThen(t *testing.T) {
	var out bytes.Buffer
	now := time.Now()
	p := newProgress(&out)
	p.now = func() time.Time { return now }
	build(p, func() { now = now.Add(plainInterval) })
	want := "boot         starting\nboot          50% warming; up\nboot         ready\nsave         74 MiB\n"
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("lines (-want +got):\n%s", d)
	}
}

func TestProgressOnATerminalRewritesOneLineAStep(t *testing.T) {
	var out bytes.Buffer
	p := newProgress(&out)
	p.width = 24
	build(p, func() {})
	want := "\r\x1b[Kboot         starting" +
		"\r\x1b[Kboot          25% agent" +
		"\r\x1b[Kboot          50% warmi" +
		"\r\x1b[Kboot         ready\n" +
		"\r\x1b[Ksave         74 MiB\n"
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("screen (-want +got):\n%s", d)
	}
}

func TestRevisionComesFromWhatGoRecorded(t *testing.T) {
	if v := readVersion(); v.Revision == "" || v.Go == "" {
		t.Errorf("version %+v has holes", v)
	}
}
