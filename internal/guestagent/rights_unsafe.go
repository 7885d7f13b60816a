package guestagent

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// setThreadGroups sets the supplementary groups of the calling thread only;
// syscall.Setgroups sets those of all threads.
func setThreadGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		// SAFETY: the kernel reads len(groups) 32-bit numbers, which a []uint32 holds;
		// the slice is kept alive by the conversion in the call's argument list.
		p = unsafe.Pointer(&groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0); errno != 0 {
		return errno
	}
	return nil
}
