package guestmem_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) { os.Exit(guestmemtest.Main(m)) }

const frames = 1024

func TestAnImageHasHolesWherePagesAreZero(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	for f := range units.Frame(frames) {
		page, want := im.Page(f), guestmemtest.Base(f)
		if f%5 == 0 {
			if page != nil || !im.Hole(f) {
				t.Fatalf("frame %d is no hole", f)
			}
			continue
		}
		if im.Hole(f) || *page != *want {
			t.Fatalf("frame %d has another content", f)
		}
	}
	holes := units.Bytes((frames + 4) / 5)
	if got, want := im.Resident(), (frames-holes)*units.PageSize; got != want {
		t.Errorf("resident %v, want %v", got, want)
	}
	if got, err := hostmem.Allocated(im.File()); err != nil || got != im.Resident() {
		t.Errorf("the kernel counts %v (%v), the image %v", got, err, im.Resident())
	}
}

func TestASealedImageCannotBeChanged(t *testing.T) {
	im := guestmemtest.Image(t, 16)
	if _, err := im.File().WriteAt([]byte{1}, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write: %v, want EPERM", err)
	}
	if err := hostmem.PunchHole(im.File(), 0, units.PageSize); !errors.Is(err, unix.EPERM) {
		t.Errorf("punch hole: %v, want EPERM", err)
	}
	if err := im.File().Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("shrink: %v, want EPERM", err)
	}
	if err := im.PunchZeroPages(); err == nil {
		t.Error("zero pages of a sealed image were punched")
	}
}

func TestSealingFailsWhileAMachineMapsTheImageShared(t *testing.T) {
	im, err := guestmem.NewImage(16 * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer im.Close()
	m, err := hostmem.MapShared(im.File(), im.Size())
	if err != nil {
		t.Fatal(err)
	}
	m.Data[5000] = 7
	if err := im.Seal(); !errors.Is(err, unix.EBUSY) {
		t.Errorf("seal: %v, want EBUSY", err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := im.Seal(); err != nil {
		t.Fatal(err)
	}
	if im.Page(1)[5000-4096] != 7 || !im.Hole(0) {
		t.Error("the image does not have the content that was written")
	}
}

func TestAnImageSurvivesItsFile(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	path := filepath.Join(t.TempDir(), "memory")
	if err := im.WriteSparse(path); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() != int64(im.Size()) {
		t.Fatalf("size %d (%v), want %d", info.Size(), err, im.Size())
	}
	if err := im.WriteSparse(path); !errors.Is(err, os.ErrExist) {
		t.Errorf("second write: %v, want ErrExist", err)
	}
	back, err := guestmem.LoadImage(path, im.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	for f := range units.Frame(frames) {
		if im.Hole(f) != back.Hole(f) || !im.Hole(f) && *im.Page(f) != *back.Page(f) {
			t.Fatalf("frame %d differs", f)
		}
	}
	if _, err := guestmem.LoadImage(path, im.Size()+units.PageSize); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("load with a wrong size: %v", err)
	}
}

func TestAFileWithoutHolesLoadsWithHoles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory")
	data := make([]byte, 8*units.PageSize)
	data[3*units.PageSize+17] = 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	im, err := guestmem.LoadImage(path, units.Bytes(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	defer im.Close()
	if got := im.Resident(); got != units.PageSize {
		t.Errorf("resident %v, want one page", got)
	}
	if !bytes.Equal(im.Page(3)[:], data[3*units.PageSize:4*units.PageSize]) {
		t.Error("the page has another content")
	}
}

func TestAVMWaitsForGoAndDiesWithItsDaemon(t *testing.T) {
	im := guestmemtest.Image(t, 16)
	vm := guestmemtest.StartWaiting(t, im, 1)
	if vm.Shim.PID() != vm.PID {
		t.Errorf("the shim says pid %d, the process is %d", vm.Shim.PID(), vm.PID)
	}
	if err := vm.Channels[0].SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.Channels[0].Read(0, false); err == nil {
		t.Fatal("the VMM ran before it was told to")
	}
	if err := vm.Shim.Go(); err != nil {
		t.Fatal(err)
	}
	if err := vm.Channels[0].SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	vm.WaitReady(t)
	if err := vm.Shim.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-vm.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the VMM outlived its daemon")
	}
	if got := vm.ExitCode(); got != 70 {
		t.Errorf("exit code %d, want 70", got)
	}
}

func TestAProcessWithoutShimIsNamed(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(fds[1])
	if _, err := guestmem.AcceptShim(unixConn(t, fds[0])); !errors.Is(err, guestmem.ErrShim) {
		t.Errorf("got %v, want ErrShim", err)
	}
}

func TestAShimOfAnotherVersionIsRefused(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	hello := []byte("AZSH\x63\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00")
	if err := unix.Sendmsg(fds[1], hello, unix.UnixRights(fds[1]), nil, 0); err != nil {
		t.Fatal(err)
	}
	_, err = guestmem.AcceptShim(unixConn(t, fds[0]))
	if !errors.Is(err, guestmem.ErrShim) || !strings.Contains(err.Error(), "version 99") {
		t.Errorf("got %v, want version 99 refused", err)
	}
}

func unixConn(t *testing.T, fd int) *net.UnixConn {
	t.Helper()
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		t.Fatalf("%T is no Unix socket", c)
	}
	return uc
}

func TestMemoryOpenToKSMIsRefused(t *testing.T) {
	im := guestmemtest.Image(t, 16)
	vm := guestmemtest.Start(t, im, 1, "FAKEVMM_MERGEABLE=1")
	if _, err := guestmem.Attach(vm.Shim, vm.PID, im); !errors.Is(err, guestmem.ErrMergeable) {
		t.Errorf("attach: %v, want ErrMergeable", err)
	}
}

func TestAnotherImageIsNotFound(t *testing.T) {
	im, other := guestmemtest.Image(t, 16), guestmemtest.Image(t, 16)
	vm := guestmemtest.Start(t, im, 1)
	if _, err := guestmem.Attach(vm.Shim, vm.PID, other); err == nil || !strings.Contains(err.Error(), "exactly one") {
		t.Errorf("attach: %v, want that the mapping is not found", err)
	}
}

func attach(t *testing.T, im *guestmem.Image, vm *guestmemtest.VM) *guestmem.Guest {
	t.Helper()
	g, err := guestmem.Attach(vm.Shim, vm.PID, im)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		vm.Kill()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func scan(t *testing.T, g *guestmem.Guest) (runs []guestmem.Run) {
	t.Helper()
	err := g.Scan(func(r guestmem.Run, swapped bool) bool {
		if swapped {
			t.Errorf("%+v counts as swapped", r)
		}
		runs = append(runs, r)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return runs
}

// one page of each kind, through all operations, with the page table looked at after each.
func TestPrivatePagesAreFoundReadDroppedAndInstalled(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	for _, f := range []units.Frame{10, 11, 12, 700} { // before Attach: no faults to serve
		if err := vm.Channels[0].Poke(f, 8, 0xabc); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := vm.Channels[0].Touch(500, 4, false); err != nil { // mapped, not private
		t.Fatal(err)
	}
	if n, err := guestmem.CountPrivate(vm.PID, im); err != nil || n != 4 {
		t.Errorf("private pages before attach %d (%v), want 4", n, err)
	}
	g := attach(t, im, vm)
	want := []guestmem.Run{{Start: 10, Pages: 3}, {Start: 700, Pages: 1}}
	if d := cmp.Diff(want, scan(t, g)); d != "" {
		t.Errorf("private pages (-want +got):\n%s", d)
	}
	buf := make([]byte, 4*units.PageSize)
	if err := g.Read(buf, want); err != nil {
		t.Fatal(err)
	}
	for i, f := range []units.Frame{10, 11, 12, 700} {
		page := guestmemtest.Base(f)
		copy(page[8:], []byte{0xbc, 0x0a, 0, 0, 0, 0, 0, 0})
		if !bytes.Equal(buf[i*units.PageSize:(i+1)*units.PageSize], page[:]) {
			t.Errorf("frame %d was read wrong", f)
		}
	}
	for _, r := range want {
		if err := g.Protect(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Drop(want); err != nil {
		t.Fatal(err)
	}
	// The kernel leaves markers that it counts as swapped: rule 6 of package pager.
	if resident, swapped, err := g.Count(); err != nil || resident != 0 || swapped != 4 {
		t.Errorf("after the drop %d resident, %d swapped (%v), want 0 and 4", resident, swapped, err)
	}
	if _, err := g.ZeroPage(guestmem.Run{Start: 10, Pages: 1}); !errors.Is(err, guestmem.ErrExists) {
		t.Errorf("zero page over a marker: %v, want ErrExists", err)
	}
	for _, r := range want {
		if err := g.Unprotect(r); err != nil {
			t.Fatal(err)
		}
	}
	if got := scan(t, g); len(got) != 0 {
		t.Errorf("private pages after the drop: %v", got)
	}
	checkInstalling(t, vm, g, buf)
}

// checkInstalling goes on where frames 10-12 and 700 were dropped; buf has their content.
func checkInstalling(t *testing.T, vm *guestmemtest.VM, g *guestmem.Guest, buf []byte) {
	t.Helper()
	if n, err := g.Copy(10, buf[:2*units.PageSize], true); err != nil || n != 2 {
		t.Errorf("install: %d, %v", n, err)
	}
	if n, err := g.Copy(10, buf[:2*units.PageSize], true); !errors.Is(err, guestmem.ErrExists) || n != 0 {
		t.Errorf("install over mapped pages: %d, %v, want ErrExists", n, err)
	}
	if n, err := g.Continue(guestmem.Run{Start: 501, Pages: 2}); !errors.Is(err, guestmem.ErrExists) || n != 0 {
		t.Errorf("continue over mapped pages: %d, %v, want ErrExists", n, err)
	}
	// From a page that is not mapped into one that is: a part is done.
	if n, err := g.Continue(guestmem.Run{Start: 803, Pages: 1}); err != nil || n != 1 {
		t.Errorf("continue: %d, %v", n, err)
	}
	if n, err := g.Continue(guestmem.Run{Start: 801, Pages: 3}); !errors.Is(err, guestmem.ErrExists) || n != 2 {
		t.Errorf("continue into a mapped page: %d, %v, want 2 and ErrExists", n, err)
	}
	if n, err := g.ZeroPage(guestmem.Run{Start: 12, Pages: 1}); err != nil || n != 1 {
		t.Errorf("zero page: %d, %v", n, err)
	}
	if d := cmp.Diff([]guestmem.Run{{Start: 10, Pages: 2}}, scan(t, g)); d != "" {
		t.Errorf("private pages at the end (-want +got):\n%s", d)
	}
	got, err := vm.Channels[0].Read(11, true)
	if err != nil || !bytes.Equal(got[:], buf[units.PageSize:2*units.PageSize]) {
		t.Errorf("the guest reads another page than was installed (%v)", err)
	}
	if got, err := vm.Channels[0].Read(12, false); err != nil || *got != (units.Page{}) {
		t.Errorf("the guest reads no zeros (%v)", err)
	}
}

func TestAFaultWaitsUntilItIsServed(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	g := attach(t, im, vm)
	got := make(chan error, 1)
	go func() {
		p, err := vm.Channels[0].Read(33, false)
		if err == nil && p[0] != 0x77 {
			err = errors.New("another page than was installed")
		}
		got <- err
	}()
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(g.PollFD()), Events: unix.POLLIN}}, 5000); err != nil {
		t.Fatal(err)
	}
	faults := make([]guestmem.Fault, 4)
	n, err := g.Faults(faults, make([]uffd.Event, 4))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]guestmem.Fault{{Frame: 33, Minor: true}}, faults[:n]); d != "" {
		t.Errorf("faults (-want +got):\n%s", d)
	}
	page := bytes.Repeat([]byte{0x77}, units.PageSize)
	if _, err := g.Copy(33, page, false); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestOperationsOnADeadGuestSayGone(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	g := attach(t, im, vm)
	vm.Kill()
	one, page := guestmem.Run{Start: 1, Pages: 1}, make([]byte, units.PageSize)
	_, copyErr := g.Copy(1, page, false)
	_, contErr := g.Continue(one)
	_, zeroErr := g.ZeroPage(one)
	_, _, countErr := g.Count()
	for name, err := range map[string]error{
		"copy": copyErr, "continue": contErr, "zero page": zeroErr, "protect": g.Protect(one), "unprotect": g.Unprotect(one),
		"read": g.Read(page, []guestmem.Run{one}), "drop": g.Drop([]guestmem.Run{one}), "count": countErr,
		"scan": g.Scan(func(guestmem.Run, bool) bool { return true }),
	} {
		if !errors.Is(err, guestmem.ErrGone) {
			t.Errorf("%s: %v, want ErrGone", name, err)
		}
	}
}

func TestEveryFailurePointOfTheGuestFails(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	g := attach(t, im, vm)
	one, page := guestmem.Run{Start: 1, Pages: 1}, make([]byte, units.PageSize)
	for name, op := range map[string]func() error{
		"guestmem.copy":      func() error { _, err := g.Copy(1, page, false); return err },
		"guestmem.continue":  func() error { _, err := g.Continue(one); return err },
		"guestmem.zeropage":  func() error { _, err := g.ZeroPage(one); return err },
		"guestmem.protect":   func() error { return g.Protect(one) },
		"guestmem.unprotect": func() error { return g.Unprotect(one) },
		"guestmem.read":      func() error { return g.Read(page, []guestmem.Run{one}) },
		"guestmem.scan":      func() error { return g.Scan(func(guestmem.Run, bool) bool { return true }) },
		"guestmem.wake":      func() error { return g.Wake(one) },
		"guestmem.drop":      func() error { return g.Drop([]guestmem.Run{one}) },
	} {
		if err := fault.Arm(name, 0, io.ErrClosedPipe); err != nil {
			t.Fatal(err)
		}
		if err := op(); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("%s: %v, want the armed error", name, err)
		}
	}
}
