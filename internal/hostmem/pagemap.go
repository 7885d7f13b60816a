package hostmem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// A Run is a number of neighbouring private pages of another process.
type Run struct {
	Addr    uint64 // of the first page
	Pages   int
	Swapped bool // not in memory but in swap
}

// A Pagemap looks at the page table of one process. Any goroutine may use it, one
// at a time.
type Pagemap struct {
	file    *os.File
	entries []byte       // scratch of the fallback; nil until needed
	regions []pageRegion // scratch of PAGEMAP_SCAN
	old     bool         // this kernel has no PAGEMAP_SCAN
}

// OpenPagemap opens /proc/PID/pagemap.
func OpenPagemap(pid int) (*Pagemap, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if gone(err) {
		return nil, fmt.Errorf("open pagemap of process %d: %w", pid, ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("open pagemap: %w", err)
	}
	return &Pagemap{file: file}, nil
}

// Close closes the file.
func (p *Pagemap) Close() error { return p.file.Close() }

// Private calls visit for the private pages of [start, end): anonymous memory,
// present or swapped out, neither page cache nor the shared zero page. Runs come
// in ascending order; visit returns false to stop. Pages of a mapping are looked at
// while its process goes on: the answer is exact for pages nobody changes.
func (p *Pagemap) Private(start, end uint64, visit func(Run) bool) error {
	if !p.old {
		err := p.scan(start, end, visit)
		if !errors.Is(err, unix.ENOTTY) {
			return err
		}
		p.old = true // before Linux 6.7
	}
	return p.walk(start, end, visit)
}

// scan uses ioctl(PAGEMAP_SCAN), Documentation/admin-guide/mm/pagemap.rst.
func (p *Pagemap) scan(start, end uint64, visit func(Run) bool) error {
	if p.regions == nil {
		p.regions = make([]pageRegion, 512)
	}
	for start < end {
		n, walked, errno := pagemapScan(int(p.file.Fd()), start, end, p.regions)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.ESRCH:
			return ErrGone
		case errno != 0:
			return fmt.Errorf("scan pagemap: %w", errno)
		case walked <= start && n == 0:
			// A process without an address space: its pagemap is empty.
			return ErrGone
		}
		for _, r := range p.regions[:n] {
			run := Run{Addr: r.start, Pages: int((r.end - r.start) / units.PageSize), Swapped: r.categories&categorySwapped != 0}
			if !visit(run) {
				return nil
			}
		}
		start = walked
	}
	return nil
}

// Bits of an entry of /proc/PID/pagemap.
const (
	entryPresent = 1 << 63
	entrySwapped = 1 << 62
	entryFile    = 1 << 61 // page cache, or anonymous memory that is mapped shared
	entryFrame   = 1<<55 - 1
)

// walk reads the entries themselves: kernels before 6.7.
func (p *Pagemap) walk(start, end uint64, visit func(Run) bool) error {
	zero, err := zeroFrame()
	if err != nil {
		return err
	}
	if p.entries == nil {
		p.entries = make([]byte, 8*4096)
	}
	var run Run
	for at := start; at < end; {
		want := min(len(p.entries), int((end-at)/units.PageSize*8))
		n, err := p.file.ReadAt(p.entries[:want], int64(at/units.PageSize*8))
		if n < want {
			if n == 0 || gone(err) {
				return ErrGone
			}
			return fmt.Errorf("read pagemap: %w", err)
		}
		for i := 0; i < n; i += 8 {
			e := binary.NativeEndian.Uint64(p.entries[i:])
			swapped := e&entrySwapped != 0
			private := swapped || e&entryPresent != 0 && e&entryFile == 0 && e&entryFrame != zero
			if private && run.Pages > 0 && run.Swapped == swapped && run.Addr+uint64(run.Pages)*units.PageSize == at {
				run.Pages++
			} else if private {
				if run.Pages > 0 && !visit(run) {
					return nil
				}
				run = Run{Addr: at, Pages: 1, Swapped: swapped}
			}
			at += units.PageSize
		}
	}
	if run.Pages > 0 {
		visit(run)
	}
	return nil
}

// noFrame is no page's physical frame: it needs more bits than an entry has.
const noFrame = ^uint64(0)

// zeroFrame finds the physical frame of the kernel's zero page, which a pagemap entry
// does not tell from anonymous memory: two pages of ours that were only read share it. A
// kernel that gives each reader a page of its own has noFrame; zero pages then count as
// private and are encoded once more for nothing.
var zeroFrame = sync.OnceValues(func() (uint64, error) {
	m, err := MapAnonymous(2 * units.PageSize)
	if err != nil {
		return 0, err
	}
	defer m.Close() //nolint:errcheck // two pages
	file, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0, fmt.Errorf("find the zero page: %w", err)
	}
	defer file.Close() //nolint:errcheck // read only
	var e [2 * 8]byte
	e[0] = m.Data[0] + m.Data[units.PageSize] // maps it twice
	if _, err := file.ReadAt(e[:], int64(address(m.Data)/units.PageSize*8)); err != nil {
		return 0, fmt.Errorf("find the zero page: %w", err)
	}
	first, second := binary.NativeEndian.Uint64(e[:])&entryFrame, binary.NativeEndian.Uint64(e[8:])&entryFrame
	switch {
	case first == 0:
		return 0, errors.New("find the zero page: the kernel hides page frames (CAP_SYS_ADMIN is needed)")
	case first != second:
		return noFrame, nil
	}
	return first, nil
})
