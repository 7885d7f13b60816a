package uffd

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// Faults of another process are package guestmem's tests. These watch a mapping of this
// process and never touch a page of it that is not mapped: nobody would serve the fault.

const pages = 16

// watched returns a userfaultfd over a private mapping of a memory file of which the first
// half has pages and the second is a hole.
func watched(t *testing.T) (f *FD, addr uint64, data []byte) {
	t.Helper()
	f, err := Open()
	if err != nil {
		t.Skipf("a userfaultfd is needed: %v", err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Enable(Needed); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "test")
	defer file.Close()
	if err := file.Truncate(pages * units.PageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt(bytes.Repeat([]byte{'T'}, pages/2*units.PageSize), 0); err != nil {
		t.Fatal(err)
	}
	data, err = unix.Mmap(fd, 0, pages*units.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(data) })
	addr = uint64(uintptr(unsafe.Pointer(&data[0]))) // SAFETY: a number for ioctls, never a pointer again
	if err := f.Register(addr, uint64(len(data)), RegisterMissing|RegisterMinor|RegisterWP); err != nil {
		t.Fatal(err)
	}
	return f, addr, data
}

func TestPagesAreInstalledAndWhatIsMappedIsSaid(t *testing.T) {
	f, addr, data := watched(t)
	src := bytes.Repeat([]byte{'D'}, 2*units.PageSize)
	page := func(n uint64) uint64 { return addr + n*units.PageSize }
	if n, err := f.Copy(page(1), src, true); err != nil || n != len(src) {
		t.Errorf("copy: %d, %v", n, err)
	}
	if n, err := f.Copy(page(0), src, false); !errors.Is(err, ErrExists) || n != units.PageSize {
		t.Errorf("copy into a mapped page: %d, %v, want one page and ErrExists", n, err)
	}
	if n, err := f.Continue(page(3), 3*units.PageSize); err != nil || n != 3*units.PageSize {
		t.Errorf("continue: %d, %v", n, err)
	}
	if n, err := f.Continue(page(9), units.PageSize); !errors.Is(err, unix.EFAULT) || n != 0 {
		t.Errorf("continue in a hole: %d, %v, want EFAULT", n, err)
	}
	if n, err := f.ZeroPage(page(9), 2*units.PageSize); err != nil || n != 2*units.PageSize {
		t.Errorf("zero page: %d, %v", n, err)
	}
	if err := errors.Join(f.Protect(page(0), units.PageSize), f.Unprotect(page(0), 2*units.PageSize), f.Wake(page(0), units.PageSize)); err != nil {
		t.Errorf("protect, unprotect, wake: %v", err)
	}
	var got []byte
	for _, n := range []int{0, 1, 2, 3, 5, 9, 10} {
		got = append(got, data[n*units.PageSize+77])
	}
	if want := []byte{'D', 'D', 'D', 'T', 'T', 0, 0}; !bytes.Equal(got, want) {
		t.Errorf("contents %q, want %q", got, want)
	}
	data[0] = 'W' // unprotected: no fault
	if n, err := f.Read(make([]Event, 4)); n != 0 || err != nil {
		t.Errorf("events %d, %v, want none", n, err)
	}
}

func TestOperationsDoNotAllocate(t *testing.T) {
	f, addr, _ := watched(t)
	src, events := make([]byte, units.PageSize), make([]Event, 4)
	n := testing.AllocsPerRun(20, func() {
		_, _ = f.Copy(addr, src, true)
		_, _ = f.Continue(addr, units.PageSize)
		_, _ = f.ZeroPage(addr, units.PageSize)
		_ = f.Unprotect(addr, units.PageSize)
		_ = f.Wake(addr, units.PageSize)
		_, _ = f.Read(events)
	})
	if n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func TestWhatTheKernelRefusesIsNamed(t *testing.T) {
	f, err := Open()
	if err != nil {
		t.Skipf("a userfaultfd is needed: %v", err)
	}
	if err := f.Enable(1 << 62); err == nil || !strings.Contains(err.Error(), "0x4000000000000000") {
		t.Errorf("a feature that no kernel has: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); !errors.Is(err, unix.EBADF) {
		t.Errorf("second close: %v", err)
	}
	w, addr, _ := watched(t)
	if err := w.Register(addr+1, units.PageSize, RegisterMissing); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a range that is not aligned: %v", err)
	}
	if err := w.Enable(Needed); err == nil {
		t.Error("the handshake was done twice")
	}
	if _, err := w.Continue(addr+pages*units.PageSize+1<<30, units.PageSize); !errors.Is(err, ErrGone) {
		t.Errorf("a range that is not mapped: %v, want ErrGone", err)
	}
}

func TestEventsAreRead(t *testing.T) {
	for _, tt := range []struct {
		flags            uint64
		write, wp, minor bool
	}{{0, false, false, false}, {flagWrite, true, false, false}, {flagMinor, false, false, true}, {flagWrite | flagMinor, true, false, true}, {flagWP, true, true, false}} {
		e := Event{event: eventPagefault, Flags: tt.flags}
		if !e.Fault() || e.Write() != tt.write || e.WriteProtect() != tt.wp || e.Minor() != tt.minor {
			t.Errorf("flags %#x: write %v, wp %v, minor %v", tt.flags, e.Write(), e.WriteProtect(), e.Minor())
		}
	}
	if e := (Event{event: 0x13}); e.Fault() {
		t.Error("a fork counts as a fault")
	}
}
