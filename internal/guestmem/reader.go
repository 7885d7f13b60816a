package guestmem

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// readPages is how many pages one call of a Reader reads: 256 KiB. Twice as many save
// nothing that can be measured, one at a time costs 2 us a page more.
const readPages = 64

// A Reader reads the private pages of a VMM that is under no userfaultfd: a sandbox
// without compression. One goroutine uses it at a time.
//
// A page is read in one system call, but the guest goes on meanwhile: two pages may be of
// different moments, and a page that is written just then may be torn.
type Reader struct {
	pid     int              // immutable
	base    uint64           // immutable; where frame 0 is in the VMM
	size    uint64           // immutable
	pagemap *hostmem.Pagemap // immutable
	buffer  []byte           // readPages pages
	remote  [1]unix.RemoteIovec
}

// OpenReader finds process pid's private mapping of im. ErrGone: the process has ended.
//
// Preconditions: the mapping is not under a userfaultfd. Reading would wait for its server.
func OpenReader(pid int, im *Image) (*Reader, error) {
	base, err := hostmem.FindPrivate(pid, im.file, uint64(im.size))
	if err != nil {
		return nil, fmt.Errorf("open guest memory: %w", err)
	}
	pagemap, err := hostmem.OpenPagemap(pid)
	if err != nil {
		return nil, fmt.Errorf("open guest memory: %w", err)
	}
	return &Reader{
		pid: pid, base: base, size: uint64(im.size), pagemap: pagemap,
		buffer: make([]byte, readPages*units.PageSize),
	}, nil
}

// Private calls visit for each private page, in memory or in swap, in ascending order. The
// page is valid until visit returns. An error of visit ends it and is returned as it is.
func (r *Reader) Private(visit func(f units.Frame, page *units.Page) error) error {
	var failed error
	err := r.pagemap.Private(r.base, r.base+r.size, func(run hostmem.Run) bool {
		for done := 0; done < run.Pages && failed == nil; done += readPages {
			n := min(readPages, run.Pages-done)
			failed = r.read(run.Addr+uint64(done)*units.PageSize, n, visit)
		}
		return failed == nil
	})
	if err != nil {
		return fmt.Errorf("find private pages of process %d: %w", r.pid, err)
	}
	return failed
}

func (r *Reader) read(addr uint64, pages int, visit func(units.Frame, *units.Page) error) error {
	dst := r.buffer[:pages*units.PageSize]
	rng := [1]hostmem.Range{{Addr: addr, Len: uint64(len(dst))}}
	if err := errors.Join(readPoint.Err(), hostmem.ReadProcess(r.pid, dst, rng[:], r.remote[:])); err != nil {
		return fmt.Errorf("read private pages: %w", err)
	}
	f := units.Frame((addr - r.base) / units.PageSize)
	for ; len(dst) > 0; dst = dst[units.PageSize:] {
		if err := visit(f, (*units.Page)(dst)); err != nil {
			return err
		}
		f++
	}
	return nil
}

// Close gives up the pagemap.
func (r *Reader) Close() error { return r.pagemap.Close() }
