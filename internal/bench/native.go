package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/agentzip/agentzip/internal/traj"
)

// NativeVerb is the hidden verb of the program that runs NativeMain. ReplayNative
// starts the program with it.
const NativeVerb = "native-replay"

// A NativeSpec says what to run without a VM.
type NativeSpec struct {
	Exe       []string // this program with NativeVerb, e.g. /usr/bin/agentzip native-replay
	RootImage string   // ext4 root image of the template; only read
	Plans     []Plan
	Budget    time.Duration // for everything; calls past it stay unknown. 0 = 40 s
}

const (
	// defaultNativeBudget keeps the demo within its time; the built-in scenario
	// needs 15-20 s on one core.
	defaultNativeBudget = 40 * time.Second

	// nativeCallTimeout: a call that needs longer is unknown rather than a hole
	// in the budget.
	nativeCallTimeout = 15 * time.Second

	// nativeUser is uid and gid of the template's account "user".
	nativeUser = 1000
)

// nativeJob is what the child gets on stdin.
type nativeJob struct {
	Root    string         `json:"root"`
	Lanes   [][]nativeCall `json:"lanes"`
	Env     []string       `json:"env"`
	Cwd     string         `json:"cwd"`
	Budget  time.Duration  `json:"budget"`
	Timeout time.Duration  `json:"timeout"`
}

type nativeCall struct {
	Shell string `json:"shell"`
}

// nativeTime is one line of the child's stdout.
type nativeTime struct {
	Lane int           `json:"lane"`
	Call int           `json:"call"`
	Took time.Duration `json:"took"`
}

// ReplayNative runs the plans' commands on this machine without a VM, one after
// the other, each trajectory in a fresh copy of the template's root file system,
// and times them.
//
// The commands run in a child process with namespaces of its own for mounts,
// processes, network (loopback only), IPC and host name, as an unprivileged
// user, below a chroot without set-uid programs and devices. That keeps a
// mistake from hurting the host; it is no sandbox for hostile commands. When the
// child dies, whatever the reason, the kernel removes its mounts, its loop
// device and its processes.
//
// It never fails: NativeResult.Missing says why nothing was measured.
func ReplayNative(ctx context.Context, spec NativeSpec) NativeResult {
	res := NativeResult{Durations: make([][]time.Duration, len(spec.Plans))}
	job := nativeJob{Root: spec.RootImage, Cwd: traj.WorkTree, Budget: spec.Budget, Timeout: nativeCallTimeout}
	if job.Budget <= 0 {
		job.Budget = defaultNativeBudget
	}
	for k, v := range traj.Environment() {
		job.Env = append(job.Env, k+"="+v)
	}
	total := 0
	for i, p := range spec.Plans {
		var calls []nativeCall
		for _, s := range p.Trajectory.Steps {
			calls = append(calls, nativeCall{s.Shell})
		}
		job.Lanes = append(job.Lanes, calls)
		res.Durations[i] = make([]time.Duration, len(calls))
		total += len(calls)
	}
	times, err := runNativeChild(ctx, spec.Exe, job)
	known := 0
	for _, t := range times {
		if t.Lane >= 0 && t.Lane < len(res.Durations) && t.Call >= 0 && t.Call < len(res.Durations[t.Lane]) && t.Took > 0 {
			res.Durations[t.Lane][t.Call] = t.Took
			known++
		}
	}
	switch {
	case known == 0 && err != nil:
		return NativeResult{Missing: err.Error()}
	case known == 0:
		return NativeResult{Missing: "no command ended within the time allowed"}
	case err != nil:
		res.Notes = append(res.Notes, fmt.Sprintf("native durations are known for %d of %d calls: %v", known, total, err))
	case known < total:
		res.Notes = append(res.Notes, fmt.Sprintf("native durations are known for %d of %d calls; the rest timed out or was beyond the budget of %v", known, total, job.Budget))
	}
	return res
}

// runNativeChild starts the child, gives it the job and collects what it
// measured until it ends.
func runNativeChild(ctx context.Context, exe []string, job nativeJob) ([]nativeTime, error) {
	input, err := json.Marshal(job)
	if err != nil {
		return nil, fmt.Errorf("encode native job: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, job.Budget+job.Timeout+10*time.Second)
	defer cancel()
	// Pdeathsig is sent when the thread that forked ends, so it must not end.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, exe[0], exe[1:]...)
	cmd.Stdin = bytes.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 2 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Pdeathsig:  syscall.SIGKILL, // the first process of a PID namespace takes all others with it
	}
	err = cmd.Run()
	var times []nativeTime
	dec := json.NewDecoder(&stdout)
	for {
		var t nativeTime
		if derr := dec.Decode(&t); derr != nil {
			if !errors.Is(derr, io.EOF) && err == nil {
				err = fmt.Errorf("read native durations: %w", derr)
			}
			break
		}
		times = append(times, t)
	}
	if err != nil {
		if text := strings.TrimSpace(stderr.String()); text != "" {
			text, _, _ = strings.Cut(text, "\n")
			return times, errors.New(text)
		}
		return times, fmt.Errorf("start commands without a VM: %w", err)
	}
	return times, nil
}
