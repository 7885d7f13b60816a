package vmm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A launcher forks VMMs from one OS thread that lives as long as the Host.
//
// The kernel sends a parent-death signal when the parent's THREAD ends
// (prctl(2), PR_SET_PDEATHSIG), and Go ends threads when it likes: forked from an
// ordinary goroutine, a VMM would die at random. The thread also carries
// no_new_privs, which VMMs inherit and which the rest of this process must not have.
type launcher struct {
	jobs chan launch
	done chan struct{} // closed when the thread has ended
}

type launch struct {
	argv   []string
	attr   *os.ProcAttr
	result chan<- launched
}

type launched struct {
	process *os.Process
	err     error
}

func newLauncher() (*launcher, error) {
	l := &launcher{jobs: make(chan launch), done: make(chan struct{})}
	ready := make(chan error)
	go l.run(ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return l, nil
}

// run never unlocks its thread: the runtime ends the thread with the goroutine,
// and threads it needs meanwhile are cloned from a clean one.
func (l *launcher) run(ready chan<- error) {
	defer close(l.done)
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		ready <- fmt.Errorf("set no_new_privs: %w", err)
		return
	}
	ready <- nil
	for j := range l.jobs {
		// Go opens everything close-on-exec, but what this process itself inherited is
		// none of a VMM's business. os/exec undoes the flag on what it means to pass.
		_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
		p, err := os.StartProcess(j.argv[0], j.argv, j.attr)
		j.result <- launched{p, err}
	}
}

// start forks and execs on the launcher's thread. A failure that only a missing
// executable explains says so.
func (l *launcher) start(argv []string, attr *os.ProcAttr) (*os.Process, error) {
	result := make(chan launched, 1)
	l.jobs <- launch{argv, attr, result}
	r := <-result
	if errors.Is(r.err, unix.EINVAL) {
		return nil, fmt.Errorf("%w (are user ids from %d mapped in this user namespace?)", r.err, UIDBase)
	}
	return r.process, r.err
}

// stop ends the thread; every VMM still alive dies with it. No start may follow.
func (l *launcher) stop() {
	close(l.jobs)
	<-l.done
}
