// Package guestmemtest runs a stand-in for a VMM under the real shim, so that tests meet a
// real userfaultfd in another process. Only tests import it.
//
// A VM is a child process that maps an image privately and reads and writes it on command,
// each Channel from a thread of its own:
//
//	Start --> waiting (Go not called) --Go--> running --Kill, or the test ends--> dead
package guestmemtest

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

//go:embed testdata/fakevmm.c
var source []byte

// built holds the binaries of this test process; written by Main before any test runs.
var built struct{ vmm, shim string }

// Main builds the fake VMM and the shim, runs the tests and returns the exit code. Call it
// from TestMain.
func Main(m *testing.M) int {
	dir, err := os.MkdirTemp("", "agentzip-fakevmm-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary folder
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, "build the fake VMM (gcc is needed):", err)
		return 1
	}
	return m.Run()
}

func build(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, here, _, ok := runtime.Caller(0)
	if !ok {
		return errors.New("the source of this package cannot be found")
	}
	shim := filepath.Join(filepath.Dir(here), "../../../shim/shim.c")
	c := filepath.Join(dir, "fakevmm.c")
	if err := os.WriteFile(c, source, 0o600); err != nil {
		return err
	}
	built.vmm, built.shim = filepath.Join(dir, "fakevmm"), filepath.Join(dir, "shim.so")
	for _, args := range [][]string{
		{"-O2", "-Wall", "-Wextra", "-Werror", "-o", built.vmm, c, "-lpthread"},
		{"-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", built.shim, shim, "-lpthread"},
	} {
		if out, err := exec.CommandContext(ctx, "gcc", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
	}
	return nil
}

// Base is the content of a frame in images made by Image: every fifth is zeros.
func Base(f units.Frame) *units.Page {
	p := new(units.Page)
	if f%5 == 0 {
		return p
	}
	for i := range uint64(units.PageSize / 8) {
		binary.NativeEndian.PutUint64(p[i*8:], mix(uint64(f))&0xffff*0x10001+i/3)
	}
	return p
}

func mix(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}

// Image makes a sealed image of n frames with the content of Base.
func Image(tb testing.TB, n int) *guestmem.Image {
	tb.Helper()
	im, err := guestmem.NewImage(units.Bytes(n) * units.PageSize)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := im.Close(); err != nil {
			tb.Error(err)
		}
	})
	for f := range n {
		if _, err := im.File().WriteAt(Base(units.Frame(f))[:], units.Frame(f).Offset()); err != nil {
			tb.Fatal(err)
		}
	}
	if err := im.PunchZeroPages(); err != nil {
		tb.Fatal(err)
	}
	if err := im.Seal(); err != nil {
		tb.Fatal(err)
	}
	return im
}

// A VM is a running fake VMM.
type VM struct {
	PID      int
	Shim     *guestmem.Shim
	Channels []*Channel

	cmd  *exec.Cmd
	done chan struct{}
}

// Start runs a fake VMM on im with n channels, past its shim's Go. env is added to its
// environment.
func Start(tb testing.TB, im *guestmem.Image, n int, env ...string) *VM {
	tb.Helper()
	vm := StartWaiting(tb, im, n, env...)
	if err := vm.Shim.Go(); err != nil {
		tb.Fatal(err)
	}
	vm.WaitReady(tb)
	return vm
}

// WaitReady waits until every channel's thread of a VMM after Go is there.
func (vm *VM) WaitReady(tb testing.TB) {
	tb.Helper()
	for _, c := range vm.Channels {
		var ready [1]byte
		if _, err := io.ReadFull(c.conn, ready[:]); err != nil {
			tb.Fatal(err)
		}
	}
}

// StartWaiting is Start without Go.
func StartWaiting(tb testing.TB, im *guestmem.Image, n int, env ...string) *VM {
	tb.Helper()
	shimHost, shimVM := pair(tb, unix.SOCK_SEQPACKET)
	dev, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		tb.Skipf("a userfaultfd is needed: %v", err)
	}
	defer dev.Close() //nolint:errcheck // only passed on
	cmd := exec.CommandContext(context.WithoutCancel(tb.Context()), built.vmm, "5", strconv.FormatInt(int64(im.Size()), 10))
	cmd.ExtraFiles = []*os.File{shimVM, dev, im.File()}
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+built.shim, guestmem.ShimFDEnv+"=3", guestmem.UffdFDEnv+"=4")
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	vm := &VM{cmd: cmd, done: make(chan struct{})}
	for i := range n {
		host, child := pair(tb, unix.SOCK_STREAM)
		cmd.ExtraFiles = append(cmd.ExtraFiles, child)
		cmd.Args = append(cmd.Args, strconv.Itoa(6+i))
		c := &Channel{conn: conn(tb, host)}
		if err := c.SetDeadline(time.Now().Add(hang)); err != nil {
			tb.Fatal(err)
		}
		vm.Channels = append(vm.Channels, c)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	for i, f := range cmd.ExtraFiles {
		if i != 2 {
			_ = f.Close()
		}
	}
	vm.PID = cmd.Process.Pid
	go func() {
		defer close(vm.done)
		_ = cmd.Wait()
	}()
	tb.Cleanup(func() {
		vm.Kill()
		for _, c := range vm.Channels {
			_ = c.conn.Close()
		}
		if vm.Shim != nil {
			_ = vm.Shim.Close()
		}
	})
	vm.Shim, err = guestmem.AcceptShim(conn(tb, shimHost))
	if err != nil {
		tb.Fatal(err)
	}
	return vm
}

// hang is when a command that nobody answers fails: a guest's thread that waits for a
// page for ever is what the tests are there to find. Benchmarks on a busy machine take longer.
const hang = 3 * time.Minute

// Kill ends the process with SIGKILL and waits.
func (vm *VM) Kill() {
	_ = vm.cmd.Process.Kill()
	<-vm.done
}

// Done is closed when the process has ended. ExitCode is then its code, -1 for a signal.
func (vm *VM) Done() <-chan struct{} { return vm.done }

// ExitCode returns the exit code of a process that is Done.
func (vm *VM) ExitCode() int { return vm.cmd.ProcessState.ExitCode() }

func pair(tb testing.TB, kind int) (host, child *os.File) {
	tb.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "child")
}

func conn(tb testing.TB, f *os.File) *net.UnixConn {
	tb.Helper()
	c, err := net.FileConn(f)
	if err != nil {
		tb.Fatal(err)
	}
	if err := f.Close(); err != nil {
		tb.Fatal(err)
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		tb.Fatalf("%T is no Unix socket", c)
	}
	return uc
}

// A Channel commands one thread of a VM. One goroutine at a time. Its methods fail the
// test's goroutine by an error, never by t.Fatal, so that any goroutine may use it.
type Channel struct{ conn *net.UnixConn }

const (
	opRead = iota + 1
	opWrite
	opPoke
	opReadKernel
	opWriteKernel
	opHammer
	opTouch
	opDiscard
)

// An Answer is what a command of the VM reports.
type Answer struct{ Count, Bad, Frame, Nanos uint64 }

// SetDeadline bounds all later commands.
func (c *Channel) SetDeadline(t time.Time) error { return c.conn.SetDeadline(t) }

func (c *Channel) send(op uint32, f units.Frame, a, b uint64) error {
	var cmd [24]byte
	binary.NativeEndian.PutUint32(cmd[:], op)
	binary.NativeEndian.PutUint32(cmd[4:], uint32(f))
	binary.NativeEndian.PutUint64(cmd[8:], a)
	binary.NativeEndian.PutUint64(cmd[16:], b)
	_, err := c.conn.Write(cmd[:])
	return err
}

func (c *Channel) answer() (Answer, error) {
	var buf [32]byte
	if _, err := io.ReadFull(c.conn, buf[:]); err != nil {
		return Answer{}, err
	}
	w := func(i int) uint64 { return binary.NativeEndian.Uint64(buf[i*8:]) }
	return Answer{Count: w(0), Bad: w(1), Frame: w(2), Nanos: w(3)}, nil
}

func (c *Channel) do(op uint32, f units.Frame, a, b uint64) (Answer, error) {
	if err := c.send(op, f, a, b); err != nil {
		return Answer{}, err
	}
	return c.answer()
}

// Read reads a page: by the VM's own thread, or by the kernel for it.
func (c *Channel) Read(f units.Frame, byKernel bool) (*units.Page, error) {
	op := uint32(opRead)
	if byKernel {
		op = opReadKernel
	}
	if err := c.send(op, f, 0, 0); err != nil {
		return nil, err
	}
	p := new(units.Page)
	_, err := io.ReadFull(c.conn, p[:])
	return p, err
}

// Write writes a page: by the VM's own thread, or by the kernel for it.
func (c *Channel) Write(f units.Frame, p *units.Page, byKernel bool) error {
	op := uint32(opWrite)
	if byKernel {
		op = opWriteKernel
	}
	if err := c.send(op, f, 0, 0); err != nil {
		return err
	}
	if _, err := c.conn.Write(p[:]); err != nil {
		return err
	}
	_, err := c.answer()
	return err
}

// Poke stores 8 bytes at an offset of a page.
func (c *Channel) Poke(f units.Frame, off int, v uint64) error {
	_, err := c.do(opPoke, f, uint64(off), v)
	return err
}

// Touch loads from (or increments the first word of) n pages in turn; Answer.Nanos says
// how long the thread took.
func (c *Channel) Touch(f units.Frame, n int, write bool) (Answer, error) {
	b := uint64(0)
	if write {
		b = 1
	}
	return c.do(opTouch, f, uint64(n), b)
}

// Discard reports n pages free the way QEMU does: it punches a hole into the image's file, then
// drops the pages. Answer.Bad is the errno of what failed, Answer.Nanos how long it took.
func (c *Channel) Discard(f units.Frame, n int) (Answer, error) {
	return c.do(opDiscard, f, uint64(n), 0)
}

// Hammer reads and rewrites random pages of [f, f+n), which must have the content of Base,
// for a while, and compares each with what it wrote there last. Answer.Bad must be 0.
func (c *Channel) Hammer(f units.Frame, n int, d time.Duration) (Answer, error) {
	return c.do(opHammer, f, uint64(n), uint64(d))
}
