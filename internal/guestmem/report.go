package guestmem

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

var reportPoint = fault.NewPoint("guestmem.report")

// A guest with free page reporting tells its VMM which pages it does not use; the VMM
// punches holes into the file of the guest's memory for them; the shim turns each hole
// into a report (shim/shim.c has the protocol) and keeps the VMM, and with it the pages,
// waiting for the answer:
//
//	offered --Report--> taken --Answer--> the VMM goes on, the guest may use the pages again
//	        --nobody took it in 20 ms--> given up by the shim: Report does not find it

// guard makes the shim keep the VMM from dropping pages of the guest and send reports
// to the returned descriptor, which does not block.
func (s *Shim) guard(base uint64, im *Image) (fd int, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(im.file.Fd()), &st); err != nil {
		return -1, fmt.Errorf("guard guest memory: %w", err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("guard guest memory: %w", err)
	}
	ours, theirs := fds[0], fds[1]
	defer unix.Close(theirs) //nolint:errcheck // the shim has its own
	var msg [40]byte
	binary.NativeEndian.PutUint32(msg[:], opGuard)
	binary.NativeEndian.PutUint64(msg[8:], base)
	binary.NativeEndian.PutUint64(msg[16:], uint64(im.size))
	binary.NativeEndian.PutUint64(msg[24:], st.Dev)
	binary.NativeEndian.PutUint64(msg[32:], st.Ino)
	// The shim waits for its answers without a timeout; a report that cannot be sent is dropped.
	err = unix.SetNonblock(theirs, false)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		// Our end as well: the shim reads back from it what we did not take.
		var reply [8]byte
		err = s.exchange(msg[:], unix.UnixRights(theirs, ours), reply[:])
		if errno := unix.Errno(binary.NativeEndian.Uint32(reply[:])); err == nil && errno != 0 {
			err = fmt.Errorf("%w: %w", ErrShim, errno)
		}
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("guard guest memory: %w", err), unix.Close(ours))
	}
	return ours, nil
}

// ReportFD returns a descriptor that is readable when a report waits to be taken.
func (g *Guest) ReportFD() int { return g.reports }

// Report takes the report that waits; ok says whether there was one. Its frames are in no
// use by the guest until Answer, which must follow soon: the VMM stands still. A report that
// makes no sense (only a VMM that was taken over sends one) comes as an empty run. ErrGone:
// the VMM is dead. It never blocks.
func (g *Guest) Report() (r Run, ok bool, err error) {
	if err := reportPoint.Err(); err != nil {
		return Run{}, false, err
	}
	var msg [16]byte
	for {
		n, err := unix.Read(g.reports, msg[:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN): // given up meanwhile
			return Run{}, false, nil
		case err != nil:
			return Run{}, false, fmt.Errorf("take report: %w", err)
		case n == 0:
			return Run{}, false, fmt.Errorf("take report: %w", ErrGone)
		case n != len(msg):
			return Run{}, true, nil
		}
		return g.reported(binary.NativeEndian.Uint64(msg[:]), binary.NativeEndian.Uint64(msg[8:])), true, nil
	}
}

// reported turns bytes of the file into the whole frames among them.
func (g *Guest) reported(off, size uint64) Run {
	end := off + size
	if total := uint64(g.frames) * units.PageSize; end < off || end > total {
		return Run{}
	}
	first, last := (off+units.PageSize-1)/units.PageSize, end/units.PageSize
	if last <= first {
		return Run{}
	}
	return Run{Start: units.Frame(first), Pages: int(last - first)}
}

// Answer lets the VMM go on after a report.
func (g *Guest) Answer() error {
	var done [8]byte
	for {
		_, err := unix.SendmsgN(g.reports, done[:], nil, nil, unix.MSG_NOSIGNAL)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
			return fmt.Errorf("answer report: %w", ErrGone)
		}
		return fmt.Errorf("answer report: %w", err)
	}
}

// Private calls visit for the private pages of a run, in ascending order. Like Scan it
// counts pages in swap; unlike Scan it excludes only itself.
func (g *Guest) Private(r Run, visit func(Run)) error {
	if err := scanPoint.Err(); err != nil {
		return err
	}
	if g.reportMap == nil { // most guests never report
		pm, err := hostmem.OpenPagemap(g.pid)
		if err != nil {
			return err
		}
		g.reportMap = pm
	}
	start := g.addr(r.Start)
	return g.reportMap.Private(start, start+uint64(r.Pages)*units.PageSize, func(p hostmem.Run) bool {
		visit(Run{Start: units.Frame((p.Addr - g.base) / units.PageSize), Pages: p.Pages})
		return true
	})
}
