package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// A Host is everything the checks touch. Each field is one probe; tests replace
// the ones they need.
type Host struct {
	GOOS, GOARCH string
	PageSize     int
	EUID         int
	StateDir     string // where templates live; it need not exist yet
	LibDir       string // where the agent and the shim lie

	ReadFile func(path string) ([]byte, error)
	// LookPath finds a program in PATH and in the sbin folders, where Debian
	// keeps mke2fs and which a user's PATH may lack.
	LookPath func(name string) (string, error)
	// Output runs a program and returns what it wrote to both outputs.
	Output func(ctx context.Context, name string, args ...string) (string, error)
	// FreeDisk returns what an unprivileged writer could use below dir, or below
	// its nearest parent that exists.
	FreeDisk func(dir string) (units.Bytes, error)

	// Userfault registers MISSING|MINOR|WP on a private mapping of a sealed memfd
	// and serves one fault of each kind. An error says which step failed.
	Userfault func() (FaultTimes, error)
	// UserfaultDevice gets a descriptor through /dev/userfaultfd, as VMMs do.
	UserfaultDevice func() error
	// PagemapScan finds the one private page of a small mapping. exact: with the
	// PAGEMAP_SCAN ioctl; otherwise by reading the page table's entries.
	PagemapScan func() (exact bool, err error)
	// KVMLoop counts down from n in 64-bit guest code; see timeLongModeLoop.
	KVMLoop    func(n uint32, limit time.Duration) (time.Duration, error)
	NativeLoop func(n uint32) time.Duration
	// MakeCgroup makes and removes a cgroup with one of the given controllers
	// (cgroup 1) or in the unified tree ("").
	MakeCgroup func(controller string) error
	// LoopMount makes a small ext4 file, mounts it and takes it down again.
	LoopMount func(ctx context.Context) error
}

// FaultTimes says how long the probe's faults took, from touch to content.
type FaultTimes struct{ Minor, Missing, WriteProtect time.Duration }

// RealHost is the machine this process runs on.
func RealHost(stateDir, libDir string) *Host {
	return &Host{
		GOOS: runtime.GOOS, GOARCH: runtime.GOARCH,
		PageSize: os.Getpagesize(),
		EUID:     os.Geteuid(),
		StateDir: stateDir, LibDir: libDir,
		ReadFile:        os.ReadFile,
		LookPath:        lookPath,
		Output:          output,
		FreeDisk:        freeDisk,
		Userfault:       tryUserfault,
		UserfaultDevice: tryUserfaultDevice,
		PagemapScan:     tryPagemapScan,
		KVMLoop:         timeLongModeLoop,
		NativeLoop:      timeNativeLoop,
		MakeCgroup:      tryCgroup,
		LoopMount:       tryLoopMount,
	}
}

func lookPath(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", exec.ErrNotFound
}

func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second // a grandchild that keeps the pipe open must not hang us
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func freeDisk(dir string) (units.Bytes, error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return units.Bytes(st.Bavail) * units.Bytes(st.Bsize), nil
		}
		parent := filepath.Dir(dir)
		if !errors.Is(err, unix.ENOENT) || parent == dir {
			return 0, fmt.Errorf("statfs %s: %w", dir, err)
		}
		dir = parent
	}
}

// tryCgroup makes a cgroup where vmm makes those of sandboxes, and removes it.
func tryCgroup(controller string) error {
	dir := filepath.Join("/sys/fs/cgroup", controller, fmt.Sprintf("agentzip-doctor-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return unix.Rmdir(dir)
}

// tryLoopMount works in a mount namespace of its own: whatever happens to us,
// the mount and its loop device end with that namespace.
func tryLoopMount(ctx context.Context) error {
	mke2fs, err := lookPath("mke2fs")
	if err != nil {
		return fmt.Errorf("mke2fs: %w", err)
	}
	dir, err := os.MkdirTemp("", "agentzip-doctor-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	const size = 4 << 20
	if out, err := output(ctx, mke2fs, "-q", "-t", "ext4", image, fmt.Sprintf("%dk", size>>10)); err != nil {
		return fmt.Errorf("mke2fs: %w: %s", err, lastLine(out))
	}
	out, err := output(ctx, "unshare", "--mount", "--propagation", "private",
		"sh", "-c", `mount -o loop,ro "$1" "$2" && test -d "$2/lost+found" && umount "$2"`, "sh", image, at)
	if err != nil {
		return fmt.Errorf("mount: %w: %s", err, lastLine(out))
	}
	return nil
}

// lastLine returns the last line of out that says something.
func lastLine(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
