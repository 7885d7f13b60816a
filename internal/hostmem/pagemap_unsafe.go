package hostmem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageRegion is struct page_region, scanArg struct pm_scan_arg (linux/fs.h).
type (
	pageRegion struct{ start, end, categories uint64 }

	scanArg struct {
		size, flags, start, end, walkEnd, vec, vecLen, maxPages     uint64
		inverted, categoryMask, categoryAnyofMask, returnCategories uint64
	}
)

const (
	_ = uint(unsafe.Sizeof(pageRegion{})-24) + uint(24-unsafe.Sizeof(pageRegion{})) // struct page_region is 24 bytes
	_ = uint(unsafe.Sizeof(scanArg{})-96) + uint(96-unsafe.Sizeof(scanArg{}))       // struct pm_scan_arg is 96 bytes
)

const (
	ioPagemapScan = 3<<30 | 96<<16 | 'f'<<8 | 16

	categoryFile    = 1 << 2
	categoryPresent = 1 << 3
	categorySwapped = 1 << 4
	categoryPFNZero = 1 << 5
)

// pagemapScan fills regions with private pages of [start, end) and returns how many
// there are and where the walk stopped.
func pagemapScan(fd int, start, end uint64, regions []pageRegion) (n int, walked uint64, errno unix.Errno) {
	arg := scanArg{
		start: start, end: end,
		vec: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(regions)))), vecLen: uint64(len(regions)),
		inverted:          categoryFile | categoryPFNZero,
		categoryMask:      categoryFile | categoryPFNZero,
		categoryAnyofMask: categoryPresent | categorySwapped,
		returnCategories:  categorySwapped,
	}
	arg.size = uint64(unsafe.Sizeof(arg))
	// SAFETY: arg lives on this stack for the call; regions is a heap object that the
	// caller's Pagemap keeps alive, and the kernel writes at most vecLen of it.
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioPagemapScan, uintptr(unsafe.Pointer(&arg)))
	if errno != 0 {
		return 0, 0, errno
	}
	return int(r), arg.walkEnd, 0
}

// address returns where b is in this process.
//
// SAFETY: the number is used to find b's page in our own page table, never turned
// back into a pointer.
func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
