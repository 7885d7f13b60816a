package vmm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm/cgroup"
	"github.com/agentzip/agentzip/internal/vmm/qmp"
)

const (
	consoleLimit = 64 << 10
	logLimit     = 16 << 10

	// exitGrace is how long a VMM that has closed its log or QMP may take to end
	// before it is killed. Twice as long only delays the report.
	exitGrace = 2 * time.Second

	exitOrphan = 70 // the shim's status when its socket closed (EXIT_ORPHAN of shim.c)
)

// machine is the Machine that a Host starts.
type machine struct {
	host *Host
	spec Spec     // immutable; its files are not used after start
	hw   Hardware // immutable; filled
	id   string   // immutable after reserve
	uid  int      // immutable after reserve

	disk units.Bytes // immutable after spawn; the disk's size, 0: none

	group  *cgroup.Group // immutable after spawn
	qmp    *qmp.Client   // immutable after connect; nil if that failed
	timing Timing        // guarded by mu once start has returned

	console, log *ring
	connected    chan struct{}  // closed by start when qmp is what it will be
	migration    chan string    // states of a migration; fed by event
	copies       atomic.Int64   // copies of the disk ever begun
	drains       sync.WaitGroup // the goroutines that feed the rings
	done         chan struct{}  // closed by the reaper

	mu       sync.Mutex
	process  *os.Process    // guarded by mu; set once by spawn
	killed   bool           // guarded by mu; Kill was called
	link     net.Conn       // guarded by mu
	wire     *Wire          // guarded by mu; whose link it is; nil: the link is the machine's own
	prepared bool           // guarded by mu; a clone without device state yet
	shim     *guestmem.Shim // guarded by mu; nil without one; closed by the reaper
	shutdown string         // guarded by mu; the reason of QEMU's SHUTDOWN event
	panicked bool           // guarded by mu; QEMU saw the guest panic
	exit     Exit           // guarded by mu; final once done is closed
}

func (m *machine) ID() string            { return m.id }
func (m *machine) UID() int              { return m.uid }
func (m *machine) Console() []byte       { return m.console.bytes() }
func (m *machine) Log() []byte           { return m.log.bytes() }
func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) Timing() Timing {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.timing
}

func (m *machine) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.process.Pid
}

func (m *machine) Link() net.Conn {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.link
}

func (m *machine) Exit() Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// Kill ends the VMM and waits until Done.
func (m *machine) Kill() {
	m.end()
	<-m.done
}

// end kills the process, or sees to it that spawn does.
func (m *machine) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.killed = true
	if m.process != nil {
		_ = m.process.Kill()
	}
}

// watch starts the goroutines that end with the process.
func (m *machine) watch(pl *plumbing) {
	m.connected = make(chan struct{})
	logEnded := make(chan struct{})
	m.drains.Go(func() {
		defer close(logEnded)
		_ = m.log.drain(pl.log)
		_ = pl.log.Close()
	})
	m.drains.Go(func() {
		_ = m.console.drain(pl.console)
		_ = pl.console.Close()
	})
	go m.reap(logEnded)
}

// reap waits for the process and clears up after it. It blocks in wait only once
// the process has closed its log, else each machine would hold an OS thread.
func (m *machine) reap(logEnded <-chan struct{}) {
	select {
	case <-logEnded:
	case <-m.connected:
		quit := logEnded // no QMP: only the log tells
		if m.qmp != nil {
			quit = m.qmp.Done()
		}
		select {
		case <-logEnded:
		case <-quit:
		}
	}
	m.mu.Lock()
	process := m.process
	m.mu.Unlock()
	timer := time.AfterFunc(exitGrace, func() { _ = process.Kill() })
	state, err := process.Wait()
	timer.Stop()
	if err != nil {
		m.host.log.Error("cannot wait for VMM", "machine", m.id, "err", err)
	}
	<-m.connected
	m.clear(state)
}

// clear gives everything back and publishes the exit.
func (m *machine) clear(state *os.ProcessState) {
	oom := m.group.OOMKills()
	if m.qmp != nil {
		// The peer is dead, so the reader meets the end soon: what it said before counts.
		select {
		case <-m.qmp.Done():
		case <-time.After(exitGrace):
		}
		_ = m.qmp.Close()
	}
	m.drains.Wait()
	if err := m.group.Remove(); err != nil {
		m.host.log.Warn("cgroup of a dead VMM stays until the next sweep", "machine", m.id, "err", err)
	}
	m.mu.Lock()
	if m.wire == nil {
		_ = m.link.Close()
	}
	if m.shim != nil {
		_ = m.shim.Close()
	}
	m.exit = m.judge(state, oom)
	m.mu.Unlock()
	m.abandon()
}

// abandon is the last step of every machine's life.
func (m *machine) abandon() {
	m.host.run.ForgetProcess(m.id)
	if m.group != nil && m.process == nil {
		_ = m.group.Remove()
	}
	m.host.release(m)
	close(m.done)
}

// judge decides why the machine ended. The caller holds mu.
func (m *machine) judge(state *os.ProcessState, oom int) Exit {
	e := Exit{Code: -1, Detail: lastLine(m.log.bytes())}
	var status syscall.WaitStatus
	if state != nil {
		e.Code = state.ExitCode()
		status, _ = state.Sys().(syscall.WaitStatus)
	}
	if status.Signaled() {
		e.Signal = unix.SignalName(status.Signal())
	}
	panicLine := findPanic(m.console.bytes())
	switch {
	case m.panicked || m.shutdown == "guest-panic" || m.shutdown == "guest-reset" && panicLine != "":
		e.Cause, e.Detail = GuestPanic, panicLine
	case m.shutdown == "guest-reset":
		e.Cause, e.Detail = GuestReboot, ""
	case m.shutdown == "guest-shutdown":
		e.Cause, e.Detail = GuestPowerOff, ""
	case m.killed:
		e.Cause, e.Detail = Killed, ""
	case oom > 0 && status.Signaled():
		e.Cause = OutOfMemory
	case e.Code == exitOrphan:
		e.Cause = HostGone
	default:
		e.Cause = Crashed
		if m.shutdown != "" {
			e.Detail = strings.TrimSpace("shut down by " + m.shutdown + " " + e.Detail)
		}
	}
	return e
}

// explain turns the error of a failed start into one line that says why the VMM
// would not run.
func (m *machine) explain(err error) error {
	if e := m.Exit(); e.Cause != Alive && e.Cause != Killed {
		return fmt.Errorf("start machine %s: %w: %w", m.id, e.Err(), err)
	}
	if line := lastLine(m.log.bytes()); line != "" {
		return fmt.Errorf("start machine %s: %w (VMM: %s)", m.id, err, line)
	}
	return fmt.Errorf("start machine %s: %w", m.id, err)
}

// event runs on QMP's reader.
func (m *machine) event(e qmp.Event) {
	var data struct {
		Reason string `json:"reason"`
		Status string `json:"status"`
	}
	_ = json.Unmarshal(e.Data, &data) // an event without data says enough by its name
	m.mu.Lock()
	defer m.mu.Unlock()
	switch e.Name {
	case "SHUTDOWN":
		m.shutdown = data.Reason
	case "GUEST_PANICKED":
		m.panicked = true
	case "MIGRATION":
		select {
		case m.migration <- data.Status:
		default: // nobody waits for so many; the final state is asked for as well
		}
	}
}

// Resume lets the vCPUs run.
func (m *machine) Resume(ctx context.Context) error { return m.command(ctx, "cont", nil) }

// Stop halts the vCPUs and flushes the disk.
func (m *machine) Stop(ctx context.Context) error { return m.command(ctx, "stop", nil) }

// SetNetwork is described at Machine.
func (m *machine) SetNetwork(ctx context.Context, in bool) error {
	if !m.hw.Network {
		return nil
	}
	if err := m.command(ctx, "set_link", dict{"name": netDevice, "up": in}); err != nil {
		return fmt.Errorf("set network: %w", err)
	}
	return nil
}

// command executes a QMP command whose answer says nothing. If the machine is
// dead, the error says of what.
func (m *machine) command(ctx context.Context, name string, args any) error {
	return m.dead(m.qmp.Execute(ctx, name, args, nil))
}

func (m *machine) dead(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, qmp.ErrClosed) {
		<-m.done // soon: the reaper kills a VMM without QMP
		err = m.Exit().Err()
	}
	return fmt.Errorf("machine %s: %w", m.id, err)
}

// SaveState stops the machine and writes its device state.
//
// The command is named after Xen but is just "all devices, no memory": it works
// for shared and private memory alike, where an ordinary migration would send the
// whole of a clone's memory and would want the same ROM files on the other side.
func (m *machine) SaveState(ctx context.Context, f *os.File) error {
	if err := m.Stop(ctx); err != nil {
		return err
	}
	// QEMU takes a descriptor out of a set only if it is open exactly as it wants.
	out, err := os.OpenFile(procFD(int(f.Fd())), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("machine %s: save device state: %w", m.id, err)
	}
	defer out.Close()
	set := map[string]any{"fdset-id": stateSet}
	if err := m.qmp.ExecuteFile(ctx, "add-fd", set, nil, out); err != nil {
		return m.dead(err)
	}
	name := "/dev/fdset/" + strconv.Itoa(stateSet)
	err = m.qmp.Execute(ctx, "xen-save-devices-state", map[string]any{"filename": name, "live": false}, nil)
	err = errors.Join(err, m.qmp.Execute(ctx, "remove-fd", set, nil))
	return m.dead(err)
}

// Reconnect gives the port a new host end.
func (m *machine) Reconnect(ctx context.Context) (net.Conn, error) {
	m.mu.Lock()
	wired := m.wire != nil
	m.mu.Unlock()
	if wired {
		return nil, fmt.Errorf("machine %s: reconnect: its link is a wire", m.id)
	}
	conn, theirs, err := socketPair(unix.SOCK_STREAM)
	if err != nil {
		return nil, fmt.Errorf("machine %s: reconnect: %w", m.id, err)
	}
	defer theirs.Close()
	if err := m.swapLink(ctx, theirs); err != nil {
		_ = conn.Close()
		return nil, m.dead(err)
	}
	m.mu.Lock()
	old := m.link
	m.link = conn
	gone := m.exit.Cause != Alive
	m.mu.Unlock()
	_ = old.Close()
	if gone {
		_ = conn.Close()
	}
	return conn, nil
}

// swapLink replaces the backend of the link's character device by an inherited
// socket: no path, no listener that anybody else could connect to.
func (m *machine) swapLink(ctx context.Context, theirs *os.File) error {
	if err := m.qmp.ExecuteFile(ctx, "getfd", map[string]string{"fdname": "link"}, nil, theirs); err != nil {
		return err
	}
	return m.qmp.Execute(ctx, "chardev-change", dict{"id": "link", "backend": dict{
		"type": "socket", "data": dict{
			"server": false,
			"addr":   dict{"type": "fd", "data": dict{"str": "link"}},
		},
	}}, nil)
}

// Memory reads what the VMM occupies.
func (m *machine) Memory() (Memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		return Memory{}, fmt.Errorf("machine %s: read memory use: %w", m.id, err)
	}
	mem := Memory{Group: m.group.MemoryCurrent(), Kernel: m.group.MemoryKernel()}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		n := units.Bytes(kib) * units.KiB
		switch name {
		case "RssAnon":
			mem.Anon = n
		case "RssFile":
			mem.File = n
		case "RssShmem":
			mem.Shmem = n
		case "VmPTE":
			mem.PageTables = n
		}
	}
	return mem, nil
}

// findPanic returns the line with which a Linux guest reports its panic.
func findPanic(console []byte) string {
	i := bytes.LastIndex(console, []byte("Kernel panic - not syncing"))
	if i < 0 {
		return ""
	}
	line, _, _ := bytes.Cut(console[i:], []byte("\n"))
	return strings.TrimSpace(string(line))
}

// lastLine returns the last line that says something, cut to a sane length.
func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimRight(string(b), "\r\n \t\x00"), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	return line[:min(len(line), 400)]
}
