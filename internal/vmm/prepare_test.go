package vmm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// prepared starts a prepared clone of a tiny template.
func prepared(t *testing.T, h *Host, s Spec) Machine {
	t.Helper()
	s.State = nil
	m, err := h.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestAPreparedMachineIsLoadedLater(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	m := prepared(t, h, template.spec(t, h))
	if err := m.Load(t.Context(), template.state); err != nil {
		t.Fatal(err)
	}
	if err := m.Load(t.Context(), template.state); !errors.Is(err, errNotPrepared) {
		t.Errorf("a second Load: %v, want errNotPrepared", err)
	}
	if err := m.SetDisk(t.Context(), guestDisk(t, h, 0, tickOn)); !errors.Is(err, errNotPrepared) {
		t.Errorf("SetDisk after Load: %v, want errNotPrepared", err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitConsole(t, m, "tick 0080")
	if m.Timing().Load <= 0 {
		t.Error("the time of Load is not reported")
	}
}

// openFiles lists what a VMM has open.
func openFiles(t *testing.T, m Machine) string {
	t.Helper()
	fds, err := filepath.Glob("/proc/" + strconv.Itoa(m.PID()) + "/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil {
			all = append(all, to)
		}
	}
	return strings.Join(all, "\n")
}

func inode(t *testing.T, f *os.File) string {
	t.Helper()
	to, err := os.Readlink(procFD(int(f.Fd())))
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func TestAPreparedMachineTakesAnotherDisk(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	spec := template.spec(t, h)
	m := prepared(t, h, spec)
	other := guestDisk(t, h, 7, tickOn)
	if err := m.SetDisk(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := m.Load(t.Context(), template.state); err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitConsole(t, m, "tick 0080")
	// The descriptor that the VMM inherited stays; the one its disk was opened with goes.
	files := openFiles(t, m)
	if strings.Count(files, inode(t, spec.Disk)) > 1 || !strings.Contains(files, inode(t, other)) {
		t.Errorf("open in the VMM:\n%s\nwant %s in place of %s", files, inode(t, other), inode(t, spec.Disk))
	}
	small, err := h.TempFile("small")
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	if err := prepared(t, h, template.spec(t, h)).SetDisk(t.Context(), small); err == nil || !strings.Contains(err.Error(), "set disk: it has") {
		t.Errorf("a disk of another size is taken: %v", err)
	}
}

func TestADiskIsCopiedAsItIsWhenPinned(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	template := buildTiny(t, h, 0xffff, tickOn)
	spec := template.spec(t, h)
	if err := spec.Disk.Truncate(4 << 30); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("what lies on the disk. "), 100_000)
	if _, err := spec.Disk.WriteAt(want, 1<<30); err != nil {
		t.Fatal(err)
	}
	m := startRunning(t, h, spec)
	for range 2 { // names of a first copy must not be in the way of a second
		dst, err := h.TempFile("copy")
		if err != nil {
			t.Fatal(err)
		}
		defer dst.Close()
		c, err := m.CopyDisk(t.Context(), spec.Disk, dst)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if err := c.Pin(t.Context()); err != nil {
			t.Fatal(err)
		}
		pinned := time.Since(begin)
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("pinned after %v, whole after %v", pinned, time.Since(begin))
		got := make([]byte, len(want))
		if _, err := dst.ReadAt(got, 1<<30); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the copy differs (%v)", err)
		}
		st, err := os.Stat(procFD(int(dst.Fd())))
		if err != nil || st.Size() != 4<<30 {
			t.Errorf("the copy has %v bytes (%v)", st.Size(), err)
		}
		if n := blocks(t, dst); n > int64(len(want))+1<<20 {
			t.Errorf("the copy occupies %d bytes for %d of data", n, len(want))
		}
		if strings.Contains(openFiles(t, m), inode(t, dst)) {
			t.Error("the VMM has the copy open still")
		}
	}
}

func TestACopyOfADiskCanBeGivenUp(t *testing.T) {
	t.Parallel()
	h := testHost(t, HostOptions{})
	spec := buildTiny(t, h, 0xffff, tickOn).spec(t, h)
	m := startRunning(t, h, spec)
	for _, pin := range []bool{false, true} {
		dst, err := h.TempFile("copy")
		if err != nil {
			t.Fatal(err)
		}
		defer dst.Close()
		c, err := m.CopyDisk(t.Context(), spec.Disk, dst)
		if err != nil {
			t.Fatal(err)
		}
		if pin {
			if err := c.Pin(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("pinned %v: Wait says %v, want that it was cancelled", pin, err)
		}
		if strings.Contains(openFiles(t, m), inode(t, dst)) {
			t.Error("the VMM has the copy open still")
		}
	}
}

// blocks returns what a file occupies.
func blocks(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}
