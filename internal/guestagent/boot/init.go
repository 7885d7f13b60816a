package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// deviceWait bounds the wait for the block devices. They appear within
// milliseconds of their modules; under TCG on a busy host within a few seconds.
// Twice as long only delays the message of a boot that has failed anyway.
const deviceWait = 30 * time.Second

const newRoot = "/newroot"

// Init is the initramfs's /init. It does not return unless it fails.
func Init() error {
	if err := mountKernelFileSystems(); err != nil {
		return err
	}
	if err := loadModules("/modules"); err != nil {
		return err
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read kernel command line: %w", err)
	}
	params := parseKernelParameters(string(cmdline))
	if err := waitForDevices(deviceWait, params.root, params.disk); err != nil {
		return err
	}
	if err := mountRoot(params); err != nil {
		return err
	}
	if err := moveMounts(); err != nil {
		return err
	}
	if err := switchRoot(); err != nil {
		return err
	}
	if err := unix.Exec(AgentPath, []string{AgentPath, "supervise"}, []string{"PATH=" + searchPath, "HOME=/root"}); err != nil {
		return fmt.Errorf("exec %s of the root image: %w", AgentPath, err)
	}
	return nil
}

func mountKernelFileSystems() error {
	for _, m := range []struct {
		kind, target string
		flags        uintptr
	}{
		{"proc", "/proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"sysfs", "/sys", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		{"devtmpfs", "/dev", unix.MS_NOSUID},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", m.target, err)
		}
		// EBUSY: the kernel mounted it (CONFIG_DEVTMPFS_MOUNT) or a test of an initramfs did.
		if err := unix.Mount(m.kind, m.target, m.kind, m.flags, ""); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return nil
}

// loadModules loads the modules a list names, one path a line, in its order. A
// module that needs one from further down is tried again after the others. No
// list means that the kernel has everything built in.
func loadModules(list string) error {
	content, err := os.ReadFile(list)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read module list: %w", err)
	}
	for paths := modulePaths(string(content)); len(paths) > 0; {
		var early []string
		var first error
		for _, path := range paths {
			err := loadModule(path)
			switch {
			case errors.Is(err, unix.ENOENT):
				early = append(early, path)
				if first == nil {
					first = err
				}
			case err != nil:
				return err
			}
		}
		if len(early) == len(paths) {
			return fmt.Errorf("%w (the file or a module it depends on is missing from the initramfs)", first)
		}
		paths = early
	}
	return nil
}

func modulePaths(list string) []string {
	var paths []string
	for line := range strings.Lines(list) {
		path := strings.TrimSpace(line)
		if path == "" || strings.HasPrefix(path, "#") {
			continue
		}
		paths = append(paths, filepath.Join("/", path))
	}
	return paths
}

// loadModule loads one module. ENOENT also means that a symbol it needs is not there.
func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open module: %w", err)
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", path, err)
	}
	return nil
}

// waitForDevices returns when all paths exist, or with an error that lists what there is instead.
func waitForDevices(limit time.Duration, paths ...string) error {
	deadline := time.Now().Add(limit)
	for _, path := range paths {
		for {
			if _, err := os.Stat(path); err == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("no device %s after %v; block devices here: %s", path, limit, blockDevices())
			}
			time.Sleep(2 * time.Millisecond)
		}
	}
	return nil
}

func blockDevices() string {
	entries, err := os.ReadDir("/sys/class/block")
	if err != nil || len(entries) == 0 {
		return "none"
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// mountRoot stacks the writable disk over the root image at newRoot.
func mountRoot(p kernelParameters) error {
	for _, dir := range []string{"/ro", "/rw", newRoot} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	err := unix.Mount(p.root, "/ro", "ext4", unix.MS_RDONLY, "dax=always")
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		say("%s has no DAX: its pages will be copied into guest memory", p.root)
		err = unix.Mount(p.root, "/ro", "ext4", unix.MS_RDONLY, "")
	}
	if err != nil {
		return fmt.Errorf("mount root image %s: %w", p.root, err)
	}
	// noinit_itable: no thread that writes to an idle disk for minutes.
	if err := unix.Mount(p.disk, "/rw", "ext4", unix.MS_NOATIME, "noinit_itable"); err != nil {
		return fmt.Errorf("mount disk %s: %w", p.disk, err)
	}
	for _, dir := range []string{"/rw/upper", "/rw/work"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make %s on the disk: %w", dir, err)
		}
	}
	if err := unix.Mount("overlay", newRoot, "overlay", unix.MS_NOATIME, "lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work"); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

func moveMounts() error {
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		target := newRoot + dir
		if err := os.MkdirAll(target, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", target, err)
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s into the new root: %w", dir, err)
		}
	}
	return nil
}

// switchRoot frees the initramfs and makes newRoot the root, as switch_root(8) does.
func switchRoot() error {
	var rootfs unix.Stat_t
	if err := unix.Lstat("/", &rootfs); err != nil {
		return fmt.Errorf("stat initramfs: %w", err)
	}
	if err := unix.Chdir(newRoot); err != nil {
		return fmt.Errorf("enter new root: %w", err)
	}
	// Deleting is what gives the initramfs's memory back; it must never cross
	// into a mounted file system.
	removeBelow("/", rootfs.Dev)
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move new root to /: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot into new root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter /: %w", err)
	}
	return nil
}

// removeBelow deletes what is below dir on the device dev. What cannot be
// deleted stays: it costs memory, not correctness.
func removeBelow(dir string, dev uint64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Dev != dev {
			continue
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			removeBelow(path, dev)
			_ = unix.Rmdir(path) // fails for the directories that are mount points or hold one
			continue
		}
		_ = unix.Unlink(path)
	}
}
