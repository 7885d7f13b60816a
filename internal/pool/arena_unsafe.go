package pool

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What the tables on the Go heap take.
const (
	poolBytes    = int64(unsafe.Sizeof(Pool{}))
	readerBytes  = int64(unsafe.Sizeof(Reader{}))
	chunkBytes   = int64(unsafe.Sizeof(segmentChunk{}))
	pointerBytes = int64(unsafe.Sizeof(uintptr(0)))
)

const _ = uint(tablePageBits/8-unsafe.Sizeof(tablePage{})) + uint(segmentSize-unsafe.Sizeof(segmentChunk{}))

// word returns the table's word of h.
func (p *Pool) word(h Handle) *atomic.Uint64 {
	// SAFETY: the index is checked, and the table's length is a multiple of 8, so
	// the 8 bytes lie in it; it starts at a page, so they are aligned.
	return (*atomic.Uint64)(unsafe.Pointer(&p.table[int(h)*wordSize]))
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
