package guestmem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/uffd"
)

// The protocol of shim/shim.c.
const (
	shimMagic   = 0x48535a41 // "AZSH"
	shimVersion = 2
	opGo        = 1
	opDrop      = 2
	opGuard     = 3
	// MaxRanges is how many ranges one Drop takes.
	MaxRanges = 64
	// Environment variables by which the shim finds its descriptors.
	ShimFDEnv = "AZ_SHIM_FD"
	UffdFDEnv = "AZ_UFFD_FD"
)

// shimTimeout bounds each answer of a shim. Its work takes microseconds, its thread
// may have to wait for a core. Doubled, a hung VMM is noticed later; much shorter, an
// overloaded host would kill healthy sandboxes.
const shimTimeout = 20 * time.Second

// shimNice is the niceness of a shim's thread: faults wait while it drops a batch, so
// it goes before vCPU threads.
const shimNice = -10

var dropPoint = fault.NewPoint("guestmem.drop")

// ErrShim: the shim did not answer, or said what it should not. Whether it dropped
// the pages it was asked to is unknown.
var ErrShim = errors.New("the shim failed")

// A Shim is the daemon's end of the library preloaded into one VMM process. Closing
// it ends that process.
type Shim struct {
	pid  int      // immutable; as the VMM sees it
	uffd *uffd.FD // immutable; owned by the Guest once attached

	mu  sync.Mutex // serialises requests
	fd  int        // guarded by mu; -1 once closed
	msg [8 + MaxRanges*16]byte
}

// AcceptShim reads the hello of a VMM's shim and takes over conn (SOCK_SEQPACKET),
// also on an error. The VMM does nothing before Go.
func AcceptShim(conn *net.UnixConn) (*Shim, error) {
	file, err := conn.File() // a copy that no poller watches: the fault path uses plain system calls
	if err := errors.Join(err, conn.Close()); err != nil {
		return nil, fmt.Errorf("accept shim: %w", err)
	}
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("accept shim: %w", err)
	}
	sh, err := handshake(fd)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("accept shim: %w", err), unix.Close(fd))
	}
	return sh, nil
}

func handshake(fd int) (*Shim, error) {
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, err
	}
	timeout := unix.NsecToTimeval(shimTimeout.Nanoseconds())
	if err := errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout)); err != nil {
		return nil, err
	}
	var hello [16]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, err := recvHello(fd, hello[:], oob)
	if err != nil {
		return nil, fmt.Errorf("read hello: %w", err)
	}
	fds := rights(oob[:oobn])
	if n != len(hello) || binary.NativeEndian.Uint32(hello[:]) != shimMagic || len(fds) != 1 {
		closeAll(fds)
		return nil, fmt.Errorf("%w: hello of %d bytes with %d descriptors (the process exited, or runs without the shim)", ErrShim, n, len(fds))
	}
	if v := binary.NativeEndian.Uint32(hello[4:]); v != shimVersion {
		closeAll(fds)
		return nil, fmt.Errorf("%w: it speaks version %d of the protocol, this daemon speaks %d; rebuild both", ErrShim, v, shimVersion)
	}
	return &Shim{pid: int(binary.NativeEndian.Uint32(hello[8:])), uffd: uffd.New(fds[0]), fd: fd}, nil
}

func recvHello(fd int, buf, oob []byte) (n, oobn int, err error) {
	for {
		n, oobn, _, _, err = unix.Recvmsg(fd, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			return n, oobn, err
		}
	}
}

func rights(oob []byte) []int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var fds []int
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// PID returns the id of the VMM process as the process itself sees it.
func (s *Shim) PID() int { return s.pid }

// Go lets the VMM run. Put it into its cgroup before.
func (s *Shim) Go() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var msg, reply [8]byte
	binary.NativeEndian.PutUint32(msg[:], opGo)
	if err := s.exchange(msg[:], nil, reply[:]); err != nil {
		return fmt.Errorf("start VMM: %w", err)
	}
	if binary.NativeEndian.Uint32(reply[:]) != shimMagic {
		return fmt.Errorf("start VMM: %w: it answered %x", ErrShim, reply)
	}
	// Best effort: without the capability faults wait a little longer for a drop.
	_ = hostmem.SetNice(int(binary.NativeEndian.Uint32(reply[4:])), shimNice)
	return nil
}

// Drop frees the physical pages of all ranges (at most MaxRanges). After an error
// nobody knows which of them are gone.
func (s *Shim) Drop(ranges []hostmem.Range) error {
	if len(ranges) == 0 {
		return nil
	}
	if len(ranges) > MaxRanges {
		return fmt.Errorf("drop pages: %d ranges are more than %d", len(ranges), MaxRanges)
	}
	if err := dropPoint.Err(); err != nil {
		return fmt.Errorf("drop pages: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	binary.NativeEndian.PutUint32(s.msg[:], opDrop)
	binary.NativeEndian.PutUint32(s.msg[4:], uint32(len(ranges)))
	for i, r := range ranges {
		binary.NativeEndian.PutUint64(s.msg[8+i*16:], r.Addr)
		binary.NativeEndian.PutUint64(s.msg[16+i*16:], r.Len)
	}
	var reply [8]byte
	if err := s.exchange(s.msg[:8+len(ranges)*16], nil, reply[:]); err != nil {
		return fmt.Errorf("drop pages: %w", err)
	}
	if errno := unix.Errno(binary.NativeEndian.Uint32(reply[:])); errno != 0 {
		return fmt.Errorf("drop pages: %w: range %d: %w", ErrShim, binary.NativeEndian.Uint32(reply[4:]), errno)
	}
	return nil
}

// exchange sends one message, with descriptors or nil, and reads its answer. Caller holds mu.
func (s *Shim) exchange(msg, rights, reply []byte) error {
	if s.fd < 0 {
		return fmt.Errorf("%w: %w", ErrShim, os.ErrClosed)
	}
	for {
		_, err := unix.SendmsgN(s.fd, msg, rights, nil, unix.MSG_NOSIGNAL)
		if err == nil {
			break
		}
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
			return fmt.Errorf("%w: %w", ErrShim, ErrGone) // its thread lives as long as its process
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("%w: send: %w", ErrShim, err)
		}
	}
	for {
		n, err := unix.Read(s.fd, reply)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case n == 0 && err == nil, errors.Is(err, unix.ECONNRESET):
			return fmt.Errorf("%w: %w", ErrShim, ErrGone)
		case err != nil:
			return fmt.Errorf("%w: receive: %w", ErrShim, err)
		case n != len(reply):
			return fmt.Errorf("%w: answer of %d bytes", ErrShim, n)
		}
		return nil
	}
}

// Close ends the VMM process: its shim sees the end of the stream. The userfaultfd is
// closed by the Guest, or here if none was attached.
func (s *Shim) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.fd >= 0 {
		errs = append(errs, unix.Close(s.fd))
		s.fd = -1
	}
	if s.uffd != nil {
		errs = append(errs, s.uffd.Close())
		s.uffd = nil
	}
	return errors.Join(errs...)
}
