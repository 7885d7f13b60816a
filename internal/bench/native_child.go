package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestagent/boot"
)

// warmUpBudget bounds the untimed first pass that fills the page cache.
const warmUpBudget = 8 * time.Second

// NativeMain is the child's side of ReplayNative: process 1 of its own
// namespaces. It reads a job from in, writes durations to out, and mounts only
// what ends with it. Started by hand, outside new namespaces, it refuses.
func NativeMain(in io.Reader, out io.Writer) error {
	if os.Getpid() != 1 {
		return errors.New("native replay: this verb is started by agentzip itself, in namespaces of its own")
	}
	var job nativeJob
	if err := json.NewDecoder(in).Decode(&job); err != nil {
		return fmt.Errorf("native replay: read job: %w", err)
	}
	j := &jail{}
	if err := j.prepare(job.Root); err != nil {
		return fmt.Errorf("native replay: %w", err)
	}
	deadline := time.Now().Add(job.Budget)
	if len(job.Lanes) > 0 {
		err := j.replay(job, job.Lanes[0], time.Now().Add(warmUpBudget), func(int, time.Duration) error { return nil })
		if err != nil {
			return fmt.Errorf("native replay: warm up: %w", err)
		}
	}
	enc := json.NewEncoder(out)
	for i, lane := range job.Lanes {
		err := j.replay(job, lane, deadline, func(n int, took time.Duration) error {
			return enc.Encode(nativeTime{Lane: i, Call: n, Took: took})
		})
		if err != nil {
			return fmt.Errorf("native replay: %w", err)
		}
	}
	return nil
}

// A jail is where the commands run: a writable overlay over the root image.
type jail struct {
	base string // a tmpfs with everything in it
	root string // the overlay of the current trajectory
	used int    // overlays made so far
}

// jailSize bounds what a trajectory may write, in the tmpfs.
const jailSize = "size=1g"

// prepare makes all mounts private and mounts the root image, read-only.
func (j *jail) prepare(image string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Opened before the mounts below can cover it.
	f, err := os.Open(image)
	if err != nil {
		return fmt.Errorf("open root image: %w", err)
	}
	defer f.Close()
	j.base = "/mnt"
	if _, err := os.Stat(j.base); err != nil {
		j.base = os.TempDir()
	}
	if err := unix.Mount("tmpfs", j.base, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, jailSize); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", j.base, err)
	}
	dev, err := attachLoop(f)
	if err != nil {
		return err
	}
	defer dev.Close()
	lower := filepath.Join(j.base, "lower")
	if err := os.Mkdir(lower, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	// noload: the image is read-only, its journal cannot be replayed.
	if err := unix.Mount(dev.Name(), lower, "ext4", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, "noload"); err != nil {
		return fmt.Errorf("mount root image %s: %w", image, err)
	}
	if err := boot.RaiseLoopback(); err != nil { // tests talk to themselves in the empty network namespace
		return fmt.Errorf("bring up loopback: %w", err)
	}
	return nil
}

// attachLoop binds f to a free loop device, read-only. The device frees itself
// when its last user, the mount, is gone.
func attachLoop(f *os.File) (*os.File, error) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open loop control: %w", err)
	}
	defer ctl.Close()
	for range 16 { // somebody else may take the free device first
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDONLY, 0)
		if err != nil {
			return nil, fmt.Errorf("open loop device: %w", err)
		}
		cfg := unix.LoopConfig{Fd: uint32(f.Fd())}
		cfg.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &cfg)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attach root image to a loop device: %w", err)
		}
	}
	return nil, errors.New("attach root image: all loop devices were taken meanwhile")
}

// fresh replaces the overlay by an empty one.
func (j *jail) fresh() error {
	if j.root != "" {
		// Lazily: a command may have left processes behind in it.
		if err := unix.Unmount(j.root, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount overlay: %w", err)
		}
		if err := os.RemoveAll(filepath.Dir(j.root)); err != nil {
			return fmt.Errorf("remove overlay: %w", err)
		}
	}
	j.used++
	dir := filepath.Join(j.base, fmt.Sprintf("lane%d", j.used))
	for _, d := range []string{"upper", "work", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return fmt.Errorf("make overlay: %w", err)
		}
	}
	j.root = filepath.Join(dir, "root")
	opts := "lowerdir=" + filepath.Join(j.base, "lower") + ",upperdir=" + filepath.Join(dir, "upper") + ",workdir=" + filepath.Join(dir, "work")
	if err := unix.Mount("overlay", j.root, "overlay", unix.MS_NODEV|unix.MS_NOSUID, opts); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	proc, dev := filepath.Join(j.root, "proc"), filepath.Join(j.root, "dev")
	for _, d := range []string{proc, dev} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return fmt.Errorf("make mount point: %w", err)
		}
	}
	if err := unix.Mount("proc", proc, "proc", unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Mount("tmpfs", dev, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=1m,mode=755"); err != nil {
		return fmt.Errorf("mount dev: %w", err)
	}
	for _, name := range []string{"null", "zero", "full", "random", "urandom"} {
		p := filepath.Join(dev, name)
		if err := os.WriteFile(p, nil, 0o644); err != nil {
			return fmt.Errorf("make device: %w", err)
		}
		if err := unix.Mount("/dev/"+name, p, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind device %s: %w", name, err)
		}
	}
	if err := os.Symlink("/proc/self/fd", filepath.Join(dev, "fd")); err != nil {
		return fmt.Errorf("make device: %w", err)
	}
	return nil
}

// replay runs one trajectory in a fresh overlay until the deadline.
func (j *jail) replay(job nativeJob, lane []nativeCall, deadline time.Time, took func(n int, d time.Duration) error) error {
	if err := j.fresh(); err != nil {
		return err
	}
	for n, c := range lane {
		left := min(time.Until(deadline), job.Timeout)
		if left <= 0 {
			return nil
		}
		d, err := j.run(job, c, left)
		if err != nil {
			return fmt.Errorf("call %d: %w", n+1, err)
		}
		if d == 0 {
			continue // timed out: unknown
		}
		if err := took(n, d); err != nil {
			return fmt.Errorf("report duration: %w", err)
		}
	}
	return nil
}

// run runs one command and returns its duration, or 0 if it timed out.
func (j *jail) run(job nativeJob, c nativeCall, timeout time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/bash", "-l", "-c", c.Shell)
	cmd.Err = nil // bash is looked for in the jail, not here
	cmd.Path = "/bin/bash"
	cmd.Dir = job.Cwd
	cmd.Env = slices.Concat([]string{"HOME=/home/user", "USER=user", "LOGNAME=user", "SHELL=/bin/bash", "PATH=/usr/local/bin:/usr/bin:/bin"}, job.Env)
	cmd.Stdout, cmd.Stderr = io.Discard, io.Discard
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:     j.root,
		Credential: &syscall.Credential{Uid: nativeUser, Gid: nativeUser},
		Setsid:     true,
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	begin := time.Now()
	err := cmd.Run()
	d := time.Since(begin)
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil || errors.Is(err, exec.ErrWaitDelay):
		return 0, nil
	case err == nil || errors.As(err, &exit):
		return d, nil
	}
	return 0, fmt.Errorf("run command: %w", err)
}
