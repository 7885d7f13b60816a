package uffd

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mirrors of linux/userfaultfd.h, each with its size checked at compile time.
type (
	apiArg struct{ api, features, ioctls uint64 }

	registerArg struct{ start, length, mode, ioctls uint64 }

	copyArg struct {
		dst, src, length, mode uint64
		copied                 int64
	}
	// moveArg is uffdio_zeropage and uffdio_continue, which are alike.
	moveArg struct {
		start, length, mode uint64
		moved               int64
	}

	protectArg struct{ start, length, mode uint64 }

	rangeArg struct{ start, length uint64 }
)

const (
	_ = uint(unsafe.Sizeof(apiArg{})-24) + uint(24-unsafe.Sizeof(apiArg{}))           // struct uffdio_api is 24 bytes
	_ = uint(unsafe.Sizeof(registerArg{})-32) + uint(32-unsafe.Sizeof(registerArg{})) // struct uffdio_register is 32 bytes
	_ = uint(unsafe.Sizeof(copyArg{})-40) + uint(40-unsafe.Sizeof(copyArg{}))         // struct uffdio_copy is 40 bytes
	_ = uint(unsafe.Sizeof(moveArg{})-32) + uint(32-unsafe.Sizeof(moveArg{}))         // struct uffdio_continue is 32 bytes
	_ = uint(unsafe.Sizeof(protectArg{})-24) + uint(24-unsafe.Sizeof(protectArg{}))   // struct uffdio_writeprotect is 24 bytes
	_ = uint(unsafe.Sizeof(rangeArg{})-16) + uint(16-unsafe.Sizeof(rangeArg{}))       // struct uffdio_range is 16 bytes
	_ = uint(unsafe.Sizeof(Event{})-32) + uint(32-unsafe.Sizeof(Event{}))             // struct uffd_msg is 32 bytes
)

// _IOC(dir, 0xAA, nr, size) of x86-64; bit 31 is read, bit 30 is write.
const (
	ioNew          = 0xAA00
	ioAPI          = 3<<30 | 24<<16 | 0xAA<<8 | 0x3F
	ioRegister     = 3<<30 | 32<<16 | 0xAA<<8 // number 0
	ioWake         = 2<<30 | 16<<16 | 0xAA<<8 | 0x02
	ioCopy         = 3<<30 | 40<<16 | 0xAA<<8 | 0x03
	ioZeropage     = 3<<30 | 32<<16 | 0xAA<<8 | 0x04
	ioWriteprotect = 3<<30 | 24<<16 | 0xAA<<8 | 0x06
	ioContinue     = 3<<30 | 32<<16 | 0xAA<<8 | 0x07

	apiVersion    = 0xAA
	copyModeWP    = 1 << 1
	protectModeWP = 1 << 0
)

// SAFETY for all calls below: the argument lives on the caller's stack or in a Go
// object for the whole of the (synchronous) system call, and the kernel writes no
// more than the size that the request number carries.

func (f *FD) ioctl(request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(f.fd), request, uintptr(arg))
	return errno
}

func (f *FD) api(arg *apiArg) unix.Errno { return f.ioctl(ioAPI, unsafe.Pointer(arg)) }

func (f *FD) register(arg *registerArg) unix.Errno { return f.ioctl(ioRegister, unsafe.Pointer(arg)) }

// copy returns how many bytes were installed (0 if none) and why it stopped. The
// kernel reports an error both in errno and as a negative `copied`.
func (f *FD) copy(dst uint64, src []byte, mode uint64) (int64, unix.Errno) {
	arg := copyArg{dst: dst, src: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(src)))), length: uint64(len(src)), mode: mode}
	errno := f.ioctl(ioCopy, unsafe.Pointer(&arg))
	// SAFETY: src is named only by a number in arg; it must outlive the call.
	runtime.KeepAlive(src)
	return outcome(arg.copied, errno)
}

func (f *FD) cont(start, length uint64) (int64, unix.Errno) {
	arg := moveArg{start: start, length: length}
	errno := f.ioctl(ioContinue, unsafe.Pointer(&arg))
	return outcome(arg.moved, errno)
}

func (f *FD) zeropage(start, length uint64) (int64, unix.Errno) {
	arg := moveArg{start: start, length: length}
	errno := f.ioctl(ioZeropage, unsafe.Pointer(&arg))
	return outcome(arg.moved, errno)
}

// outcome splits what the kernel reports into progress and error.
func outcome(moved int64, errno unix.Errno) (int64, unix.Errno) {
	switch {
	case moved > 0:
		return moved, 0
	case moved < 0:
		return 0, unix.Errno(-moved)
	case errno == 0:
		return 0, unix.EIO // success without progress: must not be mistaken for either
	}
	return 0, errno
}

func (f *FD) writeprotect(start, length, mode uint64) unix.Errno {
	arg := protectArg{start: start, length: length, mode: mode}
	return f.ioctl(ioWriteprotect, unsafe.Pointer(&arg))
}

func (f *FD) wake(start, length uint64) unix.Errno {
	arg := rangeArg{start: start, length: length}
	return f.ioctl(ioWake, unsafe.Pointer(&arg))
}

// read is a raw system call, without telling the scheduler: the descriptor is
// non-blocking, so that the call takes well under a microsecond.
func (f *FD) read(events []Event) (int, unix.Errno) {
	size := uintptr(len(events)) * unsafe.Sizeof(Event{})
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(f.fd), uintptr(unsafe.Pointer(unsafe.SliceData(events))), size)
	if errno != 0 {
		return 0, errno
	}
	return int(n / unsafe.Sizeof(Event{})), 0
}

func openFrom(dev int) (int, unix.Errno) {
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), ioNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	return int(fd), errno
}

func openSyscall() (int, unix.Errno) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	return int(fd), errno
}
