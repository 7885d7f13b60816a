// Package hostmem holds the host's memory operations that know nothing of guests:
// memory files, mappings off the Go heap, reading another process, finding its
// private pages.
//
// There is no state beyond what the caller owns, and no lock. A Mapping belongs to
// whoever made it; the other functions may be called from any goroutine.
package hostmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// ErrGone: the process that owns the memory is dying or dead.
var ErrGone = errors.New("the process is gone")

// NewMemfd creates an empty memory file of the given size: anonymous memory with a
// descriptor, all of it a hole. It can be sealed.
func NewMemfd(name string, size units.Bytes) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memory file %s: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), name)
	if err := file.Truncate(int64(size)); err != nil {
		return nil, errors.Join(fmt.Errorf("size memory file %s to %v: %w", name, size, err), file.Close())
	}
	return file, nil
}

// sealAll refuses every later change of size and content, by anybody.
const sealAll = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK

// Seal makes a memory file immutable for ever. It fails with unix.EBUSY while any
// process maps it shared and writable.
func Seal(file *os.File) error {
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, sealAll); err != nil {
		return fmt.Errorf("seal %s: %w", file.Name(), err)
	}
	return nil
}

// Sealed reports whether a memory file is immutable.
func Sealed(file *os.File) (bool, error) {
	seals, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return false, fmt.Errorf("read seals of %s: %w", file.Name(), err)
	}
	return seals&sealAll == sealAll, nil
}

// PunchHole frees the pages of file in [off, off+length): they read as zeros.
func PunchHole(file *os.File, off, length int64) error {
	err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
	if err != nil {
		return fmt.Errorf("punch hole %#x+%#x in %s: %w", off, length, file.Name(), err)
	}
	return nil
}

// NextData returns the next part [start, end) of file at or after off that is not
// a hole; start = end = size when there is none.
func NextData(file *os.File, off, size int64) (start, end int64, err error) {
	fd := int(file.Fd())
	start, err = unix.Seek(fd, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return size, size, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("find data in %s after %#x: %w", file.Name(), off, err)
	}
	end, err = unix.Seek(fd, start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, fmt.Errorf("find hole in %s after %#x: %w", file.Name(), start, err)
	}
	return start, end, nil
}

// Allocated returns how much memory or disk file occupies.
func Allocated(file *os.File) (units.Bytes, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", file.Name(), err)
	}
	return units.Bytes(st.Blocks * 512), nil // st_blocks counts 512-byte units, stat(2)
}

// A Mapping is memory off the Go heap. The garbage collector neither scans nor
// moves it, and does not know when it is unmapped: no slice of Data may be used
// after Close.
type Mapping struct {
	Data []byte // immutable until Close
}

// MapShared maps length bytes of file, readable and writable, shared with whoever
// else maps it.
func MapShared(file *os.File, length units.Bytes) (*Mapping, error) {
	return mapping(int(file.Fd()), length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED, file.Name())
}

// MapReadOnly maps length bytes of file for reading. The mapping is private,
// because kernels before 6.7 refuse a shared one of a sealed file; as it is never
// written, it shows the file's own pages. Reading a hole through it would
// allocate a page of the file: don't.
func MapReadOnly(file *os.File, length units.Bytes) (*Mapping, error) {
	return mapping(int(file.Fd()), length, unix.PROT_READ, unix.MAP_PRIVATE, file.Name())
}

// MapAnonymous maps length bytes of fresh zeroed memory.
func MapAnonymous(length units.Bytes) (*Mapping, error) {
	return mapping(-1, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, "anonymous memory")
}

func mapping(fd int, length units.Bytes, prot, flags int, name string) (*Mapping, error) {
	data, err := unix.Mmap(fd, 0, int(length), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("map %v of %s: %w", length, name, err)
	}
	return &Mapping{Data: data}, nil
}

// Close unmaps the memory.
func (m *Mapping) Close() error {
	data := m.Data
	m.Data = nil
	if data == nil {
		return nil
	}
	if err := unix.Munmap(data); err != nil {
		return fmt.Errorf("unmap %d bytes: %w", len(data), err)
	}
	return nil
}

// A Range is a part of another process's address space, in bytes. The shim's
// protocol sends it as it is.
type Range struct{ Addr, Len uint64 }

// SetNice sets the niceness of one thread (0 means the caller's own). A value
// below the current one needs CAP_SYS_NICE.
func SetNice(tid, nice int) error {
	if err := unix.Setpriority(unix.PRIO_PROCESS, tid, nice); err != nil {
		return fmt.Errorf("set niceness of thread %d to %d: %w", tid, nice, err)
	}
	return nil
}
