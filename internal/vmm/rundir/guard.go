package rundir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// guardPause is how long the owner waits before it replaces a guard that died;
// twice as much for each that lived less than a minute. It is the time in which
// killing the owner too leaves the rest to the next sweep.
const guardPause = 50 * time.Millisecond

// guard is the owner's view of its guard process.
type guard struct {
	stopping chan struct{} // closed by stop
	stopped  chan struct{} // closed when the keeper goroutine has ended
}

// StartGuard starts the guard unless it runs already. Call it before the first
// thing that must not outlive this process.
func (r *Run) StartGuard() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("start guard of run %s: run is closed", r.id)
	}
	if r.guard != nil {
		return nil
	}
	cmd, pipe, err := r.spawnGuard()
	if err != nil {
		return fmt.Errorf("start guard: %w", err)
	}
	g := &guard{stopping: make(chan struct{}), stopped: make(chan struct{})}
	r.guard = g
	go r.keepGuard(g, cmd, pipe)
	return nil
}

// spawnGuard starts one guard process; closing the pipe sets it to work.
func (r *Run) spawnGuard() (*exec.Cmd, *os.File, error) {
	in, out, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	//nolint:noctx // it must outlive us
	cmd := exec.Command(r.guardArgs[0], append(r.guardArgs[1:len(r.guardArgs):len(r.guardArgs)], r.dir)...)
	cmd.Stdin = in
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = in.Close()
	if err != nil {
		_ = out.Close()
		return nil, nil, err
	}
	return cmd, out, nil
}

// keepGuard replaces the guard when it dies, until stop.
func (r *Run) keepGuard(g *guard, cmd *exec.Cmd, pipe *os.File) {
	defer close(g.stopped)
	pause := guardPause
	for {
		born := time.Now()
		died := make(chan struct{})
		if cmd != nil {
			go func() { _ = cmd.Wait(); close(died) }()
			select {
			case <-g.stopping:
				_ = pipe.Close()
				<-died
				return
			case <-died:
			}
			_ = pipe.Close()
			r.log.Warn("the guard process died and is replaced", "run", r.id, "state", cmd.ProcessState.String())
		}
		if time.Since(born) > time.Minute {
			pause = guardPause
		}
		select {
		case <-g.stopping:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, 10*time.Second)
		var err error
		if cmd, pipe, err = r.spawnGuard(); err != nil {
			r.log.Error("cannot start the guard process", "run", r.id, "err", err)
			cmd = nil
		}
	}
}

func (g *guard) stop() {
	close(g.stopping)
	<-g.stopped
}

// GuardMain is the guard process: it waits until its standard input ends, which
// is when the owner of the run folder closed the run or died, and removes the
// run if it is still there. The caller exits with the error's presence.
func GuardMain(dir string) error {
	// A terminal's ^C and a service manager's TERM are meant for the owner; the
	// guard ends when the owner has.
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGPIPE)
	if !idPattern.MatchString(filepath.Base(dir)) {
		return fmt.Errorf("guard: %q is no run folder", dir)
	}
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	defer f.Close()
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return fmt.Errorf("guard: wait for the owner: %w", err)
	}
	// Closed properly, the folder is gone. Else the lock is free as soon as the
	// owner's last descriptor is; a sweeper may hold it meanwhile.
	if err := flock(f, unix.LOCK_EX); err != nil {
		return fmt.Errorf("guard: lock %s: %w", dir, err)
	}
	rec, err := readRecord(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("guard: %w", err)
	}
	if _, err := removeDead(f, dir); err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	if rec.State != "" {
		pruneRoots(filepath.Dir(dir), filepath.Dir(filepath.Dir(rec.State)), rec.Groups)
	}
	return nil
}
