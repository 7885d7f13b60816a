package pool

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// chunkBytes is what the tables of chunkLen segments take on the Go heap.
const chunkBytes = int64(unsafe.Sizeof([chunkLen]segment{}))

// refs returns the counter at off of mem.
func refs(mem []byte, off int) *atomic.Uint32 {
	// SAFETY: the index is checked; every off is a multiple of 16 (plus a
	// multiple of 4) in a mapping that starts at a page, so it is aligned, and
	// mem[off:off+4] lies in it because a slot has at least 16 bytes.
	return (*atomic.Uint32)(unsafe.Pointer(&mem[off]))
}

// plainPages keeps huge pages out of mem, where one byte would bring 2 MiB into
// memory behind the accounts, and mem out of core dumps: it holds guests' data.
func plainPages(mem []byte) error {
	if err := unix.Madvise(mem, unix.MADV_NOHUGEPAGE); err != nil && err != unix.EINVAL { //nolint:errorlint // EINVAL: a kernel without huge pages
		return fmt.Errorf("forbid huge pages in the arena: %w", err)
	}
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		return fmt.Errorf("keep the arena out of core dumps: %w", err)
	}
	return nil
}
