package vmm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
)

// ownVerb makes the test binary a process that owns a host with one machine:
// `__own RUNDIR STATEDIR SHIM`.
const ownVerb = "__own"

// owned is what such a process says about itself, a line each time it has got further.
type owned struct {
	RunID string
	VMM   int // 0 as long as there is none
}

// own starts a machine and waits to be killed.
func own(runDir, stateDir, shim string) error {
	h, err := OpenHost(HostOptions{RunDir: runDir, StateDir: stateDir})
	if err != nil {
		return err
	}
	say := json.NewEncoder(os.Stdout)
	if err := say.Encode(owned{RunID: h.run.ID()}); err != nil {
		return err
	}
	im, err := guestmem.NewImage(hardware.Memory)
	if err != nil {
		return err
	}
	if _, err := h.TempDir("scratch"); err != nil {
		return err
	}
	m, err := h.Start(context.Background(), Spec{Mode: Boot, Hardware: hardware, Memory: im.File(), Shim: shim})
	if err != nil {
		return err
	}
	if err := m.Resume(context.Background()); err != nil {
		return err
	}
	if err := say.Encode(owned{RunID: h.run.ID(), VMM: m.PID()}); err != nil {
		return err
	}
	select {}
}

// owner is such a process.
type owner struct {
	cmd              *exec.Cmd
	lines            *bufio.Reader
	runDir, stateDir string
	owned
}

// startOwner starts one and waits for its first line.
func startOwner(t *testing.T, shim string) *owner {
	t.Helper()
	needQEMU(t)
	o := &owner{runDir: t.TempDir() + "/run", stateDir: t.TempDir()}
	o.cmd = exec.Command("/proc/self/exe", ownVerb, o.runDir, o.stateDir, shim)
	o.cmd.Stderr = os.Stderr
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = o.cmd.Process.Kill(); _ = o.cmd.Wait() })
	o.lines = bufio.NewReader(out)
	o.next(t)
	return o
}

func (o *owner) next(t *testing.T) {
	t.Helper()
	line, err := o.lines.ReadBytes('\n')
	if err := errors.Join(err, json.Unmarshal(line, &o.owned)); err != nil {
		t.Fatalf("the owner says %q: %v", line, err)
	}
}

// processes returns the VMMs and guards that still run for an owner, by their pid.
func (o *owner) processes(t *testing.T) map[int]string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	found := map[int]string{}
	for _, name := range names {
		dir := filepath.Dir(name)
		b, _ := os.ReadFile(name)
		groups, _ := os.ReadFile(dir + "/cgroup")
		if strings.Contains(string(b), o.runDir+"/") || strings.Contains(string(groups), o.RunID) {
			if stat, err := os.ReadFile(dir + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
				pid, _ := strconv.Atoi(filepath.Base(dir))
				found[pid] = strings.ReplaceAll(string(b), "\x00", " ")
			}
		}
	}
	return found
}

// left returns what still exists of an owner.
func (o *owner) left(t *testing.T) []string {
	t.Helper()
	var left []string
	for pid, args := range o.processes(t) {
		left = append(left, fmt.Sprintf("process %d: %.60s", pid, args))
	}
	paths := []string{o.runDir, filepath.Join(o.stateDir, "run")}
	for _, hierarchy := range []string{"", "/*"} {
		dirs, _ := filepath.Glob("/sys/fs/cgroup" + hierarchy + "/agentzip/" + o.RunID)
		paths = append(paths, dirs...)
	}
	for _, p := range paths {
		if _, err := os.Lstat(p); !errors.Is(err, fs.ErrNotExist) {
			left = append(left, p)
		}
	}
	return left
}

func (o *owner) nothingLeft(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for {
		left := o.left(t)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %q", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// kill ends the owner with SIGKILL, and its guard with it if asked to. Stopped first,
// the owner cannot replace the guard.
func (o *owner) kill(t *testing.T, guardToo bool) {
	t.Helper()
	if guardToo {
		_ = o.cmd.Process.Signal(unix.SIGSTOP)
		for pid, args := range o.processes(t) {
			if strings.Contains(args, GuardVerb) {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	}
	_ = o.cmd.Process.Kill()
	_ = o.cmd.Wait()
}

func TestAKilledDaemonLeavesNothing(t *testing.T) {
	t.Parallel()
	o := startOwner(t, "")
	o.next(t)
	o.kill(t, false)
	o.nothingLeft(t)
}

func TestADaemonKilledWithItsGuardLeavesNoVMMAndTheNextRunSweepsTheRest(t *testing.T) {
	t.Parallel()
	for _, shim := range []string{"", buildShim(t)} {
		o := startOwner(t, shim)
		o.next(t)
		o.kill(t, true)
		deadline := time.Now().Add(10 * time.Second)
		for len(o.processes(t)) > 0 {
			if time.Now().After(deadline) {
				t.Fatalf("with shim %q processes live on: %v", shim, o.processes(t))
			}
			time.Sleep(5 * time.Millisecond)
		}
		if len(o.left(t)) == 0 {
			t.Fatal("somebody cleared up already: this test tests nothing")
		}
		h, err := OpenHost(HostOptions{RunDir: o.runDir, StateDir: o.stateDir})
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		o.nothingLeft(t)
	}
}

func TestADaemonKilledAtAnyMomentLeavesNothing(t *testing.T) {
	t.Parallel()
	shim := buildShim(t)
	const seed = 2
	random := rand.New(rand.NewPCG(seed, seed))
	for i := range 8 {
		o := startOwner(t, shim)
		moment := time.Duration(random.IntN(250)) * time.Millisecond
		time.Sleep(moment)
		guardToo := i%2 == 1
		o.kill(t, guardToo)
		if guardToo {
			h, err := OpenHost(HostOptions{RunDir: o.runDir, StateDir: o.stateDir})
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
		}
		o.nothingLeft(t)
	}
}
