package vmm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm/cgroup"
	"github.com/agentzip/agentzip/internal/vmm/qmp"
)

// startTimeout bounds a Start whose context has no deadline. A clone needs 0.2 s
// on an idle host; a host so busy that it needs a minute had better say so.
const startTimeout = 60 * time.Second

// oomScoreAdj makes the host's OOM killer take a VMM before anything else: its
// sandbox is lost, but not the daemon that all the others need.
const oomScoreAdj = "900"

// plumbing is both ends of everything that connects us with a VMM being started.
type plumbing struct {
	child [fdCount]*os.File // by descriptor number in the VMM; closed once it runs
	log   *os.File          // ours: read end of its stdout and stderr

	qmp, console, link, shim *net.UnixConn // ours
}

func (p *plumbing) closeChild() {
	for i, f := range p.child {
		if f != nil {
			_ = f.Close()
			p.child[i] = nil
		}
	}
}

func (p *plumbing) closeAll() {
	p.closeChild()
	if p.log != nil {
		_ = p.log.Close()
	}
	for _, c := range []*net.UnixConn{p.qmp, p.console, p.link, p.shim} {
		if c != nil {
			_ = c.Close()
		}
	}
}

// start is Start with the concrete type.
func (h *Host) start(ctx context.Context, s Spec) (*machine, error) {
	hw, err := s.Hardware.fill()
	if err != nil {
		return nil, fmt.Errorf("start machine %s: %w", s.ID, err)
	}
	m := &machine{
		host: h, spec: s, hw: hw, done: make(chan struct{}),
		console: newRing(consoleLimit), log: newRing(logLimit),
		migration: make(chan string, 16),
	}
	if err := h.reserve(m, s.ID); err != nil {
		return nil, err
	}
	defer h.starting.Done()

	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)() //nolint:contextcheck // ends with the Host too
	born := time.Now()
	pl, err := m.spawn()
	if err == nil {
		err = m.bringUp(ctx, pl, born)
	} else {
		m.abandon()
	}
	if err != nil {
		return nil, m.explain(err)
	}
	return m, nil
}

// spawn starts the process, confined as well as the host can. On error nothing runs.
func (m *machine) spawn() (_ *plumbing, err error) {
	h := m.host
	pl := &plumbing{}
	defer func() {
		if err != nil {
			pl.closeAll()
		}
	}()
	lay, err := m.plumb(pl)
	if err != nil {
		return nil, err
	}
	var warnings []string
	m.group, warnings = h.groups.Create(h.run.Group(m.id), cgroup.Limits{
		Memory: m.hw.Memory + h.allowance, Pids: maxThreads + m.hw.VCPUs, CPUs: m.hw.VCPUs,
	})
	h.warn(m.id, warnings)
	p, err := h.launcher.start(append([]string{h.qemu}, lay.args()...), &os.ProcAttr{
		Dir: "/", Env: m.env(pl), Files: pl.child[:], Sys: m.sysProcAttr(),
	})
	if err != nil {
		return nil, fmt.Errorf("exec %s: %w", h.qemu, err)
	}
	pl.closeChild()
	m.mu.Lock()
	m.process = p
	if m.killed {
		_ = p.Kill()
	}
	m.mu.Unlock()
	m.confine(p.Pid)
	return pl, nil
}

// confine does what has to be done from outside. A process that is gone already
// fails all of it; its death is reported by the reaper.
func (m *machine) confine(pid int) {
	var warnings []string
	note := func(err error) {
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			warnings = append(warnings, err.Error())
		}
	}
	note(m.host.run.RecordProcess(m.id, pid))
	note(m.group.Add(pid))
	note(os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(oomScoreAdj), 0))
	// A core file would hold the guest's memory. Leave all of it out (core(5)); a
	// resource limit of another user's process would take CAP_SYS_RESOURCE.
	note(os.WriteFile(fmt.Sprintf("/proc/%d/coredump_filter", pid), []byte("0"), 0))
	m.host.warn(m.id, warnings)
}

func (m *machine) sysProcAttr() *syscall.SysProcAttr {
	id := uint32(m.uid)
	cred := &syscall.Credential{Uid: id, Gid: id}
	if m.hw.Accel == KVM {
		var st unix.Stat_t
		if unix.Stat("/dev/kvm", &st) == nil && st.Mode&0o006 != 0o006 {
			cred.Groups = []uint32{st.Gid}
		}
	}
	return &syscall.SysProcAttr{Credential: cred, Pdeathsig: syscall.SIGKILL, Setsid: true}
}

func (m *machine) env(pl *plumbing) []string {
	env := []string{"LC_ALL=C", "HOME=/", "MALLOC_ARENA_MAX=1"} // one arena: less heap that idles
	if pl.shim != nil {
		env = append(env, "LD_PRELOAD="+procFD(fdShimLib), "AZ_SHIM_FD="+strconv.Itoa(fdShim))
		if pl.child[fdUserfault] != nil {
			env = append(env, "AZ_UFFD_FD="+strconv.Itoa(fdUserfault))
		}
	}
	return env
}

// plumb opens everything the VMM inherits and returns its layout.
func (m *machine) plumb(pl *plumbing) (layout, error) {
	s := m.spec
	lay := layout{id: m.id, hw: m.hw, mode: s.Mode, cmdline: s.Cmdline}
	var err error
	if pl.child[0], err = os.Open(os.DevNull); err != nil {
		return lay, err
	}
	if pl.log, pl.child[1], err = os.Pipe(); err != nil {
		return lay, err
	}
	if pl.child[2], err = dup(pl.child[1]); err != nil {
		return lay, err
	}
	for _, c := range []struct {
		conn **net.UnixConn
		fd   int
	}{{&pl.qmp, fdQMP}, {&pl.console, fdConsole}, {&pl.link, fdLink}} {
		if c.fd == fdLink && s.Wire != nil {
			if pl.child[fdLink], err = s.Wire.copyOfGuestEnd(); err != nil {
				return lay, err
			}
			continue
		}
		if *c.conn, pl.child[c.fd], err = socketPair(unix.SOCK_STREAM); err != nil {
			return lay, err
		}
	}
	if err := m.plumbStorage(pl, &lay); err != nil {
		return lay, err
	}
	switch s.Mode {
	case Boot:
		if s.Kernel != "" {
			err = m.plumbKernel(pl, &lay)
		}
	case Clone:
		// Without a State it is left prepared.
	default:
		err = fmt.Errorf("unknown mode %d", s.Mode)
	}
	if err != nil || s.Shim == "" {
		return lay, err
	}
	return lay, m.plumbShim(pl)
}

// plumbStorage passes memory, root image and disk.
func (m *machine) plumbStorage(pl *plumbing, lay *layout) (err error) {
	s := m.spec
	if s.Memory == nil {
		return errors.New("a machine needs guest memory")
	}
	size, _, err := sizeMode(s.Memory)
	if err != nil {
		return err
	}
	if size != m.hw.Memory {
		return fmt.Errorf("guest memory file has %s, the hardware %s", size, m.hw.Memory)
	}
	if pl.child[fdMemory], err = dup(s.Memory); err != nil {
		return err
	}
	if s.Root != nil {
		size, mode, err := sizeMode(s.Root)
		switch {
		case err != nil:
			return err
		case size == 0 || size%rootAlign != 0:
			return fmt.Errorf("root image %s has %d bytes: must be a multiple of 2 MiB", s.Root.Name(), int64(size))
		case mode&0o004 == 0:
			return fmt.Errorf("root image %s: the VMM's user must be able to read it (chmod o+r)", s.Root.Name())
		}
		lay.root = size
		// Whatever the caller may do with the image, the VMM may only read it.
		if pl.child[fdRoot], err = os.Open(procFD(int(s.Root.Fd()))); err != nil {
			return err
		}
	}
	if s.Disk != nil {
		lay.disk = true
		if m.disk, _, err = sizeMode(s.Disk); err != nil {
			return err
		}
		if pl.child[fdDisk], err = dup(s.Disk); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) plumbKernel(pl *plumbing, lay *layout) (err error) {
	lay.kernel = true
	if pl.child[fdKernel], err = openForAll(m.spec.Kernel); err != nil {
		return fmt.Errorf("open kernel: %w", err)
	}
	if m.spec.Initrd == "" {
		return nil
	}
	lay.initrd = true
	if pl.child[fdInitrd], err = openForAll(m.spec.Initrd); err != nil {
		return fmt.Errorf("open initrd: %w", err)
	}
	return nil
}

func (m *machine) plumbShim(pl *plumbing) (err error) {
	if pl.child[fdShimLib], err = openForAll(m.spec.Shim); err != nil {
		return fmt.Errorf("open shim: %w", err)
	}
	if pl.shim, pl.child[fdShim], err = socketPair(unix.SOCK_SEQPACKET); err != nil {
		return err
	}
	// Without the device the shim tries userfaultfd(2), which works where
	// vm.unprivileged_userfaultfd is set.
	pl.child[fdUserfault], err = os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func sizeMode(f *os.File) (units.Bytes, os.FileMode, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	return units.Bytes(st.Size()), st.Mode().Perm(), nil
}

// openForAll opens a file that an unprivileged process will open again through
// /proc/self/fd. That needs permission on the file only, not on the folders above
// it; a file that others may not read is passed as a copy.
func openForAll(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	_, mode, err := sizeMode(f)
	if err != nil || mode&0o004 != 0 {
		return f, err
	}
	defer f.Close()
	// A memfd has mode 0777 whatever the umask.
	fd, err := unix.MemfdCreate(filepath.Base(path), unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	copied := os.NewFile(uintptr(fd), path)
	if _, err := copied.ReadFrom(f); err != nil {
		return nil, errors.Join(err, copied.Close())
	}
	return copied, nil
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// socketPair returns our end as a connection and the VMM's as a file.
func socketPair(kind int) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket")
	conn, err := net.FileConn(ours) // duplicates
	err = errors.Join(err, ours.Close())
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make socket pair: %w", err), theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil //nolint:forcetypeassert // a Unix socket is one
}

// bringUp takes a fresh process to "paused". It owns pl from here on; on error the
// process is dead and nothing is left.
func (m *machine) bringUp(ctx context.Context, pl *plumbing, born time.Time) error {
	m.wire, m.link = m.spec.Wire, wireOf(m.spec)
	if m.spec.Wire == nil {
		m.link = pl.link
	}
	m.watch(pl)
	err := m.handshake(ctx, pl)
	if err == nil {
		m.timing.Spawn = time.Since(born)
		err = m.connect(ctx, pl.qmp, born)
	} else {
		_ = pl.qmp.Close()
	}
	close(m.connected)
	switch {
	case err != nil || m.spec.Mode != Clone:
	case m.spec.State == nil:
		m.prepared = true
	default:
		began := time.Now()
		err = m.load(ctx, m.spec.State)
		m.timing.Load = time.Since(began)
	}
	if err == nil {
		return nil
	}
	if ctx.Err() == nil {
		// It may be ending by itself: its own last words say more than our error.
		select {
		case <-m.done:
			return err
		case <-time.After(exitGrace):
		}
	}
	m.end()
	<-m.done
	return err
}

func (m *machine) connect(ctx context.Context, conn *net.UnixConn, born time.Time) error {
	client, err := qmp.Dial(ctx, conn, m.event)
	if err != nil {
		return err
	}
	m.qmp = client
	m.timing.QMP = time.Since(born)
	return nil
}
