package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/vmm"
)

// A cli is one `agentzip` with a run root of its own.
type cli struct {
	path    string
	runRoot string
	cmd     *exec.Cmd
	said    bytes.Buffer
	ended   chan struct{}
	guarded bool // there was a guard when the blow fell, and it lived on
}

func startCLI(t *testing.T, args ...string) *cli {
	t.Helper()
	lib := os.Getenv("AGENTZIP_LIBDIR")
	if lib == "" {
		t.Skip("AGENTZIP_LIBDIR is not set: run `make test`")
	}
	c := &cli{path: filepath.Join(lib, "agentzip"), runRoot: filepath.Join(t.TempDir(), "run"), ended: make(chan struct{})}
	c.cmd = c.command(args...)
	c.cmd.Stdout, c.cmd.Stderr = &c.said, &c.said
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = c.cmd.Wait(); close(c.ended) }()
	t.Cleanup(func() { _ = c.cmd.Process.Kill(); <-c.ended })
	return c
}

func (c *cli) command(args ...string) *exec.Cmd {
	cmd := exec.Command(c.path, args...)
	cmd.Env = append(os.Environ(), "AGENTZIP_RUN_DIR="+c.runRoot)
	return cmd
}

// processes returns what runs for c besides itself, by pid: its VMMs and its guard.
func (c *cli) processes(t *testing.T) map[int]string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	group := fmt.Sprintf("agentzip/%d-", c.cmd.Process.Pid)
	found := map[int]string{}
	for _, name := range names {
		dir := filepath.Dir(name)
		pid, _ := strconv.Atoi(filepath.Base(dir))
		line, _ := os.ReadFile(name)
		groups, _ := os.ReadFile(dir + "/cgroup")
		stat, _ := os.ReadFile(dir + "/stat")
		ours := strings.Contains(string(line), c.runRoot+"/") || strings.Contains(string(groups), group)
		if ours && !strings.Contains(string(stat), ") Z ") {
			found[pid] = strings.ReplaceAll(string(line), "\x00", " ")
		}
	}
	return found
}

// left returns all that the host still has of c.
func (c *cli) left(t *testing.T) []string {
	t.Helper()
	var left []string
	for pid, line := range c.processes(t) {
		left = append(left, fmt.Sprintf("process %d %.60s", pid, line))
	}
	id := fmt.Sprintf("%d-*", c.cmd.Process.Pid)
	state := stateRoot()
	for _, pattern := range []string{
		filepath.Join(c.runRoot, "*"), filepath.Join(state, "run", id), "/sys/fs/cgroup/agentzip/" + id,
		"/sys/fs/cgroup/*/agentzip/" + id, "/dev/shm/*agentzip*",
	} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, names...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, name := range backing {
		b, _ := os.ReadFile(name)
		mounts = append(mounts, b...)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, c.runRoot) || strings.Contains(line, fmt.Sprintf("%s/run/%d-", state, c.cmd.Process.Pid)) {
			left = append(left, strings.TrimSpace(line))
		}
	}
	return left
}

func stateRoot() string {
	if dir := os.Getenv("AGENTZIP_STATE_DIR"); dir != "" {
		return dir
	}
	return vmm.DefaultStateDir
}

// A victim is what a test kills.
type victim string

const (
	theProcess victim = "agentzip"
	theVMM     victim = "a VMM"
	theShim    victim = "a shim's socket"
	theGuard   victim = "the guard"
	both       victim = "agentzip and the guard"
)

// strike kills the victim and reports whether it was there.
func (c *cli) strike(t *testing.T, v victim) (hit bool) {
	t.Helper()
	if v == both {
		// Stopped first, it cannot replace the guard.
		_ = c.cmd.Process.Signal(unix.SIGSTOP)
	}
	for pid, line := range c.processes(t) {
		isGuard := strings.Contains(line, vmm.GuardVerb)
		c.guarded = c.guarded || isGuard && v != both
		switch {
		case pid == c.cmd.Process.Pid:
		case isGuard && (v == theGuard || v == both):
			hit = unix.Kill(pid, unix.SIGKILL) == nil
		case !isGuard && v == theVMM && !hit:
			hit = unix.Kill(pid, unix.SIGKILL) == nil
		case !isGuard && v == theShim && !hit:
			hit = cutShim(pid)
		}
	}
	if v == theProcess || v == both {
		hit = c.cmd.Process.Kill() == nil
	}
	return hit
}

// cutShim shuts down the one SEQPACKET socket of a VMM, its shim's.
func cutShim(pid int) bool {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(process)
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, name := range names {
		n, _ := strconv.Atoi(filepath.Base(name))
		fd, err := unix.PidfdGetfd(process, n, 0)
		if err != nil {
			continue
		}
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		cut := err == nil && kind == unix.SOCK_SEQPACKET && unix.Shutdown(fd, unix.SHUT_RDWR) == nil
		_ = unix.Close(fd)
		if cut {
			return true
		}
	}
	return false
}

// expectEnd waits for the process itself.
func (c *cli) expectEnd(t *testing.T, after string) {
	t.Helper()
	select {
	case <-c.ended:
	case <-time.After(20 * time.Second):
		_ = c.cmd.Process.Signal(unix.SIGQUIT)
		<-c.ended
		t.Fatalf("agentzip still runs 20 s after %s:\n%s", after, c.said.String())
	}
}

func TestWhateverIsKilledAtWhateverMomentNothingIsLeft(t *testing.T) {
	run := []string{"run", "--template", vmTemplate, "--", "sleep", "60"}
	demo := []string{"demo", "--plain", "--native=off", "-n", "2", "--max-calls", "2", "--gap-scale", "0.1"}
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, seed))
	for _, args := range [][]string{run, run, demo} {
		for _, v := range []victim{theProcess, theVMM, theShim, theGuard, both} {
			if args[0] == "demo" && (v == theGuard || v == theShim) {
				continue // as for run, and the time is short
			}
			moment := time.Duration(random.IntN(2500)) * time.Millisecond
			t.Run(fmt.Sprintf("%s/%s/%v", args[0], v, moment), func(t *testing.T) {
				c := startCLI(t, args...)
				time.Sleep(moment)
				hit := c.strike(t, v)
				c.settle(t, v, hit)
				deadline := time.Now().Add(10 * time.Second)
				for left := c.left(t); len(left) > 0; left = c.left(t) {
					if time.Now().After(deadline) {
						t.Fatalf("left behind (hit: %v): %q\nagentzip said: %s", hit, left, c.said.String())
					}
					time.Sleep(20 * time.Millisecond)
				}
			})
		}
	}
}

// settle sees to it that the process ends, and checks how.
func (c *cli) settle(t *testing.T, v victim, hit bool) {
	t.Helper()
	switch {
	case v == theProcess || v == both:
		<-c.ended
	case hit && v != theGuard:
		c.expectEnd(t, "its sandbox was killed")
		if code := c.cmd.ProcessState.ExitCode(); code <= 0 {
			t.Errorf("agentzip whose sandbox was killed exits with %d: %s", code, c.said.String())
		}
	default:
		_ = c.cmd.Process.Signal(unix.SIGINT)
		c.expectEnd(t, "SIGINT")
		if code := c.cmd.ProcessState.ExitCode(); code != 130 && code != -1 { // -1: before it listened to signals
			t.Errorf("interrupted, agentzip exits with %d: %s", code, c.said.String())
		}
	}
	if (v == both || v == theProcess) && !c.guarded { // the next one sweeps, even if it fails for another reason
		out, err := c.command("run", "--template", "is-not-there", "--", "true").CombinedOutput()
		if exit := (&exec.ExitError{}); !errors.As(err, &exit) || exit.ExitCode() != 125 {
			t.Errorf("the next agentzip: %v: %s", err, out)
		}
	}
}

// footprint counts what this process holds of the kernel.
func footprint(t *testing.T) (fds, threads []string) {
	t.Helper()
	list := func(dir string) []string {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			target, _ := os.Readlink(filepath.Join(dir, e.Name()))
			names = append(names, e.Name()+" "+target)
		}
		slices.Sort(names)
		return names
	}
	return list("/proc/self/fd"), list("/proc/self/task")
}

func TestTenSandboxesStartedAndClosedLeaveNoDescriptorAndNoThread(t *testing.T) {
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	once := func() {
		s, err := d.Clone(t.Context(), CloneOptions{Template: vmTemplate, Cohort: c})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Compress(t.Context()); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	once()
	once()
	fds, threads := footprint(t)
	for range 8 {
		once()
	}
	fdsAfter, threadsAfter := footprint(t)
	if len(fdsAfter) > len(fds)+2 { // the pool may have grown by a segment
		t.Errorf("8 sandboxes left descriptors: before %d %q, after %d %q", len(fds), fds, len(fdsAfter), fdsAfter)
	}
	if len(threadsAfter) > len(threads)+4 { // the scheduler of Go keeps some
		t.Errorf("8 sandboxes left threads: %d before, %d after", len(threads), len(threadsAfter))
	}
	if st := c.Stats().Pool; st.Entries != 0 {
		t.Errorf("the pool still has %d entries of closed sandboxes", st.Entries)
	}
}

func TestTheNextDaemonSweepsABuildThatDied(t *testing.T) {
	state := t.TempDir()
	half := filepath.Join(state, "templates", ".tmp-x~123", "out")
	if err := os.MkdirAll(half, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AGENTZIP_STATE_DIR", state)
	t.Setenv("AGENTZIP_RUN_DIR", filepath.Join(t.TempDir(), "run"))
	openDaemon(t, 0)
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the half-built template is still there: %v", err)
	}
}

func TestADaemonClosesWhileLoadsOfTemplatesFail(t *testing.T) {
	d := openDaemon(t, 0)
	var loads sync.WaitGroup
	for range 4 {
		loads.Go(func() {
			for {
				_, _, err := d.Template(t.Context(), "is-not-there")
				if err == nil || strings.Contains(err.Error(), "the daemon is closed") {
					return
				}
			}
		})
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Close waits for a load that waits for Close")
	}
	loads.Wait()
}
