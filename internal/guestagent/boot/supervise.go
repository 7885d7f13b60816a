package boot

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Signals to PID 1 that end the guest. The agent sends them on Shutdown.
const (
	SignalPowerOff = unix.SIGTERM
	SignalReboot   = unix.SIGINT // also what the kernel sends for ctrl-alt-del
)

const (
	// restartDelay is the pause before a dead agent is started again; it doubles
	// up to maxRestartDelay, so that an agent that cannot start does not eat the core.
	restartDelay    = 50 * time.Millisecond
	maxRestartDelay = 5 * time.Second
	// steadyRun is how long an agent must have lived for the delay to start over.
	steadyRun = 10 * time.Second
	// endGrace is what processes get between SIGTERM and SIGKILL at the end of
	// the guest. Longer delays each orderly shutdown by a stubborn process.
	endGrace = 500 * time.Millisecond
)

// protectedScore keeps the guest's OOM killer away from PID 1 and the agent.
const protectedScore = "-1000"

// Supervise is PID 1 after the root was switched. It does not return unless it fails.
func Supervise() error {
	if os.Getpid() != 1 {
		return errors.New("supervise runs as PID 1 of a guest only")
	}
	settle()

	var ending atomic.Bool // set before the end begins: the agent is not started again
	requests := make(chan os.Signal, 1)
	signal.Notify(requests, SignalPowerOff, SignalReboot)
	go func() {
		how := <-requests
		ending.Store(true)
		endGuest(how == SignalReboot)
	}()

	delay := restartDelay
	for {
		born := time.Now()
		agent, err := startAgent()
		if err != nil {
			return err
		}
		status := reapUntil(agent)
		for ending.Load() {
			time.Sleep(time.Second) // endGuest is about to stop the machine
		}
		if time.Since(born) > steadyRun {
			delay = restartDelay
		}
		say("the agent died (%s), starting it again in %v", describe(status), delay)
		time.Sleep(delay)
		delay = min(2*delay, maxRestartDelay)
	}
}

// startAgent returns the pid of a new agent. Its score against the OOM killer
// is inherited from PID 1.
func startAgent() (int, error) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(protectedScore), 0); err != nil {
		say("protect from the OOM killer: %v", err)
	}
	pid, err := syscall.ForkExec(AgentPath, []string{AgentPath, "agent"}, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{"PATH=" + searchPath, "HOME=/root", "USER=root", "LOGNAME=root"},
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, fmt.Errorf("start agent %s: %w", AgentPath, err)
	}
	return pid, nil
}

// reapUntil collects dead children, its own and the orphans of the guest, until
// pid is among them.
func reapUntil(pid int) unix.WaitStatus {
	for {
		var status unix.WaitStatus
		dead, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && dead == pid {
			return status
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return status // ECHILD: somebody else reaped the agent; it is gone all the same
		}
	}
}

func describe(status unix.WaitStatus) string {
	if status.Signaled() {
		return unix.SignalName(status.Signal())
	}
	return fmt.Sprintf("exit %d", status.ExitStatus())
}

// endGuest stops all processes, writes everything to the disk and stops the machine.
func endGuest(reboot bool) {
	_ = unix.Kill(-1, unix.SIGTERM)
	time.Sleep(endGrace)
	_ = unix.Kill(-1, unix.SIGKILL)
	unix.Sync()
	how := unix.LINUX_REBOOT_CMD_POWER_OFF
	if reboot {
		how = unix.LINUX_REBOOT_CMD_RESTART
	}
	err := unix.Reboot(how)
	say("stop the machine: %v", err)
	os.Exit(1) // panic=-1 resets
}
