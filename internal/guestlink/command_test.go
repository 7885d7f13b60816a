package guestlink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestlink"
)

func TestACommandEndsAsItDidInTheGuest(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	for _, tc := range []struct {
		name           string
		cmd            guestlink.Command
		want           guestlink.Exit
		stdout, stderr string
	}{
		{name: "exit 0", cmd: sh("true")},
		{name: "exit 1", cmd: sh("exit 1"), want: guestlink.Exit{Code: 1, Error: "exit status 1"}},
		{name: "exit 255", cmd: sh("exit 255"), want: guestlink.Exit{Code: 255, Error: "exit status 255"}},
		{name: "both outputs", cmd: sh("echo out; echo err >&2"), stdout: "out\n", stderr: "err\n"},
		{name: "its own SIGKILL", cmd: sh("kill -9 $$"), want: guestlink.Exit{Code: -1, Signal: "killed", Error: "signal: killed"}},
		{name: "its own SIGTERM", cmd: sh("kill -15 $$"), want: guestlink.Exit{Code: -1, Signal: "terminated", Error: "signal: terminated"}},
		{name: "unknown command in a shell", cmd: sh("no-such-command 2>/dev/null"), want: guestlink.Exit{Code: 127, Error: "exit status 127"}},
		{
			name: "unknown program", cmd: guestlink.Command{Args: []string{"no-such-program", "x"}},
			want: guestlink.Exit{Code: 127, Error: "exit status 127"}, stderr: "no-such-program: 1: exec: no-such-program: not found\n",
		},
		{name: "a login shell", cmd: guestlink.Command{Shell: "shopt -q login_shell && echo login"}, stdout: "login\n"},
		{name: "a program of PATH with arguments", cmd: guestlink.Command{Args: []string{"printf", "%s|", "a b", "", "$c"}}, stdout: "a b||$c|"},
		{name: "home is where it starts", cmd: sh("pwd; echo $HOME"), stdout: g.home + "\n" + g.home + "\n"},
		{name: "cwd", cmd: guestlink.Command{Args: []string{"pwd"}, Cwd: "/usr"}, stdout: "/usr\n"},
		{name: "cwd with a tilde", cmd: guestlink.Command{Args: []string{"pwd"}, Cwd: "~"}, stdout: g.home + "\n"},
		{
			name:   "variables: the sandbox's, overridden by the command's",
			cmd:    guestlink.Command{Args: []string{"/bin/bash", "-c", "echo $SANDBOX $A"}, Env: map[string]string{"A": "b=c d", "SANDBOX": "no"}},
			stdout: "no b=c d\n",
		},
		{
			name: "nothing leaks from the agent's environment", cmd: guestlink.Command{Args: []string{"/usr/bin/env", "-0"}},
			stdout: fmt.Sprintf("HOME=%s\x00LOGNAME=%s\x00PATH=%s\x00SANDBOX=yes\x00USER=%s\x00", g.home, account(t, "").Name, os.Getenv("PATH"), account(t, "").Name),
		},
		{name: "stdin is empty unless given", cmd: guestlink.Command{Args: []string{"cat"}}},
		{name: "stdin", cmd: guestlink.Command{Args: []string{"cat"}, Stdin: strings.NewReader("in")}, stdout: "in"},
		{name: "stdout is blocking for the program", cmd: sh("sed -n 's/flags://p' /proc/self/fdinfo/1"), stdout: "\t01\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			got, err := c.Run(testContext(t), tc.cmd, &stdout, &stderr)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("exit (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.stdout, stdout.String()); diff != "" {
				t.Errorf("stdout (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.stderr, stderr.String()); diff != "" {
				t.Errorf("stderr (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatCannotBeStartedIsAnError(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	for _, tc := range []struct {
		name string
		cmd  guestlink.Command
		code connect.Code
		text string
	}{
		{"a missing working folder", guestlink.Command{Args: []string{"true"}, Cwd: "/no/such"}, connect.CodeInvalidArgument, "cwd '/no/such' does not exist"},
		{"a file as working folder", guestlink.Command{Args: []string{"true"}, Cwd: "/etc/passwd"}, connect.CodeInvalidArgument, "cwd '/etc/passwd' does not exist"},
		{"an unknown user", guestlink.Command{Args: []string{"true"}, User: "nobody-here"}, connect.CodeUnauthenticated, "invalid username: 'nobody-here'"},
		{"an argument with a zero byte", guestlink.Command{Args: []string{"echo", "a\x00b"}}, connect.CodeInvalidArgument, "must not contain NUL"},
		{"an argument longer than the kernel takes", guestlink.Command{Args: []string{"echo", strings.Repeat("x", 1<<18)}}, connect.CodeInvalidArgument, "argument list too long"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := c.Run(testContext(t), tc.cmd, nil, nil)
			if connect.CodeOf(err) != tc.code || !strings.Contains(fmt.Sprint(err), tc.text) {
				t.Errorf("got %v, want %v with %q", err, tc.code, tc.text)
			}
		})
	}
}

// slowWriter blocks until opened, then counts.
type slowWriter struct {
	entered chan struct{}
	open    chan struct{}
	once    sync.Once
	n       int
}

func (w *slowWriter) Write(p []byte) (int, error) {
	w.once.Do(func() { close(w.entered) })
	<-w.open
	w.n += len(p)
	return len(p), nil
}

func TestAFloodIsHeldBackByASlowReader(t *testing.T) { //nolint:paralleltest // it measures the heap
	g := startGuest(t, false)
	c := g.connect(t)
	const total = 10 << 20
	progress := filepath.Join(g.home, "progress")
	line := fmt.Sprintf("for i in $(seq %d); do head -c 65536 /dev/zero; echo $i > %s; done", total>>16, progress)

	w := &slowWriter{entered: make(chan struct{}), open: make(chan struct{})}
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	done := make(chan error, 1)
	go func() {
		exit, err := c.Run(testContext(t), sh(line), w, nil)
		if exit.Code != 0 {
			err = errors.Join(err, fmt.Errorf("exit %+v", exit))
		}
		done <- err
	}()
	<-w.entered
	stuck := settled(t, progress)
	runtime.ReadMemStats(&during)
	// Pipe 64 KiB, a chunk, the sockets of this test, the stream's window.
	if limit := 1 << 20; stuck<<16 > limit {
		t.Errorf("the command wrote %d bytes to a reader that reads nothing, want at most %d", stuck<<16, limit)
	}
	if grown := int64(during.HeapInuse) - int64(before.HeapInuse); grown > 8<<20 {
		t.Errorf("the heap of both ends grew by %d bytes", grown)
	}
	// Another command is not held up by it.
	if got := output(t, c, "echo alive"); got != "alive\n" {
		t.Errorf("beside the flood: %q", got)
	}
	close(w.open)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if w.n != total {
		t.Errorf("got %d bytes, want %d", w.n, total)
	}
}

// settled returns the number in a file once it has stopped changing.
func settled(t *testing.T, path string) int {
	t.Helper()
	last, since := -1, time.Now()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		b, _ := os.ReadFile(path)
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			continue
		}
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > 300*time.Millisecond {
			return n
		}
	}
	t.Fatal("the flood never stopped")
	return 0
}

func TestATimeoutKillsTheWholeGroup(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	cmd := sh("sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) & wait")
	cmd.Timeout = 400 * time.Millisecond
	var out bytes.Buffer
	begin := time.Now()
	exit, err := c.Run(testContext(t), cmd, &out, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(guestlink.Exit{Code: -1, Signal: "killed", TimedOut: true, Error: "timed out"}, exit); diff != "" {
		t.Errorf("exit (-want +got):\n%s", diff)
	}
	if took := time.Since(begin); took < cmd.Timeout || took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	pids := strings.Fields(out.String())
	if len(pids) != 2 {
		t.Fatalf("output before the timeout: %q, want two pids", out.String())
	}
	for _, pid := range pids {
		awaitDeath(t, pid)
	}
}

// awaitDeath waits until a process is gone (or is a zombie of somebody else).
func awaitDeath(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		b, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil || strings.Contains(string(b), ") Z ") {
			return
		}
	}
	t.Errorf("process %s still lives", pid)
}

func TestATimeoutEndsACommandThatLeftTheGroupWithItsPipes(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	cmd := sh("setsid sleep 5 & echo before; wait")
	cmd.Timeout = 300 * time.Millisecond
	var out bytes.Buffer
	begin := time.Now()
	exit, err := c.Run(testContext(t), cmd, &out, nil)
	if err != nil || !exit.TimedOut || out.String() != "before\n" {
		t.Errorf("got %+v, %v, output %q", exit, err, out.String())
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestABackgroundChildKeepsItsCommandOpenUnlessASignalEndedIt(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	begin := time.Now()
	if got := output(t, c, "(sleep 0.6; echo late) & echo early"); got != "early\nlate\n" {
		t.Errorf("output %q", got)
	}
	if took := time.Since(begin); took < 600*time.Millisecond {
		t.Errorf("took %v although a child held the pipe for longer", took)
	}
	begin = time.Now()
	var out bytes.Buffer
	exit, err := c.Run(testContext(t), sh("sleep 3 & echo early; kill -9 $$"), &out, nil)
	if err != nil || exit.Signal != "killed" || out.String() != "early\n" {
		t.Errorf("got %+v, %v, output %q", exit, err, out.String())
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %v although a signal ended the command", took)
	}
}

func TestACallerThatLeavesTakesItsCommandAlong(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		leave func(context.Context) (context.Context, context.CancelFunc)
		want  error
	}{
		{"by cancelling", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(300*time.Millisecond, cancel)
			return ctx, cancel
		}, context.Canceled},
		{"by a deadline", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 300*time.Millisecond)
		}, context.DeadlineExceeded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := startGuest(t, false)
			c := g.connect(t)
			ctx, cancel := tc.leave(testContext(t))
			defer cancel()
			var out bytes.Buffer
			begin := time.Now()
			_, err := c.Run(ctx, sh("echo $$; sleep 1000 & echo $!; wait"), &out, nil)
			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if took := time.Since(begin); took > 3*time.Second {
				t.Errorf("took %v", took)
			}
			for pid := range strings.FieldsSeq(out.String()) {
				awaitDeath(t, pid)
			}
			if got := output(t, c, "echo next"); got != "next\n" {
				t.Errorf("the link afterwards: %q", got)
			}
		})
	}
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

func TestAWriterThatFailsEndsTheCommand(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	full := errors.New("disk full")
	if _, err := c.Run(testContext(t), sh("yes"), brokenWriter{full}, nil); !errors.Is(err, full) {
		t.Errorf("got %v, want %v", err, full)
	}
	if !g.server.Drain(5 * time.Second) {
		t.Error("the command still runs")
	}
}

func TestStdinFlowsAndItsEndIsSeen(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	content := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16) // 1 MiB
	cmd := guestlink.Command{Args: []string{"cat"}, Stdin: bytes.NewReader(content)}
	var out bytes.Buffer
	if _, err := c.Run(testContext(t), cmd, &out, nil); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), content) {
		t.Errorf("%d bytes came back, want the %d sent", out.Len(), len(content))
	}
	// A command that does not read its stdin ends when it wants to.
	cmd = guestlink.Command{Args: []string{"sleep", "0.3"}, Stdin: endless{}}
	if exit, err := c.Run(testContext(t), cmd, nil, nil); err != nil || exit.Code != 0 {
		t.Errorf("with endless stdin: %+v, %v", exit, err)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestManyCommandsAtOnceKeepTheirOutputsApart(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			var out bytes.Buffer
			exit, err := c.Run(testContext(t), sh(fmt.Sprintf("for i in 1 2 3; do echo %d; done; exit %d", i, i)), &out, nil)
			want := strings.Repeat(fmt.Sprintln(i), 3)
			if err != nil || exit.Code != i || out.String() != want {
				t.Errorf("command %d: %+v, %v, %q", i, exit, err, out.String())
			}
		})
	}
	all.Wait()
}

func TestCommandsRunAsTheUserAsked(t *testing.T) {
	t.Parallel()
	if unix.Getuid() != 0 {
		t.Skip("needs root to become another user")
	}
	g := startRealUsers(t)
	c := g.connect(t)
	var out bytes.Buffer
	cmd := sh("id -u; id -g; id -G; echo $USER; grep -c . /proc/self/oom_score_adj")
	cmd.User, cmd.Cwd = "daemon", "/"
	if exit, err := c.Run(testContext(t), cmd, &out, nil); err != nil || exit.Code != 0 {
		t.Fatalf("%+v, %v", exit, err)
	}
	if want := "1\n1\n1\ndaemon\n1\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
	// What the user may not enter is said so.
	cmd.Cwd = g.home
	if err := os.Chmod(g.home, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Run(testContext(t), cmd, nil, nil); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("in another user's folder: %v, want permission_denied", err)
	}
}
