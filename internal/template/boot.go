package template

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/vmm"
)

const (
	// bootLimit bounds the boot to the agent's first answer: 10 s under TCG on a busy 2-core host.
	// Halved, two builds on a busy host fail; doubled, a guest that hangs is noticed late.
	bootLimit = 3 * time.Minute
	// warmUpLimit bounds one warm-up command. Test suites take minutes under TCG.
	warmUpLimit = 20 * time.Minute
	// setUpLimit bounds a command that writes one word. Under TCG on a busy host it takes a second.
	setUpLimit = time.Minute
	// startLimit bounds the time until the start command is ready: a Python server takes half a minute under TCG.
	startLimit = 10 * time.Minute
	// readyPause is between two tries of the ready command. Shorter keeps the guest from starting.
	readyPause = 500 * time.Millisecond
	// helloLimit is one try to reach the agent; before it runs nobody answers.
	helloLimit = 2 * time.Second
	// deathGrace is how long a broken link may precede the VMM's end. Reaping takes milliseconds.
	deathGrace = 2 * time.Second
	// tailLimit is how much of a failed command's output an error shows.
	tailLimit = 2 << 10
)

// startLog is where the output of the start command goes.
const startLog = "/tmp/.agentzip-start.log"

// startLine leaves a command running in a session of its own.
func startLine(command string) string {
	quoted := "'" + strings.ReplaceAll(command, "'", `'\''`) + "'"
	return "setsid --fork /bin/bash -l -c " + quoted + " < /dev/null > " + startLog + " 2>&1"
}

// StartCommand is the template's start command as a guest that was booted from its disk alone
// must run it; false if the template has none.
func (m *Manifest) StartCommand() (guestlink.Command, bool) {
	return guestlink.Command{Shell: startLine(m.Start), Cwd: m.WorkDir, User: rootfs.UserName, Timeout: setUpLimit}, m.Start != ""
}

// boot starts the guest once, warms it up and saves it.
//
//	boot -> agent answers -> warm-up commands -> quiesce -> link closed -> stopped
//	     -> device state saved -> VMM gone -> memory and disk are final
func (b *build) boot(ctx context.Context) error {
	im, err := guestmem.NewImage(b.spec.Hardware.Memory)
	if err != nil {
		return fmt.Errorf("make guest memory: %w", err)
	}
	defer func() { _ = im.Close() }()
	if err := b.runGuest(ctx, im); err != nil {
		return err
	}
	pulse := b.report.Heartbeat(ctx, "boot", "writing memory")
	defer pulse.Stop()
	if err := im.PunchZeroPages(); err != nil {
		return fmt.Errorf("save memory: %w", err)
	}
	if err := im.Seal(); err != nil {
		return fmt.Errorf("save memory: %w", err)
	}
	if err := im.WriteSparse(b.outFile(memoryFile)); err != nil {
		return fmt.Errorf("save memory: %w", err)
	}
	b.manifest.Resident = im.Resident()
	return nil
}

// runGuest is boot up to the point where nothing of the VMM is left.
func (b *build) runGuest(ctx context.Context, im *guestmem.Image) error {
	m, err := b.start(ctx, im)
	if err != nil {
		return err
	}
	defer m.Kill()
	// A guest that dies ends whatever waits for it, with its last words as the cause.
	alive, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-m.Done():
			cancel(fmt.Errorf("guest ended (%s): %s", m.Exit().Cause, b.explainConsole(m.Console())))
		case <-alive.Done():
		}
	}()
	if err := m.Resume(alive); err != nil {
		return fmt.Errorf("start guest: %w", err)
	}
	if err := b.useGuest(alive, m); err != nil {
		if cause := context.Cause(alive); cause != nil {
			return cause
		}
		return err
	}
	if err := m.Stop(alive); err != nil {
		return fmt.Errorf("stop guest: %w", err)
	}
	state, err := os.OpenFile(b.outFile(stateFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("save device state: %w", err)
	}
	err = m.SaveState(alive, state)
	if cerr := state.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("save device state: %w", err)
	}
	return nil
}

// start launches the VMM on the new template's files.
func (b *build) start(ctx context.Context, im *guestmem.Image) (vmm.Machine, error) {
	root, err := os.Open(b.outFile(rootFile))
	if err != nil {
		return nil, fmt.Errorf("open root image: %w", err)
	}
	defer func() { _ = root.Close() }()
	disk, err := os.OpenFile(b.outFile(diskFile), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open disk: %w", err)
	}
	defer func() { _ = disk.Close() }()
	m, err := b.spec.Launcher.Start(ctx, vmm.Spec{
		Mode: vmm.Boot, Hardware: b.spec.Hardware,
		Memory: im.File(), Root: root, Disk: disk,
		Kernel: b.outFile(kernelFile), Initrd: b.outFile(initrdFile), Cmdline: b.spec.DeadPages.cmdline(),
	})
	if err != nil {
		return nil, fmt.Errorf("start VMM: %w", err)
	}
	return m, nil
}

// useGuest waits for the agent, runs the warm-up commands and leaves the guest quiet, its link closed.
func (b *build) useGuest(ctx context.Context, m vmm.Machine) error {
	link := guestlink.New(m.Link())
	defer func() { _ = link.Close() }()
	begin := time.Now()
	health, err := b.awaitAgent(ctx, link, m)
	if err != nil {
		return err
	}
	b.manifest.Agent.Version = health.AgentVersion
	b.report.Say("boot", "guest is up after %.1f s", time.Since(begin).Seconds())
	if err := b.setUp(ctx, link); err != nil {
		return err
	}
	for i, cmd := range b.spec.WarmUp {
		if err := b.warmUp(ctx, link, i, cmd); err != nil {
			return err
		}
	}
	if err := b.startServer(ctx, link); err != nil {
		return err
	}
	if err := link.Quiesce(ctx); err != nil {
		return fmt.Errorf("quiesce guest: %w", err)
	}
	b.report.Done("boot", "guest is warm after %.1f s", time.Since(begin).Seconds())
	if err := link.Close(); err != nil {
		return fmt.Errorf("close link: %w", err)
	}
	return nil
}

func (b *build) awaitAgent(ctx context.Context, link *guestlink.Client, m vmm.Machine) (guestlink.Health, error) {
	pulse := b.report.Heartbeat(ctx, "boot", "waiting for the guest")
	defer pulse.Stop()
	limit := time.Now().Add(bootLimit)
	for {
		try, cancel := context.WithTimeout(ctx, helloLimit)
		health, err := link.Health(try)
		cancel()
		if err == nil {
			return health, nil
		}
		down := errors.Is(err, guestlink.ErrLinkDown)
		if down { // the VMM's end, which says why, is known a moment later
			select {
			case <-ctx.Done():
			case <-time.After(deathGrace):
			}
		}
		if ctx.Err() != nil {
			return health, context.Cause(ctx)
		}
		if down || time.Now().After(limit) {
			return health, fmt.Errorf("the guest agent does not answer: %s: %w", b.explainConsole(m.Console()), err)
		}
	}
}

// setUp does in the guest what its way with dead pages needs and no command line can say.
func (b *build) setUp(ctx context.Context, link *guestlink.Client) error {
	line := b.spec.DeadPages.setUp()
	if line == "" {
		return nil
	}
	var out tailBuffer
	exit, err := link.Run(ctx, guestlink.Command{Shell: line, Cwd: "/", User: "root", Timeout: setUpLimit}, &out, &out)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%q ended with code %d: %s", line, exit.Code, out.String())
	}
	if err != nil {
		return fmt.Errorf("set up reports of free pages (--dead-pages %s): %w", b.spec.DeadPages, err)
	}
	return nil
}

// warmUp runs command number i as the user and fails with the end of its output.
func (b *build) warmUp(ctx context.Context, link *guestlink.Client, i int, cmd string) error {
	pulse := b.report.Heartbeat(ctx, "boot", "")
	defer pulse.Stop()
	pulse.Set(int64(i), int64(len(b.spec.WarmUp)), "warming up: %s", firstLine(cmd))
	var out tailBuffer
	exit, err := link.Run(ctx, guestlink.Command{
		Shell: cmd, Cwd: b.spec.WorkDir, User: rootfs.UserName, Timeout: warmUpLimit,
	}, &out, &out)
	if err != nil {
		return fmt.Errorf("run warm-up command %q: %w", firstLine(cmd), err)
	}
	if exit.Code == 0 && exit.Signal == "" && !exit.TimedOut {
		return nil
	}
	how := fmt.Sprintf("code %d", exit.Code)
	switch {
	case exit.TimedOut:
		how = fmt.Sprintf("no end after %v", warmUpLimit)
	case exit.Signal != "":
		how = "signal " + exit.Signal
	}
	return fmt.Errorf("%w: %q (%s); its output ends:\n%s", ErrWarmUp, firstLine(cmd), how, out.String())
}

// startServer leaves the start command running and waits until it is ready. The session it gets
// keeps it apart from the agent's processes: nobody waits for its output.
func (b *build) startServer(ctx context.Context, link *guestlink.Client) error {
	if b.spec.Start == "" {
		return nil
	}
	pulse := b.report.Heartbeat(ctx, "boot", "")
	defer pulse.Stop()
	pulse.Set(0, 0, "starting: %s", firstLine(b.spec.Start))
	run := func(line string) (guestlink.Exit, string, error) {
		var out tailBuffer
		exit, err := link.Run(ctx, guestlink.Command{
			Shell: line, Cwd: b.spec.WorkDir, User: rootfs.UserName, Timeout: setUpLimit,
		}, &out, &out)
		return exit, out.String(), err
	}
	exit, out, err := run(startLine(b.spec.Start))
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("%w: code %d: %s", ErrWarmUp, exit.Code, out)
	}
	if err != nil {
		return fmt.Errorf("run start command %q: %w", firstLine(b.spec.Start), err)
	}
	for limit := time.Now().Add(startLimit); b.spec.Ready != ""; {
		exit, out, err := run(b.spec.Ready)
		if err != nil {
			return fmt.Errorf("run ready command %q: %w", firstLine(b.spec.Ready), err)
		}
		if exit.Code == 0 && exit.Signal == "" {
			return nil
		}
		if time.Now().After(limit) {
			_, log, _ := run("tail -c 2000 " + startLog)
			return fmt.Errorf("%w: not ready after %v: %s\n%s", ErrWarmUp, startLimit, out, log)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(readyPause):
		}
	}
	return nil
}

func firstLine(s string) string {
	s, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	if len(s) > 80 {
		return s[:77] + "..."
	}
	if more {
		return s + " ..."
	}
	return s
}

func tail(b []byte) string {
	b = bytes.TrimSpace(b)
	return strings.ToValidUTF8(string(b[max(0, len(b)-tailLimit):]), "?")
}

// tailBuffer keeps the end of what is written to it. Safe for concurrent use: a command's
// stdout and stderr go to one.
type tailBuffer struct {
	mu   sync.Mutex
	keep []byte // guarded by mu
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keep = append(t.keep, p...)
	if over := len(t.keep) - tailLimit; over > tailLimit {
		t.keep = append(t.keep[:0], t.keep[over:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return tail(t.keep)
}

var _ Launcher = (*vmm.Host)(nil)
