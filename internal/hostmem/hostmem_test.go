package hostmem

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// mapPrivate maps 64 pages of a memory file privately in this process; the file has pages
// 0..31, the rest is a hole.
func mapPrivate(t *testing.T) (file *os.File, data []byte) {
	t.Helper()
	file, err := NewMemfd("test", 64*units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() })
	if _, err := file.WriteAt(bytes.Repeat([]byte{7}, 32*units.PageSize), 0); err != nil {
		t.Fatal(err)
	}
	data, err = unix.Mmap(int(file.Fd()), 0, 64*units.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(data) })
	return file, data
}

func TestBothWaysToFindPrivatePagesAgree(t *testing.T) {
	_, data := mapPrivate(t)
	sum := data[0] + data[5*units.PageSize] // the file's pages, mapped but not private
	for _, p := range []int{1, 2, 3, 10, 31, 32, 63} {
		data[p*units.PageSize] = sum + 1
	}
	pm, err := OpenPagemap(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	start := address(data)
	want := []Run{
		{Addr: start + units.PageSize, Pages: 3},
		{Addr: start + 10*units.PageSize, Pages: 1},
		{Addr: start + 31*units.PageSize, Pages: 2},
		{Addr: start + 63*units.PageSize, Pages: 1},
	}
	for name, find := range map[string]func(uint64, uint64, func(Run) bool) error{"PAGEMAP_SCAN": pm.scan, "entries": pm.walk, "either": pm.Private} {
		var got []Run
		err := find(start, start+uint64(len(data)), func(r Run) bool { got = append(got, r); return true })
		if errors.Is(err, unix.ENOTTY) {
			continue // an old kernel: the other way is all there is
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
		got = nil
		if err := find(start, start+uint64(len(data)), func(r Run) bool { got = append(got, r); return false }); err != nil || len(got) != 1 {
			t.Errorf("%s did not stop when told to: %v, %v", name, got, err)
		}
	}
}

func TestTheZeroPageIsNotPrivate(t *testing.T) {
	m, err := MapAnonymous(8 * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Data[3*units.PageSize] = m.Data[0] + m.Data[5*units.PageSize] + 1 // two reads, one write
	pm, err := OpenPagemap(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	start := address(m.Data)
	for name, find := range map[string]func(uint64, uint64, func(Run) bool) error{"PAGEMAP_SCAN": pm.Private, "entries": pm.walk} {
		var got []Run
		if err := find(start, start+uint64(len(m.Data)), func(r Run) bool { got = append(got, r); return true }); err != nil {
			t.Fatal(err)
		}
		if len(got) == 3 {
			t.Skip("this kernel gives a page of its own to who reads fresh memory")
		}
		if d := cmp.Diff([]Run{{Addr: start + 3*units.PageSize, Pages: 1}}, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

func TestManyRunsAreAllFound(t *testing.T) {
	const pages = 4096 // every second private: more runs than one answer of the kernel holds
	m, err := MapAnonymous(pages * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := unix.Madvise(m.Data, unix.MADV_NOHUGEPAGE); err != nil {
		t.Fatal(err)
	}
	for p := 0; p < pages; p += 2 {
		m.Data[p*units.PageSize] = 1
	}
	pm, err := OpenPagemap(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	start := address(m.Data)
	for name, find := range map[string]func(uint64, uint64, func(Run) bool) error{"PAGEMAP_SCAN": pm.Private, "entries": pm.walk} {
		n := 0
		if err := find(start, start+uint64(len(m.Data)), func(r Run) bool {
			if r.Addr != start+uint64(2*n)*units.PageSize || r.Pages != 1 {
				t.Fatalf("%s: run %d is %+v", name, n, r)
			}
			n++
			return true
		}); err != nil || n != pages/2 {
			t.Errorf("%s: %d runs, %v", name, n, err)
		}
	}
}

func TestAnotherProcessIsReadAsAWholeOrNotAtAll(t *testing.T) {
	_, data := mapPrivate(t)
	copy(data[units.PageSize:], "hello")
	copy(data[3*units.PageSize:], "world")
	start := address(data)
	dst := make([]byte, 10)
	remote := make([]unix.RemoteIovec, 2)
	ranges := []Range{{Addr: start + units.PageSize, Len: 5}, {Addr: start + 3*units.PageSize, Len: 5}}
	if err := ReadProcess(os.Getpid(), dst, ranges, remote); err != nil || string(dst) != "helloworld" {
		t.Errorf("read %q, %v", dst, err)
	}
	ranges[1].Addr = 8 // nothing is mapped there
	if err := ReadProcess(os.Getpid(), dst, ranges, remote); err == nil || !strings.Contains(err.Error(), "5 of 10") {
		t.Errorf("partly unmapped: %v, want an error that says how much was read", err)
	}
	if err := ReadProcess(1<<22, dst, ranges, remote); !errors.Is(err, ErrGone) {
		t.Errorf("no such process: %v, want ErrGone", err)
	}
	if err := ReadProcess(os.Getpid(), dst, make([]Range, 3), remote); err == nil {
		t.Error("more ranges than scratch were taken")
	}
}

func TestExactlyOneWholePrivateMappingIsFound(t *testing.T) {
	file, data := mapPrivate(t)
	size := uint64(len(data))
	if addr, err := FindPrivate(os.Getpid(), file, size); err != nil || addr != address(data) {
		t.Errorf("found %#x, %v, want %#x", addr, err, address(data))
	}
	if _, err := FindPrivate(os.Getpid(), file, size*2); err == nil {
		t.Error("a mapping of another length was taken")
	}
	second, err := unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := FindPrivate(os.Getpid(), file, size); err == nil || !strings.Contains(err.Error(), "found 2") {
		t.Errorf("two mappings: %v", err)
	}
	if err := unix.Munmap(second); err != nil {
		t.Fatal(err)
	}
	shared, err := MapShared(file, units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer shared.Close()
	if _, err := FindPrivate(os.Getpid(), file, size); err == nil || !strings.Contains(err.Error(), "1 others") {
		t.Errorf("a shared mapping beside: %v", err)
	}
	if _, err := FindPrivate(1<<22, file, size); !errors.Is(err, ErrGone) {
		t.Errorf("no such process: %v, want ErrGone", err)
	}
}

func TestAMappingKnowsWhetherKSMMayMergeIt(t *testing.T) {
	_, data := mapPrivate(t)
	if got, err := Mergeable(os.Getpid(), address(data)); err != nil || got {
		t.Errorf("fresh mapping: %v, %v", got, err)
	}
	if err := unix.Madvise(data, unix.MADV_MERGEABLE); err != nil {
		t.Skipf("this kernel has no KSM: %v", err)
	}
	if got, err := Mergeable(os.Getpid(), address(data)); err != nil || !got {
		t.Errorf("mergeable mapping: %v, %v", got, err)
	}
	if _, err := Mergeable(os.Getpid(), 8); err == nil {
		t.Error("an address without a mapping has flags")
	}
	if _, err := Mergeable(1<<22, 8); !errors.Is(err, ErrGone) {
		t.Errorf("no such process: %v, want ErrGone", err)
	}
}

func TestDataAndHolesOfAFileAreFound(t *testing.T) {
	file, _ := mapPrivate(t)
	size := int64(64 * units.PageSize)
	if err := PunchHole(file, 4*units.PageSize, 2*units.PageSize); err != nil {
		t.Fatal(err)
	}
	var got [][2]int64
	for off := int64(0); off < size; {
		start, end, err := NextData(file, off, size)
		if err != nil {
			t.Fatal(err)
		}
		if start < size {
			got = append(got, [2]int64{start / units.PageSize, end / units.PageSize})
		}
		off = end
	}
	if d := cmp.Diff([][2]int64{{0, 4}, {6, 32}}, got); d != "" {
		t.Errorf("data (-want +got):\n%s", d)
	}
	if n, err := Allocated(file); err != nil || n != 30*units.PageSize {
		t.Errorf("allocated %v, %v, want 30 pages", n, err)
	}
	if sealed, err := Sealed(file); err != nil || sealed {
		t.Errorf("sealed %v, %v", sealed, err)
	}
	if err := Seal(file); err != nil {
		t.Fatal(err)
	}
	if sealed, err := Sealed(file); err != nil || !sealed {
		t.Errorf("after sealing: %v, %v", sealed, err)
	}
}

func TestFailuresNameTheirObject(t *testing.T) {
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	_, sealedErr := Sealed(plain)
	_, memfdErr := NewMemfd(strings.Repeat("x", 300), units.PageSize)
	_, mapErr := MapShared(plain, -1)
	for want, err := range map[string]error{
		"seal":    Seal(plain),
		"seals":   sealedErr,
		"xxx":     memfdErr,
		"map":     mapErr,
		"thread":  SetNice(1<<22, 0),
		"pagemap": func() error { _, err := OpenPagemap(1 << 22); return err }(),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %q", err, want)
		}
	}
	m, err := MapAnonymous(units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Errorf("close twice: %v", err)
	}
}
