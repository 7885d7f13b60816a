// Package tool runs the external programs a template build needs (apt,
// mmdebstrap, mke2fs, dpkg-deb): bounded output, a clear error, and nothing left
// behind when the caller gives up.
//
// Each program runs in a process group and, where asked, a mount namespace of
// its own. When the context ends the group gets SIGTERM, after a grace period
// SIGKILL; mounts it made disappear with the namespace. If this process dies
// the program gets SIGTERM from the kernel.
package tool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// ErrMissing says that a program is not installed. Nothing was run.
var ErrMissing = errors.New("program is not installed")

// grace is what a cancelled program gets to clean up. Doubled, ctrl-C feels
// broken; halved, mmdebstrap leaves its folder to our own clean-up.
const grace = 5 * time.Second

// tailSize is how much of a program's error output an Error keeps.
const tailSize = 4 << 10

// Command describes one run.
type Command struct {
	Name   string
	Args   []string
	Dir    string
	Env    []string // added to a small fixed environment, not to ours
	Stdin  io.Reader
	Stdout io.Writer         // nil: goes where the error output goes
	OnLine func(line string) // called for each line of error output, from one goroutine
	// OwnMounts gives the program a mount namespace of its own.
	OwnMounts bool
}

// Error is a program that ran and failed.
type Error struct {
	Name string
	Code int    // exit code, -1 for a signal
	Tail string // the end of its error output, trimmed
}

// Error names the program, its exit code and its last line.
func (e *Error) Error() string {
	last := e.Tail
	if i := strings.LastIndexByte(last, '\n'); i >= 0 {
		last = last[i+1:]
	}
	if last == "" {
		return fmt.Sprintf("%s ended with code %d and said nothing", e.Name, e.Code)
	}
	return fmt.Sprintf("%s ended with code %d: %s", e.Name, e.Code, last)
}

// Have reports whether a program is in the search path.
func Have(name string) bool {
	_, err := lookPath(name)
	return err == nil
}

// searchPath is fixed: a user's PATH often lacks the sbin folders that hold mke2fs.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func lookPath(name string) (string, error) {
	if strings.ContainsRune(name, '/') {
		return name, nil
	}
	for dir := range strings.SplitSeq(searchPath, ":") {
		p := dir + "/" + name
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("run %s: %w", name, ErrMissing)
}

// Run runs the command to its end. Errors: ErrMissing, *Error, the context's.
func Run(ctx context.Context, c Command) error {
	path, err := lookPath(c.Name)
	if err != nil {
		return err
	}
	tail := &tailWriter{onLine: c.OnLine}
	cmd := exec.CommandContext(ctx, path, c.Args...) //nolint:gosec // G204: the callers name fixed programs
	cmd.Dir = c.Dir
	cmd.Stdin = c.Stdin
	cmd.Stdout = c.Stdout
	if c.Stdout == nil {
		cmd.Stdout = tail
	}
	cmd.Stderr = tail
	cmd.Env = append([]string{
		"PATH=" + searchPath, "LC_ALL=C.UTF-8", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "TZ=UTC",
	}, proxyEnv()...)
	cmd.Env = append(cmd.Env, c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if c.OwnMounts {
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = grace
	// The death signal is tied to the thread that forks: it must outlive the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	if cmd.Process != nil {
		// What outlived its leader (or the grace period) has no reason to live:
		// ESRCH, the usual answer, says that nothing did.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	tail.flush()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("run %s: %w", c.Name, ctx.Err())
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &Error{Name: c.Name, Code: exit.ExitCode(), Tail: strings.TrimSpace(tail.String())}
	}
	return fmt.Errorf("run %s: %w", c.Name, err)
}

// Output runs the command and returns what it wrote to its standard output, at most 16 MiB.
func Output(ctx context.Context, c Command) (string, error) {
	var out capped
	c.Stdout = &out
	err := Run(ctx, c)
	return out.buf.String(), err
}

// proxyEnv passes on the proxy settings a locked-down network needs.
func proxyEnv() []string {
	var env []string
	for _, k := range []string{"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		if v := os.Getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	return env
}

// capped is a buffer with a limit. The buffer is no embedded field: its ReadFrom would
// go round the limit.
type capped struct{ buf bytes.Buffer }

func (c *capped) Write(p []byte) (int, error) {
	if c.buf.Len()+len(p) > 16<<20 {
		return 0, errors.New("output is over 16 MiB")
	}
	return c.buf.Write(p)
}

// tailWriter keeps the last tailSize bytes and cuts the stream into lines. os/exec
// writes to it from one goroutine, since stdout and stderr are the same writer.
type tailWriter struct {
	onLine func(string)
	keep   []byte
	line   []byte
}

func (t *tailWriter) Write(p []byte) (int, error) {
	t.keep = append(t.keep, p...)
	if len(t.keep) > 2*tailSize {
		t.keep = append(t.keep[:0], t.keep[len(t.keep)-tailSize:]...)
	}
	if t.onLine == nil {
		return len(p), nil
	}
	for _, b := range p {
		if b != '\n' && b != '\r' {
			if len(t.line) < tailSize {
				t.line = append(t.line, b)
			}
			continue
		}
		t.flush()
	}
	return len(p), nil
}

func (t *tailWriter) flush() {
	if t.onLine != nil && len(t.line) > 0 {
		t.onLine(string(t.line))
	}
	t.line = t.line[:0]
}

func (t *tailWriter) String() string {
	if len(t.keep) > tailSize {
		return string(t.keep[len(t.keep)-tailSize:])
	}
	return string(t.keep)
}
