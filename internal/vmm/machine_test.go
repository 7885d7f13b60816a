package vmm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

func TestAGuestsEndIsReportedByItsCause(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	for _, tc := range []struct {
		name   string
		action byte
		do     func(m Machine)
		want   Cause
	}{
		{"it powers off", powerOff, nil, GuestPowerOff},
		{"it reboots", reboot, nil, GuestReboot},
		{"it panics", reportPanic, nil, GuestPanic},
		{"it is killed by us", tickOn, Machine.Kill, Killed},
		{"its VMM gets SIGKILL from somebody", tickOn, func(m Machine) { _ = unix.Kill(m.PID(), unix.SIGKILL) }, Crashed},
		{"its VMM gets SIGSEGV", tickOn, func(m Machine) { _ = unix.Kill(m.PID(), unix.SIGSEGV) }, Crashed},
		{"its VMM is asked to go", tickOn, func(m Machine) { _ = unix.Kill(m.PID(), unix.SIGTERM) }, Crashed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := bootGuest(t, h, 2, tc.action)
			waitConsole(t, m, "tick 0001")
			if tc.do != nil {
				tc.do(m)
			}
			got := waitExit(t, m)
			if got.Cause != tc.want {
				t.Errorf("exit is %q, want cause %q", got, tc.want)
			}
			if err := got.Err(); !errors.Is(err, ErrExited) {
				t.Errorf("its error is %v, want ErrExited", err)
			}
			if err := m.Resume(t.Context()); !errors.Is(err, ErrExited) || !strings.Contains(err.Error(), tc.want.String()) {
				t.Errorf("Resume after the end: %v, want the cause", err)
			}
		})
	}
}

func TestACloneGoesOnWhereItsTemplateStopped(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	first, second := startRunning(t, h, template.spec(t, h)), startRunning(t, h, template.spec(t, h))
	for _, m := range []Machine{first, second} {
		// On a busy host the template ticks on for a while before it is stopped, and
		// those ticks are on its console; this one, two seconds later, is the clone's.
		waitConsole(t, m, "tick 0080")
		if c := m.Console(); bytes.Contains(c, []byte("tick 0001")) || bytes.Contains(c, []byte("SeaBIOS")) {
			t.Errorf("the clone booted: %q", c)
		}
	}
	if n, err := guestmem.CountPrivate(first.PID(), template.image); err != nil || n == 0 || n > 64 {
		t.Errorf("the clone has %d private pages (%v), want a few", n, err)
	}
	if first.UID() == second.UID() {
		t.Errorf("both VMMs run as uid %d", first.UID())
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What it had printed may still be on its way to us; it ticks 60 times a second.
	before := first.Console()
	for range 20 {
		time.Sleep(200 * time.Millisecond)
		after := first.Console()
		if bytes.Equal(before, after) {
			return
		}
		before = after
	}
	t.Errorf("a stopped clone goes on printing, lately %q", before[max(0, len(before)-40):])
}

func TestARunningCloneCanBeSavedAndForked(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	m := startRunning(t, h, template.spec(t, h))
	waitConsole(t, m, "tick 0080")
	state, err := h.TempFile("fork")
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	if _, err := state.WriteString(strings.Repeat("what was there before ", 1<<16)); err != nil {
		t.Fatal(err)
	}
	if err := m.SaveState(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatalf("resume after a save: %v", err)
	}
	waitConsole(t, m, "tick 0100")
	// The fork's memory would be the clone's; with the template's it only has to load.
	s := template.spec(t, h)
	s.State = state
	fork, err := h.Start(t.Context(), s)
	if err != nil {
		t.Fatalf("load the state of a running clone: %v", err)
	}
	fork.Kill()
}

func TestAVMMIsConfined(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	m := bootGuest(t, h, 0xffff, tickOn)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		t.Fatal(err)
	}
	uid := fmt.Sprintf("%d\t%d\t%d\t%d", m.UID(), m.UID(), m.UID(), m.UID())
	for _, want := range []string{
		"Uid:\t" + uid, "Gid:\t" + uid, "Groups:\t ", "NoNewPrivs:\t1", "Seccomp:\t2",
		"CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "CapInh:\t0000000000000000", "CapAmb:\t0000000000000000",
	} {
		if !strings.Contains(string(status), want+"\n") {
			t.Errorf("/proc/PID/status has no line %q:\n%s", want, status)
		}
	}
	if m.UID() < UIDBase {
		t.Errorf("the VMM runs as uid %d, outside of its range", m.UID())
	}
	for file, want := range map[string]string{"oom_score_adj": oomScoreAdj, "coredump_filter": "00000000"} {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", m.PID(), file)); err != nil || strings.TrimSpace(string(b)) != want {
			t.Errorf("%s is %q (%v), want %s", file, b, err, want)
		}
	}
	if w := h.Warnings(); len(w) > 0 {
		t.Logf("this host cannot confine fully: %v", w)
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", m.PID()))
	if err != nil || len(h.Warnings()) == 0 && !strings.Contains(string(groups), h.run.Group(m.ID())) {
		t.Errorf("the VMM is in cgroups\n%s (%v), want %s", groups, err, h.run.Group(m.ID()))
	}
}

func TestAVMMInheritsNothingItWasNotGiven(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	// A descriptor that this process inherited would look like this one.
	leak, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leak)
	m := bootGuest(t, h, 0xffff, tickOn)
	known := regexp.MustCompile(`^(/dev/null|pipe:.*|socket:.*|anon_inode:\[(eventfd|signalfd|eventpoll)\]|/memfd:agentzip-memory \(deleted\)|.* \(deleted\))$`)
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.PID()))
	if err != nil || len(fds) == 0 {
		t.Fatalf("list descriptors: %v", err)
	}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && !known.MatchString(target) {
			t.Errorf("the VMM has %s open", target)
		}
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", m.PID()))
	if err != nil || bytes.Contains(env, []byte("PATH=")) {
		t.Errorf("the VMM has the environment %q (%v)", env, err)
	}
}

func TestTheLinkCanBeReconnected(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	m := bootGuest(t, h, 0xffff, tickOn)
	first := m.Link()
	for range 3 {
		c, err := m.Reconnect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if m.Link() != c {
			t.Error("Link is not what Reconnect returned")
		}
		if _, err := first.Read(make([]byte, 1)); err == nil {
			t.Error("the old connection still reads")
		}
		first = c
	}
	m.Kill()
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Error("the connection outlives its machine")
	}
	if _, err := m.Reconnect(t.Context()); !errors.Is(err, ErrExited) {
		t.Errorf("Reconnect after the end: %v, want ErrExited", err)
	}
}

func TestAFloodOfTheConsoleIsBounded(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	m := bootGuest(t, h, 1, floodConsole)
	waitConsole(t, m, strings.Repeat("x", consoleLimit/2))
	time.Sleep(100 * time.Millisecond)
	if n := len(m.Console()); n > consoleLimit {
		t.Errorf("%d bytes of console are kept, want at most %d", n, consoleLimit)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Errorf("a flooding guest cannot be stopped: %v", err)
	}
}

// fakeQEMU returns an executable that any user can run and that does what body says.
func fakeQEMU(t *testing.T, body string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agentzip-fake-") //nolint:usetesting // others may not enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "qemu")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o755), os.Chmod(path, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAStartThatFailsSaysWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		options func(t *testing.T) HostOptions
		change  func(t *testing.T, s *Spec)
		want    string
	}{
		{"QEMU complains", nil, func(_ *testing.T, s *Spec) { s.Hardware.CPU = "no-such-cpu" }, "unable to find CPU model"},
		{"the kernel is none", nil, func(_ *testing.T, s *Spec) { s.Kernel = "testdata/boot.s" }, "kernel"},
		{"the kernel is missing", nil, func(_ *testing.T, s *Spec) { s.Kernel = "/no/such/kernel" }, "no such file"},
		{"the memory has another size", nil, func(_ *testing.T, s *Spec) { s.Hardware.Memory *= 2 }, "guest memory file has 64.0 MiB"},
		{"the memory is too small", nil, func(_ *testing.T, s *Spec) { s.Hardware.Memory = units.MiB }, "at least 64 MiB"},
		{"the root image is private", nil, func(t *testing.T, s *Spec) { s.Root = rootImage(t, 2<<20, 0o600) }, "chmod o+r"},
		{"the root image has an odd size", nil, func(t *testing.T, s *Spec) { s.Root = rootImage(t, 4096, 0o644) }, "multiple of 2 MiB"},
		{"the id is bad", nil, func(_ *testing.T, s *Spec) { s.ID = "../x" }, "machine id"},
		{"a clone's state is none", nil, func(t *testing.T, s *Spec) { s.Mode, s.State = Clone, rootImage(t, 4096, 0o644) }, "built by another QEMU"},
		{"the cgroup's limit is too low", func(*testing.T) HostOptions {
			return HostOptions{Allowance: 8*units.MiB - hardware.Memory}
		}, nil, "OOM"},
		{"the VMM says nothing and ends", func(t *testing.T) HostOptions {
			return HostOptions{QEMU: fakeQEMU(t, "exit 3")}
		}, nil, "exit status 3"},
		{"the VMM floods its log and speaks no QMP", func(t *testing.T) HostOptions {
			return HostOptions{QEMU: fakeQEMU(t, "exec yes flood")}
		}, nil, "deadline exceeded (VMM: "},
		{"the VMM closes its QMP and hangs", func(t *testing.T) HostOptions {
			return HostOptions{QEMU: fakeQEMU(t, "exec 3>&-; exec sleep 1000")}
		}, nil, "EOF"},
		{"the VMM speaks nonsense", func(t *testing.T) HostOptions {
			return HostOptions{QEMU: fakeQEMU(t, "yes '{\"QMP\": 0' >&3")}
		}, nil, "QMP greeting"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var o HostOptions
			if tc.options != nil {
				o = tc.options(t)
			}
			h := testHost(t, o)
			s := Spec{Mode: Boot, Hardware: hardware, Memory: newImage(t).File(), Disk: guestDisk(t, h, 0xffff, tickOn)}
			if tc.change != nil {
				tc.change(t, &s)
			}
			patience := 20 * time.Second
			if strings.Contains(tc.want, "deadline") {
				patience = time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			m, err := h.Start(ctx, s)
			if err == nil {
				m.Kill()
				t.Fatal("it started")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %q, want %q in it", err, tc.want)
			}
			if n := len(err.Error()); n > 1500 {
				t.Errorf("the error has %d bytes", n)
			}
			if len(h.machines) != 0 || len(h.uids) != 0 {
				t.Errorf("%d machines and %d uids are left", len(h.machines), len(h.uids))
			}
		})
	}
}

// rootImage returns a file of zeros.
func rootImage(t *testing.T, size int64, mode os.FileMode) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "root"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := errors.Join(f.Truncate(size), f.Chmod(mode)); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestClosingTheHostEndsEverything(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	running := startRunning(t, h, template.spec(t, h))
	started := make(chan error, 4)
	for range cap(started) {
		s := template.spec(t, h)
		go func() {
			_, err := h.Start(t.Context(), s)
			started <- err
		}()
	}
	time.Sleep(30 * time.Millisecond) // some are half-way
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	for range cap(started) {
		<-started
	}
	if got := waitExit(t, running); got.Cause != Killed {
		t.Errorf("exit is %q, want killed", got)
	}
	late := Spec{Mode: Boot, Hardware: hardware, Memory: template.image.File()}
	if _, err := h.Start(t.Context(), late); !errors.Is(err, ErrClosed) {
		t.Errorf("Start after Close: %v, want ErrClosed", err)
	}
}

func TestAShimShakesHandsBeforeTheVMMRuns(t *testing.T) {
	t.Parallel()
	shim := buildShim(t)
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	s := template.spec(t, h)
	s.Shim = shim
	m, err := h.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if m.Shim() == nil || m.Shim().PID() != m.PID() {
		t.Fatalf("shim %+v does not belong to VMM %d", m.Shim(), m.PID())
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitConsole(t, m, "tick 0080")
	if err := m.Shim().Close(); err != nil {
		t.Fatal(err)
	}
	if got := waitExit(t, m); got.Cause != HostGone {
		t.Errorf("exit after its shim's socket closed is %q, want cause %q", got, HostGone)
	}
}

func TestAShimThatIsNoneIsRefused(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	s := template.spec(t, h)
	s.Shim = "/proc/self/cmdline" // ld.so only warns of what it cannot preload
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	m, err := h.Start(ctx, s)
	if err == nil {
		m.Kill()
		t.Fatal("it started without its shim")
	}
	if !strings.Contains(err.Error(), "shim") || !strings.Contains(err.Error(), "ld.so") {
		t.Errorf("the error is %q, want the shim and ld.so named", err)
	}
}

// buildShim compiles the shim with the host's compiler.
func buildShim(t *testing.T) string {
	t.Helper()
	needQEMU(t)
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler to build the shim: apt-get install gcc libc6-dev")
	}
	// Not readable for others and in a folder that they cannot enter: the usual case
	// of a checkout in root's home.
	out := filepath.Join(t.TempDir(), "shim.so")
	if b, err := exec.Command(cc, "-O2", "-shared", "-fPIC", "-o", out, "../../shim/shim.c", "-lpthread").CombinedOutput(); err != nil {
		t.Fatalf("compile shim: %v\n%s", err, b)
	}
	if err := os.Chmod(out, 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestCopySparseKeepsContentAndHoles(t *testing.T) {
	dir := t.TempDir()
	src, err := os.Create(filepath.Join(dir, "src"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	const size = 8 << 20
	if err := src.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{1 << 20, 5<<20 + 17, size - 1} {
		if _, err := src.WriteAt([]byte("data"[:min(4, size-off)]), off); err != nil {
			t.Fatal(err)
		}
	}
	dst, err := os.Create(filepath.Join(dir, "dst"))
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if err := CopySparse(src, dst); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(src.Name())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(dst.Name()); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy differs (%v)", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dst.Name(), &st); err != nil || st.Blocks*512 > size/2 {
		t.Errorf("the copy occupies %d bytes (%v), want holes", st.Blocks*512, err)
	}
}

func TestARingKeepsTheEndOfAStream(t *testing.T) {
	r := newRing(1000)
	var all bytes.Buffer
	for i := range 5000 {
		fmt.Fprintf(io.MultiWriter(r, &all), "%d,", i*i)
		want := all.Bytes()[max(0, all.Len()-1000):]
		if got := r.bytes(); !bytes.Equal(got, want) {
			t.Fatalf("after %d writes it keeps %q, want %q", i+1, got, want)
		}
	}
	if _, err := r.Write(bytes.Repeat([]byte("z"), 9999)); err != nil {
		t.Fatal(err)
	}
	if got := r.bytes(); !bytes.Equal(got, bytes.Repeat([]byte("z"), 1000)) {
		t.Errorf("after one long write it keeps %q", got)
	}
	if cap(r.buf) > 4*1000 {
		t.Errorf("it occupies %d bytes", cap(r.buf))
	}
}
