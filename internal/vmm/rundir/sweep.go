package rundir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/vmm/cgroup"
)

// Sweep removes what dead runs of the two roots left: processes, control groups,
// folders. It returns the ids of the runs it removed; live runs are not touched.
func Sweep(runRoot, stateRoot string) ([]string, error) {
	var swept []string
	var errs []error
	for _, root := range []string{runRoot, filepath.Join(stateRoot, stateRuns)} {
		ids, err := sweepRoot(root)
		swept = append(swept, ids...)
		errs = append(errs, err)
	}
	return swept, errors.Join(errs...)
}

// sweepRoot serves both roots: the folder of a dead run in the state root has no
// record once the run root is gone (a tmpfs after a reboot) and just goes.
func sweepRoot(root string) ([]string, error) {
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	lock, err := lockRoot(root)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	var swept []string
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || !idPattern.MatchString(e.Name()) {
			continue
		}
		removed, err := sweepRun(filepath.Join(root, e.Name()))
		if removed {
			swept = append(swept, e.Name())
		}
		errs = append(errs, err)
	}
	return swept, errors.Join(errs...)
}

// sweepRun removes one run if its process is dead.
func sweepRun(dir string) (removed bool, err error) {
	f, err := os.Open(dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, err
	}
	defer f.Close()
	if err := flock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil // alive
		}
		return false, fmt.Errorf("lock %s: %w", dir, err)
	}
	return removeDead(f, dir)
}

// removeDead removes a run whose lock the caller holds through f.
func removeDead(f *os.File, dir string) (removed bool, err error) {
	if !isAt(f, dir) {
		return false, nil // another sweeper was faster
	}
	rec, err := readRecord(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		rec = record{} // it died before it recorded, so before it made, anything
	case err != nil:
		return false, err
	}
	if err := removeRun(dir, rec); err != nil {
		return false, fmt.Errorf("remove dead run %s: %w", filepath.Base(dir), err)
	}
	return true, nil
}

// removeRun ends the run's processes and removes what the record names; the
// folder itself only when the rest is gone, so that a failure is tried again.
func removeRun(dir string, rec record) error {
	err := errors.Join(killRecorded(dir), cgroup.Destroy(rec.Groups))
	if rec.State != "" {
		err = errors.Join(err, os.RemoveAll(rec.State))
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// killRecorded kills the processes that RecordProcess noted and waits for them.
func killRecorded(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "pid-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // forgotten meanwhile
		}
		pid, start, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
		if n, err := strconv.Atoi(pid); err == nil && n > 1 {
			errs = append(errs, killProcess(n, start))
		}
	}
	return errors.Join(errs...)
}

// killProcess kills the process that had this pid at this start time.
func killProcess(pid int, start string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // gone
	}
	defer unix.Close(fd)
	// Compared after the descriptor is open: from here on it means this process only.
	if now, err := startTime(pid); err != nil || now != start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return nil
	}
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(poll, 1000); err == nil && n == 1 {
			return nil
		}
	}
	return fmt.Errorf("process %d survives SIGKILL", pid)
}
