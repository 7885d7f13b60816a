package vmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm/cgroup"
	"github.com/agentzip/agentzip/internal/vmm/rundir"
)

// Numeric users of VMMs. They need no entry in /etc/passwd, own no file, and lie
// above every range that Debian, systemd (524288-1879048191) or the usual
// subordinate-uid tools hand out. Run n of a run root uses the UIDsPerRun ids from
// UIDBase + n*UIDsPerRun; so no two live VMMs of it share one. The group id of a
// VMM is the same number.
const (
	UIDBase    = 1_900_000_000
	UIDsPerRun = 1024
)

// Default folders; the environment variables win over them, HostOptions over both.
const (
	DefaultRunDir   = "/run/agentzip"     // AGENTZIP_RUN_DIR
	DefaultStateDir = "/var/lib/agentzip" // AGENTZIP_STATE_DIR
)

// GuardVerb is the hidden verb with which this executable becomes a guard.
const GuardVerb = "__guard"

// defaultAllowance is what a VMM's cgroup may use beyond guest memory: heap,
// translation buffer, page tables, kernel memory, page cache it cannot give back.
// Measured need is 40-70 MiB; the rest is room for a bad day.
const defaultAllowance = 256 * units.MiB

// maxThreads bounds a VMM's threads: QEMU's pool for disk requests has up to 64,
// the rest of it about 5 and one a vCPU.
const maxThreads = 96

// ErrClosed is returned by a Host that was closed. Nothing was started.
var ErrClosed = errors.New("VMM host is closed")

// HostOptions of OpenHost. The zero value is the normal one.
type HostOptions struct {
	RunDir, StateDir string
	QEMU             string      // the executable; "": qemu-system-x86_64 in PATH
	Guard            []string    // the guard's command, the run folder is appended; nil: this executable, GuardVerb
	Allowance        units.Bytes // memory a VMM may use beyond guest memory; 0: 256 MiB
	Logger           *slog.Logger
}

// Host owns the machines of this process and everything they need on the host.
type Host struct {
	run       *rundir.Run
	groups    *cgroup.Tree
	launcher  *launcher
	qemu      string
	allowance units.Bytes
	log       *slog.Logger
	ctx       context.Context // ends with Close: Starts in progress give up
	cancel    context.CancelFunc

	mu       sync.Mutex
	closed   bool                // guarded by mu
	starting sync.WaitGroup      // Starts in progress; Add under mu while not closed
	machines map[string]*machine // guarded by mu; by id
	uids     map[int]bool        // guarded by mu; in use, as an index into this run's range
	serial   int                 // guarded by mu; for ids we make up
	warned   map[string]bool     // guarded by mu; cgroup warnings given already
}

// OpenHost sweeps what dead hosts left behind and claims this process's run
// folders. The process must be root. Close the Host to leave nothing.
func OpenHost(o HostOptions) (*Host, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("open VMM host: must be root (it starts VMMs as other users and sets up cgroups)")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	qemu, err := exec.LookPath(cmp.Or(o.QEMU, "qemu-system-x86_64"))
	if err != nil {
		return nil, fmt.Errorf("open VMM host: %w (Debian: apt-get install qemu-system-x86)", err)
	}
	groups, err := cgroup.Detect()
	if err != nil {
		return nil, fmt.Errorf("open VMM host: %w", err)
	}
	if o.Guard == nil {
		// A test binary runs all its tests whatever its arguments: as its own guard it
		// would start hosts with guards that start hosts.
		if strings.HasSuffix(os.Args[0], ".test") && !guardReady.Load() {
			return nil, errors.New("open VMM host: TestMain must call vmm.BecomeGuard first")
		}
		// Not the path of the executable: it may be replaced while we run.
		o.Guard = []string{"/proc/self/exe", GuardVerb}
	}
	run, err := rundir.Open(rundir.Options{
		RunRoot:   cmp.Or(o.RunDir, os.Getenv("AGENTZIP_RUN_DIR"), DefaultRunDir),
		StateRoot: cmp.Or(o.StateDir, os.Getenv("AGENTZIP_STATE_DIR"), DefaultStateDir),
		Guard:     o.Guard, Groups: groups, Logger: o.Logger,
	})
	if err != nil {
		return nil, fmt.Errorf("open VMM host: %w", err)
	}
	// Now, not with the first VM: killed while it loads or builds a template, this
	// process would leave its run folders to whoever comes next.
	if err := run.StartGuard(); err != nil {
		return nil, errors.Join(fmt.Errorf("open VMM host: %w", err), run.Close())
	}
	l, err := newLauncher()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open VMM host: %w", err), run.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Host{
		ctx: ctx, cancel: cancel,
		run: run, groups: groups, launcher: l, qemu: qemu, log: o.Logger,
		allowance: cmp.Or(o.Allowance, defaultAllowance),
		machines:  map[string]*machine{}, uids: map[int]bool{}, warned: map[string]bool{},
	}, nil
}

// Sweep removes what dead hosts left in the default folders, or those the
// environment names. OpenHost does it by itself.
func Sweep() error {
	_, err := rundir.Sweep(cmp.Or(os.Getenv("AGENTZIP_RUN_DIR"), DefaultRunDir),
		cmp.Or(os.Getenv("AGENTZIP_STATE_DIR"), DefaultStateDir))
	return err
}

// BecomeGuard ends this process as a guard if it was started as one, and returns if
// not. A program that opens a Host with the default guard calls it first thing in main
// or TestMain, unless it has a verb that calls GuardMain.
func BecomeGuard() {
	guardReady.Store(true)
	if len(os.Args) != 3 || os.Args[1] != GuardVerb {
		return
	}
	if err := GuardMain(os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// guardReady is whether BecomeGuard was called.
var guardReady atomic.Bool

// GuardMain is the whole of the guard process: `agentzip __guard RUNDIR`. It
// returns when the run is gone.
func GuardMain(runDir string) error { return rundir.GuardMain(runDir) }

// TempFile returns an empty file on disk that nobody can open by a name and that ends
// with its last descriptor, whatever happens to this process. The name is for messages.
func (h *Host) TempFile(name string) (*os.File, error) {
	fd, err := unix.Open(h.run.StateDir(), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), filepath.Join(h.run.StateDir(), name)), nil
	}
	// Not every file system knows O_TMPFILE (overlayfs before 6.1, NFS).
	f, err := os.CreateTemp(h.run.StateDir(), name+"-")
	if err != nil {
		return nil, fmt.Errorf("create temporary file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("unlink temporary file: %w", err), f.Close())
	}
	return f, nil
}

// TempDir returns a new folder on disk, which ends with the Host unless the
// caller removes it earlier.
func (h *Host) TempDir(name string) (string, error) {
	dir, err := os.MkdirTemp(h.run.StateDir(), name+"-")
	if err != nil {
		return "", fmt.Errorf("create temporary folder: %w", err)
	}
	return dir, nil
}

// Close kills all machines and removes everything the Host made. A second Close
// does nothing.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	h.mu.Unlock()
	h.cancel()
	h.killAll()
	h.starting.Wait()
	h.launcher.stop()
	if err := h.run.Close(); err != nil {
		return fmt.Errorf("close VMM host: %w", err)
	}
	return nil
}

func (h *Host) killAll() {
	h.mu.Lock()
	all := make([]*machine, 0, len(h.machines))
	for _, m := range h.machines {
		all = append(all, m)
	}
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, m := range all {
		wg.Go(m.Kill)
	}
	wg.Wait()
}

var machineID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// reserve enters a machine under its id and gives it a uid.
func (h *Host) reserve(m *machine, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return ErrClosed
	}
	if id == "" {
		h.serial++
		id = fmt.Sprintf("vm-%d", h.serial)
	}
	if !machineID.MatchString(id) {
		return fmt.Errorf("machine id %q: must match %s", id, machineID)
	}
	if h.machines[id] != nil {
		return fmt.Errorf("machine id %q is in use", id)
	}
	for n := range UIDsPerRun {
		if !h.uids[n] {
			h.uids[n] = true
			m.id, m.uid = id, UIDBase+h.run.Slot()*UIDsPerRun+n
			h.machines[id] = m
			h.starting.Add(1)
			return nil
		}
	}
	return fmt.Errorf("start machine %s: %d machines are running", id, UIDsPerRun)
}

// release undoes reserve, once nothing of the machine is left.
func (h *Host) release(m *machine) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.machines, m.id)
	delete(h.uids, m.uid-UIDBase-h.run.Slot()*UIDsPerRun)
}

// warn logs each confinement that the host cannot give once.
func (h *Host) warn(id string, warnings []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, w := range warnings {
		if !h.warned[w] {
			h.warned[w] = true
			h.log.Warn("a VMM is not confined as it should be", "machine", id, "why", w)
		}
	}
}

// QEMUVersion returns what the executable says about itself, for example "7.2.22
// (Debian 1:7.2+dfsg-7+deb12u18+b3)". Device state loads into the same version only.
func (h *Host) QEMUVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, h.qemu, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("ask QEMU for its version: %w", err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimPrefix(strings.TrimSpace(line), "QEMU emulator version "), nil
}

// Warnings lists the confinements that this host could not give its machines.
func (h *Host) Warnings() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make([]string, 0, len(h.warned))
	for w := range h.warned {
		all = append(all, w)
	}
	return all
}

// Start launches a machine. It returns when the machine is paused and ready for
// Resume; a clone has its device state by then. ctx bounds Start only: the
// machine lives until it ends or Kill. On error nothing is left.
func (h *Host) Start(ctx context.Context, s Spec) (Machine, error) {
	m, err := h.start(ctx, s)
	if err != nil {
		return nil, err
	}
	return m, nil
}
