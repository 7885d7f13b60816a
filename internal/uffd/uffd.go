// Package uffd is a thin layer over the userfaultfd of another process.
//
// An FD is configured once and then used by any goroutine:
//
//	received --Enable, Register--> serving --Close--> closed
//
// The package holds no lock and no state: the caller must not call Close while
// another call is running. Nothing here allocates on the way to success, and no
// call loads from or stores to the memory that the userfaultfd watches
// (a Go thread that faulted there would stop the garbage collector).
//
// Kernel facts: ioctl_userfaultfd(2), mm/userfaultfd.c, fs/userfaultfd.c.
package uffd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

var (
	// ErrGone: the process that owns the memory is dying or dead. Nothing more can
	// be installed, and nobody waits for it.
	ErrGone = errors.New("the process is gone")
	// ErrExists: the page at which the call stopped is mapped already. Pages before
	// it were installed; nobody who waits for this page was woken.
	ErrExists = errors.New("page is mapped already")
)

// A Feature is a bit of struct uffdio_api.features.
type Feature uint64

// The features that AgentZip needs (linux/userfaultfd.h).
const (
	PagefaultFlagWP  Feature = 1 << 0
	MissingShmem     Feature = 1 << 5
	MinorShmem       Feature = 1 << 10
	WPHugetlbfsShmem Feature = 1 << 12
)

// Needed is the set that Enable asks for when serving guest memory: a dropped
// page of a private shmem mapping raises a minor fault, a hole a missing one, and
// shmem pages can be write-protected.
const Needed = PagefaultFlagWP | MissingShmem | MinorShmem | WPHugetlbfsShmem

// A Mode is a bit of struct uffdio_register.mode.
type Mode uint64

// What a registered range reports.
const (
	RegisterMissing Mode = 1 << 0
	RegisterWP      Mode = 1 << 1
	RegisterMinor   Mode = 1 << 2
)

// Bits of struct uffdio_register.ioctls that a range must offer.
const (
	ioctlWake         = 1 << 2
	ioctlCopy         = 1 << 3
	ioctlZeropage     = 1 << 4
	ioctlWriteprotect = 1 << 6
	ioctlContinue     = 1 << 7
	neededIoctls      = ioctlWake | ioctlCopy | ioctlZeropage | ioctlWriteprotect | ioctlContinue
)

// eventPagefault is UFFD_EVENT_PAGEFAULT, the only event that exists without the
// non-cooperative features, which AgentZip does not ask for.
const eventPagefault = 0x12

// Bits of Event.Flags.
const (
	flagWrite = 1 << 0
	flagWP    = 1 << 1
	flagMinor = 1 << 2
)

// An Event is one struct uffd_msg: a thread waits for a page.
type Event struct {
	event    uint8
	_        uint8
	_        uint16
	_        uint32
	Flags    uint64
	Addr     uint64 // of the access; not rounded when the kernel was asked for exact addresses
	reserved uint64
}

// Fault reports whether the event is a page fault.
func (e *Event) Fault() bool { return e.event == eventPagefault }

// Write reports whether the thread wants to write.
func (e *Event) Write() bool { return e.Flags&(flagWrite|flagWP) != 0 }

// WriteProtect reports whether the page is mapped but write-protected.
func (e *Event) WriteProtect() bool { return e.Flags&flagWP != 0 }

// Minor reports whether the page is not mapped but in the page cache.
func (e *Event) Minor() bool { return e.Flags&flagMinor != 0 }

// FD is a userfaultfd. Create it with New or Open.
type FD struct{ fd int }

// New takes ownership of the descriptor fd, which must be non-blocking.
func New(fd int) *FD { return &FD{fd: fd} }

// Fd returns the descriptor, for polling only.
func (f *FD) Fd() int { return f.fd }

// Close closes the descriptor. Missing pages of a process that has no other copy
// of it then read as the file's pages: the VMM's shim keeps one.
func (f *FD) Close() error {
	if err := unix.Close(f.fd); err != nil {
		return fmt.Errorf("close userfaultfd: %w", err)
	}
	return nil
}

// Enable performs the API handshake and checks that every wanted feature is there.
func (f *FD) Enable(want Feature) error {
	arg := apiArg{api: apiVersion, features: uint64(want)}
	if errno := f.api(&arg); errno != 0 {
		return fmt.Errorf("enable userfaultfd features %#x: %w", uint64(want), errno)
	}
	if got := Feature(arg.features); got&want != want {
		return fmt.Errorf("enable userfaultfd: this kernel lacks the features %#x (Linux 5.19 or newer is needed)", uint64(want&^got))
	}
	return nil
}

// Register starts the reporting of faults in [addr, addr+length).
func (f *FD) Register(addr, length uint64, mode Mode) error {
	arg := registerArg{start: addr, length: length, mode: uint64(mode)}
	if errno := f.register(&arg); errno != 0 {
		if errno == unix.ESRCH || errno == unix.ENOMEM {
			return fmt.Errorf("register range %#x+%#x: %w (%w)", addr, length, ErrGone, errno)
		}
		return fmt.Errorf("register range %#x+%#x: %w", addr, length, errno)
	}
	if missing := neededIoctls &^ arg.ioctls; missing != 0 {
		return fmt.Errorf("register range %#x+%#x: the kernel does not offer the operations %#x on it", addr, length, missing)
	}
	return nil
}

// Read fills events with what is waiting and returns how many there are, 0 if
// none. It never blocks.
func (f *FD) Read(events []Event) (int, error) {
	n, errno := f.read(events)
	switch errno {
	case 0:
		return n, nil
	case unix.EAGAIN, unix.EINTR:
		return 0, nil
	}
	return 0, gone(errno)
}

// retries bounds how often one call repeats an operation that the kernel asks to
// repeat. A layout change of the process takes microseconds; a loop longer than
// this is a kernel that will never agree, and must not hang a fault thread.
const retries = 10_000

// repeat calls step, which says how far it came, until length is done: the kernel stops
// early when it is interrupted or the address space changes. step does not escape, so
// nothing is allocated on the fault path.
func repeat(length uint64, step func(done uint64) (int64, unix.Errno)) (done uint64, err error) {
	for try := 0; done < length; try++ {
		n, errno := step(done)
		if n > 0 {
			done += uint64(n)
			continue
		}
		if errno != unix.EAGAIN || try >= retries {
			return done, gone(errno)
		}
	}
	return done, nil
}

// Copy installs the pages in src at addr, write-protected if protect is set, and
// wakes who waits for them. done is how many bytes were installed, also when err
// is not nil; on an error nobody who waits for the rest is woken.
func (f *FD) Copy(addr uint64, src []byte, protect bool) (done int, err error) {
	mode := uint64(0)
	if protect {
		mode = copyModeWP
	}
	n, err := repeat(uint64(len(src)), func(done uint64) (int64, unix.Errno) { return f.copy(addr+done, src[done:], mode) })
	return int(n), err
}

// Continue maps the page cache's pages of [addr, addr+length) and wakes who waits
// for them. done and err are as for Copy.
func (f *FD) Continue(addr, length uint64) (done uint64, err error) {
	return repeat(length, func(done uint64) (int64, unix.Errno) { return f.cont(addr+done, length-done) })
}

// ZeroPage maps the shared zero page in [addr, addr+length) and wakes who waits.
// A later write copies it without any event. done and err are as for Copy. A
// write-protect marker left in the page table counts as a mapped page.
func (f *FD) ZeroPage(addr, length uint64) (done uint64, err error) {
	return repeat(length, func(done uint64) (int64, unix.Errno) { return f.zeropage(addr+done, length-done) })
}

// Protect write-protects [addr, addr+length): each later write raises an event
// before it happens. Pages that are not mapped get a marker, which later counts
// as mapped for ZeroPage and as swapped out for PAGEMAP_SCAN.
func (f *FD) Protect(addr, length uint64) error { return f.protect(addr, length, protectModeWP) }

// Unprotect removes the protection and the markers of [addr, addr+length) and
// wakes who waits there.
func (f *FD) Unprotect(addr, length uint64) error { return f.protect(addr, length, 0) }

func (f *FD) protect(addr, length, mode uint64) error {
	for try := 0; ; try++ {
		errno := f.writeprotect(addr, length, mode)
		if errno == 0 {
			return nil
		}
		if errno != unix.EAGAIN || try >= retries {
			return gone(errno)
		}
	}
}

// Wake wakes who waits for a page of [addr, addr+length); they try again and
// fault again if they must.
func (f *FD) Wake(addr, length uint64) error {
	if errno := f.wake(addr, length); errno != 0 {
		return gone(errno)
	}
	return nil
}

// gone maps errno to the error of this package. ESRCH: the address space is being
// torn down. ENOENT: the range is no longer mapped, which for guest memory happens
// only in that teardown.
func gone(errno unix.Errno) error {
	switch errno {
	case unix.EEXIST:
		return ErrExists
	case unix.ESRCH, unix.ENOENT:
		return ErrGone
	}
	return errno
}

// Open opens a userfaultfd of this process: from /dev/userfaultfd, or by the
// system call where that device does not exist (before Linux 6.1).
func Open() (*FD, error) {
	dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(dev) //nolint:errcheck // read nothing, wrote nothing
		fd, errno := openFrom(dev)
		if errno != 0 {
			return nil, fmt.Errorf("open userfaultfd from its device: %w", errno)
		}
		return New(fd), nil
	}
	fd, errno := openSyscall()
	if errno != 0 {
		return nil, fmt.Errorf("open userfaultfd: %w", errno)
	}
	return New(fd), nil
}

const _ = uint(units.PageSize-4096) + uint(4096-units.PageSize) // the kernel's base page
