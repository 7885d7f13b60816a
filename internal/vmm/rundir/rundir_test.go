package rundir

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/vmm/cgroup"
)

// The test binary is also its own guard and, as `__own RUNROOT STATEROOT`, a process
// that owns a run.
func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "__guard":
		err = GuardMain(os.Args[2])
	case len(os.Args) == 4 && os.Args[1] == "__own":
		err = own(os.Args[2], os.Args[3])
	default:
		goleak.VerifyTestMain(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func open(runRoot, stateRoot string) (*Run, error) {
	groups, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	return Open(Options{RunRoot: runRoot, StateRoot: stateRoot, Guard: []string{"/proc/self/exe", "__guard"}, Groups: groups})
}

// owned is what an owner prints when it is ready.
type owned struct {
	Dir, StateDir string
	Grouped       int // a process in one of the run's cgroups
	Recorded      int // a process that is only recorded
}

// own opens a run, fills it and waits to be killed. Its children are in sessions of
// their own and do not die with it.
func own(runRoot, stateRoot string) error {
	r, err := open(runRoot, stateRoot)
	if err != nil {
		return err
	}
	if err := r.StartGuard(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.StateDir(), "disk"), make([]byte, 1<<16), 0o600); err != nil {
		return err
	}
	sleeper := func() (int, error) {
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		go func() { _ = cmd.Wait() }()
		return cmd.Process.Pid, nil
	}
	o := owned{Dir: r.Dir(), StateDir: r.StateDir()}
	if o.Grouped, err = sleeper(); err != nil {
		return err
	}
	if o.Recorded, err = sleeper(); err != nil {
		return err
	}
	groups, _ := cgroup.Detect()
	g, _ := groups.Create(r.Group("vm"), cgroup.Limits{})
	if err := errors.Join(g.Add(o.Grouped), r.RecordProcess("vm", o.Recorded)); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(o); err != nil {
		return err
	}
	select {}
}

// startOwner starts a process that owns a run of the two roots.
func startOwner(t *testing.T, runRoot, stateRoot string) (*exec.Cmd, owned) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes cgroups")
	}
	cmd := exec.Command("/proc/self/exe", "__own", runRoot, stateRoot)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var o owned
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err := errors.Join(err, json.Unmarshal(line, &o)); err != nil {
		t.Fatalf("the owner did not start: %v", err)
	}
	t.Cleanup(func() {
		for _, pid := range []int{o.Grouped, o.Recorded} {
			if alive(pid) {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	})
	return cmd, o
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// guardOf returns the pid of the guard of a run folder, 0 if none runs.
func guardOf(t *testing.T, dir string) int {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, _ := os.ReadFile(name)
		if strings.HasSuffix(string(b), "\x00__guard\x00"+dir+"\x00") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			return pid
		}
	}
	return 0
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it never happens that %s", what)
		}
	}
}

func gone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// nothingLeft waits until nothing of an owner is left.
func nothingLeft(t *testing.T, o owned) {
	t.Helper()
	eventually(t, "its process in a cgroup is dead", func() bool { return !alive(o.Grouped) })
	eventually(t, "its recorded process is dead", func() bool { return !alive(o.Recorded) })
	eventually(t, "its state folder is gone", func() bool { return gone(o.StateDir) })
	eventually(t, "its run folder is gone", func() bool { return gone(o.Dir) })
	eventually(t, "its guard is gone", func() bool { return guardOf(t, o.Dir) == 0 })
	groups, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range groups.Dirs(groupRoot + "/" + filepath.Base(o.Dir)) {
		eventually(t, dir+" is gone", func() bool { return gone(dir) })
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	runRoot, stateRoot := t.TempDir()+"/run", t.TempDir()
	r, err := open(runRoot, stateRoot)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.StartGuard(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.StateDir(), "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Close(), r.Close()); err != nil {
		t.Fatal(err)
	}
	if !gone(runRoot) || !gone(filepath.Join(stateRoot, stateRuns)) {
		t.Error("the roots are left")
	}
	if guardOf(t, r.Dir()) != 0 {
		t.Error("the guard is left")
	}
	if err := r.StartGuard(); err == nil {
		t.Error("a closed run gets a guard")
	}
}

func TestTheGuardClearsUpAfterAKilledOwner(t *testing.T) {
	cmd, o := startOwner(t, t.TempDir()+"/run", t.TempDir())
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	nothingLeft(t, o)
}

func TestAGuardThatDiesIsReplaced(t *testing.T) {
	cmd, o := startOwner(t, t.TempDir()+"/run", t.TempDir())
	first := guardOf(t, o.Dir)
	if first == 0 {
		t.Fatal("no guard runs")
	}
	if err := unix.Kill(first, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another guard runs", func() bool { g := guardOf(t, o.Dir); return g != 0 && g != first })
	if !alive(o.Grouped) || gone(o.Dir) {
		t.Error("the guard's death took the run with it")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	nothingLeft(t, o)
}

func TestSweepClearsUpAfterOwnerAndGuard(t *testing.T) {
	runRoot, stateRoot := t.TempDir()+"/run", t.TempDir()
	live, err := open(runRoot, stateRoot)
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	cmd, o := startOwner(t, runRoot, stateRoot)
	guard := guardOf(t, o.Dir)
	// Stopped, the owner cannot replace its guard before it dies too.
	if err := errors.Join(cmd.Process.Signal(unix.SIGSTOP), unix.Kill(guard, unix.SIGKILL), cmd.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	eventually(t, "the guard is dead", func() bool { return guardOf(t, o.Dir) == 0 })
	if !alive(o.Grouped) || !alive(o.Recorded) || gone(o.Dir) {
		t.Fatal("somebody cleared up already: this test tests nothing")
	}
	swept, err := Sweep(runRoot, stateRoot)
	if err != nil || len(swept) != 1 || swept[0] != filepath.Base(o.Dir) {
		t.Errorf("swept %q (%v), want %s", swept, err, filepath.Base(o.Dir))
	}
	nothingLeft(t, o)
	if gone(live.Dir()) || gone(live.StateDir()) {
		t.Error("a live run was swept")
	}
}

func TestSweepRemovesWhatARebootLeavesOnDisk(t *testing.T) {
	stateRoot := t.TempDir()
	dir := filepath.Join(stateRoot, stateRuns, "123-0123abcd")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(stateRoot, stateRuns, "not-a-run")
	if err := os.Mkdir(kept, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Sweep(t.TempDir()+"/none", stateRoot); err != nil {
		t.Fatal(err)
	}
	if !gone(dir) || gone(kept) {
		t.Errorf("run folder gone: %v, other folder gone: %v; want true, false", gone(dir), gone(kept))
	}
}

func TestSweepActsOnNoRecordThatNamesOtherThings(t *testing.T) {
	victim := t.TempDir()
	for _, rec := range []record{
		{State: victim},
		{State: filepath.Join(victim, "run", "123-0123abcd", "..", "..")},
		{State: "/x/run/123-0123abcd", Groups: []string{"/sys/fs/cgroup/memory"}},
		{State: "/x/run/123-0123abcd", Groups: []string{"/sys/fs/cgroup/memory/agentzip/123-0123abcd/../.."}},
	} {
		runRoot := t.TempDir()
		dir := filepath.Join(runRoot, "123-0123abcd")
		if err := errors.Join(os.Chmod(runRoot, 0o700), os.Mkdir(dir, 0o700), writeRecord(dir, rec)); err != nil {
			t.Fatal(err)
		}
		if _, err := Sweep(runRoot, t.TempDir()); err == nil || !strings.Contains(err.Error(), "foreign") {
			t.Errorf("Sweep of record %+v: %v, want a refusal", rec, err)
		}
		if gone(victim) {
			t.Fatalf("record %+v removed a foreign folder", rec)
		}
	}
}

func TestSweepOfARunThatDiedBeforeItsRecord(t *testing.T) {
	runRoot := t.TempDir()
	dir := filepath.Join(runRoot, "123-0123abcd")
	if err := errors.Join(os.Chmod(runRoot, 0o700), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := Sweep(runRoot, t.TempDir()); err != nil || !gone(dir) {
		t.Errorf("Sweep: %v, folder gone: %v", err, gone(dir))
	}
}

func TestARecycledPidIsNotKilled(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	dir := t.TempDir()
	line := fmt.Sprintf("%d 1\n", cmd.Process.Pid) // started long before
	if err := os.WriteFile(filepath.Join(dir, "pid-vm"), []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := killRecorded(dir); err != nil {
		t.Fatal(err)
	}
	if !alive(cmd.Process.Pid) {
		t.Error("it was killed")
	}
}

func TestEveryLiveRunHasASlotOfItsOwn(t *testing.T) {
	runRoot, stateRoot := t.TempDir()+"/run", t.TempDir()
	var runs []*Run
	for want := range 3 {
		r, err := open(runRoot, stateRoot)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if r.Slot() != want {
			t.Errorf("slot %d, want %d", r.Slot(), want)
		}
		runs = append(runs, r)
	}
	if err := runs[1].Close(); err != nil {
		t.Fatal(err)
	}
	r, err := open(runRoot, stateRoot)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Slot() != 1 {
		t.Errorf("slot %d after slot 1 was given back, want 1", r.Slot())
	}
}

func TestARootThatOthersCanWriteIsRefused(t *testing.T) {
	root := t.TempDir()
	if err := os.Chmod(root, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := open(root, t.TempDir()); err == nil || !strings.Contains(err.Error(), "writable by nobody else") {
		t.Errorf("Open: %v, want a refusal", err)
	}
}
