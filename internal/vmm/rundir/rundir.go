// Package rundir makes sure that a host process leaves nothing behind, however
// it ends.
//
// A run is one host process's claim on a folder below the run root (normally
// /run/agentzip), a folder of the same name below the state root (disk-backed),
// and the control groups agentzip/ID. Both folders are flocked for as long as the
// process lives; the kernel drops the locks with it, so "locked" means "alive".
//
//	Open --claim, record--> live --Close--> gone
//	                        live --process dies--> dead --guard, or anybody's Sweep--> gone
//
// The record (run.json in the run folder) is written before the first thing it
// names exists, and the run folder goes last: whoever finds it finds all.
//
// The guard is this executable again, in a session of its own, with the read end
// of a pipe as its standard input. The pipe closes when the run's process ends.
//
// Lock order: the run root's flock, the state root's flock, a run's flock; Run.mu
// is held for none of them.
package rundir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/vmm/cgroup"
)

// groupRoot is the control group that holds the groups of all runs.
const groupRoot = "agentzip"

// stateRuns is the folder of the state root that holds the folders of all runs.
const stateRuns = "run"

// Slots is how many runs may live in one run root at a time. Each slot owns a
// range of user ids.
const Slots = 1024

// idPattern is what a run is called: process id and eight random hex digits.
// Sweep touches nothing that is called otherwise.
var idPattern = regexp.MustCompile(`^[0-9]{1,10}-[0-9a-f]{8}$`)

const recordName = "run.json"

// record is what a sweeper needs to know about a run.
type record struct {
	PID    int      `json:"pid"`
	Slot   int      `json:"slot"`
	State  string   `json:"state"`  // folder below the state root
	Groups []string `json:"groups"` // control group directories
}

// Options of Open. All fields are required except Logger.
type Options struct {
	RunRoot   string
	StateRoot string
	Guard     []string // command of the guard; the run folder is appended
	Groups    *cgroup.Tree
	Logger    *slog.Logger
}

// Run is a live run. Safe for concurrent use.
type Run struct {
	id        string   // immutable
	slot      int      // immutable
	runRoot   string   // immutable
	stateRoot string   // immutable
	dir       string   // immutable
	stateDir  string   // immutable
	groups    []string // immutable
	guardArgs []string // immutable
	log       *slog.Logger

	lock, stateLock *os.File // held until Close

	mu     sync.Mutex
	guard  *guard // guarded by mu; nil until StartGuard
	closed bool   // guarded by mu
}

// Open sweeps what dead runs left and claims a new run.
func Open(o Options) (*Run, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	swept, err := Sweep(o.RunRoot, o.StateRoot)
	for _, id := range swept {
		o.Logger.Info("removed what a dead run left behind", "run", id)
	}
	if err != nil {
		o.Logger.Warn("could not remove everything a dead run left behind", "err", err)
	}
	id := fmt.Sprintf("%d-%s", os.Getpid(), uuid.NewString()[:8])
	stateRuns := filepath.Join(o.StateRoot, stateRuns)
	r := &Run{
		id: id, runRoot: o.RunRoot, stateRoot: o.StateRoot,
		dir: filepath.Join(o.RunRoot, id), stateDir: filepath.Join(stateRuns, id),
		groups:    o.Groups.Dirs(groupRoot + "/" + id),
		guardArgs: o.Guard, log: o.Logger,
	}
	if err := r.claim(stateRuns); err != nil {
		return nil, err
	}
	return r, nil
}

// claim creates and locks the two folders and writes the record.
func (r *Run) claim(stateRuns string) (err error) {
	root, err := lockRoot(r.runRoot)
	if err != nil {
		return fmt.Errorf("open run folder: %w", err)
	}
	defer root.Close()
	if r.slot, err = freeSlot(r.runRoot); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			closeAll(r.lock, r.stateLock)
			_ = os.RemoveAll(r.stateDir)
			_ = os.RemoveAll(r.dir)
		}
	}()
	if r.lock, err = createLocked(r.dir); err != nil {
		return fmt.Errorf("create run folder: %w", err)
	}
	rec := record{PID: os.Getpid(), Slot: r.slot, State: r.stateDir, Groups: r.groups}
	if err := writeRecord(r.dir, rec); err != nil {
		return fmt.Errorf("record run: %w", err)
	}
	stateRoot, err := lockRoot(stateRuns)
	if err != nil {
		return fmt.Errorf("open state folder: %w", err)
	}
	defer stateRoot.Close()
	if r.stateLock, err = createLocked(r.stateDir); err != nil {
		return fmt.Errorf("create state folder: %w", err)
	}
	return nil
}

// ID names the run; Slot is its number among those alive, from 0.
func (r *Run) ID() string { return r.id }

// Slot returns the run's number, below Slots; no other live run of this root has it.
func (r *Run) Slot() int { return r.slot }

// Dir returns the run's folder below the run root; files in it go with the run.
func (r *Run) Dir() string { return r.dir }

// StateDir returns the run's disk-backed folder; files in it go with the run.
func (r *Run) StateDir() string { return r.stateDir }

// Group returns the name of a control group that goes with the run.
func (r *Run) Group(name string) string { return groupRoot + "/" + r.id + "/" + name }

// RecordProcess notes a process that a sweep must kill even where it found no
// control group to put it in.
func (r *Run) RecordProcess(name string, pid int) error {
	start, err := startTime(pid)
	if err != nil {
		return fmt.Errorf("record process %d: %w", pid, err)
	}
	line := fmt.Sprintf("%d %s\n", pid, start)
	return os.WriteFile(filepath.Join(r.dir, "pid-"+name), []byte(line), 0o600)
}

// ForgetProcess undoes RecordProcess.
func (r *Run) ForgetProcess(name string) { _ = os.Remove(filepath.Join(r.dir, "pid-"+name)) }

// Close removes everything the run owns and ends its guard. A second Close does nothing.
func (r *Run) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	g := r.guard
	r.mu.Unlock()

	rec := record{State: r.stateDir, Groups: r.groups}
	err := removeRun(r.dir, rec)
	closeAll(r.lock, r.stateLock)
	if g != nil {
		g.stop()
	}
	r.prune()
	if err != nil {
		return fmt.Errorf("remove run %s: %w", r.id, err)
	}
	return nil
}

// prune removes the roots that nobody uses any more.
func (r *Run) prune() {
	pruneRoots(r.runRoot, r.stateRoot, r.groups)
}

func pruneRoots(runRoot, stateRoot string, groups []string) {
	for _, root := range []string{runRoot, filepath.Join(stateRoot, stateRuns)} {
		if f, err := lockRoot(root); err == nil {
			_ = unix.Rmdir(root)
			_ = f.Close()
		}
	}
	for _, g := range groups {
		if filepath.Base(filepath.Dir(g)) == groupRoot {
			cgroup.Prune([]string{filepath.Dir(g)})
		}
	}
}

// lockRoot opens a root folder, made if missing, and holds its exclusive lock. The
// folder may be removed by its last user between our open and our lock: then the
// lock is on nothing and we start again.
func lockRoot(root string) (*os.File, error) {
	for {
		if err := os.MkdirAll(root, 0o700); err != nil {
			return nil, err
		}
		f, err := os.Open(root)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := checkOwner(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if err := flock(f, unix.LOCK_EX); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if isAt(f, root) {
			return f, nil
		}
		_ = f.Close()
	}
}

// checkOwner refuses a root that somebody else could have filled: a sweep acts on
// what it finds there.
func checkOwner(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s: must belong to uid %d and be writable by nobody else", f.Name(), os.Geteuid())
	}
	return nil
}

// createLocked makes a folder that must not exist and holds its lock. The caller
// holds the root's lock, so nobody can look at it in between.
func createLocked(dir string) (*os.File, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := flock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// isAt reports whether f is what path names now.
func isAt(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(path)
	return err == nil && os.SameFile(a, b)
}

// freeSlot returns the lowest slot that no folder in the run root records. The
// caller holds the root's lock.
func freeSlot(root string) (int, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return 0, fmt.Errorf("read run folder: %w", err)
	}
	taken := map[int]bool{}
	for _, e := range entries {
		if rec, err := readRecord(filepath.Join(root, e.Name())); err == nil {
			taken[rec.Slot] = true
		}
	}
	for slot := range Slots {
		if !taken[slot] {
			return slot, nil
		}
	}
	return 0, fmt.Errorf("open run folder: %d runs are live in %s", Slots, root)
}

func writeRecord(dir string, rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, recordName+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, recordName))
}

// readRecord reads a run's record and refuses one that names anything but the
// run's own folder and groups.
func readRecord(dir string) (record, error) {
	var rec record
	b, err := os.ReadFile(filepath.Join(dir, recordName))
	if err != nil {
		return rec, err
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return rec, fmt.Errorf("parse %s: %w", filepath.Join(dir, recordName), err)
	}
	id := filepath.Base(dir)
	if filepath.Base(rec.State) != id || filepath.Base(filepath.Dir(rec.State)) != stateRuns {
		return rec, fmt.Errorf("record of run %s names a foreign folder %q", id, rec.State)
	}
	for _, g := range rec.Groups {
		if !strings.HasSuffix(filepath.Clean(g), "/"+groupRoot+"/"+id) {
			return rec, fmt.Errorf("record of run %s names a foreign cgroup %q", id, g)
		}
	}
	return rec, nil
}

// startTime returns the start time of a process in clock ticks, field 22 of
// proc_pid_stat(5): with it a recycled pid is told from the process that was recorded.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", err
	}
	_, rest, ok := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return "", fmt.Errorf("parse /proc/%d/stat", pid)
	}
	return fields[19], nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
