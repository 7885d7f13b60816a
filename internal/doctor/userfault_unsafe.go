package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

// A faultProbe is a guest in small: a sealed memfd of three pages, the last a
// hole, mapped privately and registered. Its memory is touched only by
// process_vm_readv and process_vm_writev on ourselves, never by a load or store
// of Go code: a Go thread that waits for a fault would stop the garbage collector.
type faultProbe struct {
	file *os.File
	fd   *uffd.FD
	addr uint64 // of the mapping
	mem  unsafe.Pointer

	// install says how the server answers a MINOR fault: nil maps the template's
	// page, otherwise this page is copied in, write-protected.
	install atomic.Pointer[units.Page]
	minor   atomic.Int64
	missing atomic.Int64
	wp      atomic.Int64
}

const probePages = 3

// tryUserfault is the Host.Userfault of a real host.
func tryUserfault() (FaultTimes, error) {
	p, err := newFaultProbe()
	if err != nil {
		return FaultTimes{}, err
	}
	defer p.close()
	// If something goes wrong a touch waits for ever, unless somebody closes the
	// userfaultfd. The time limit does; the worst a healthy host needs is 1 ms.
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- p.serve(ctx) }()
	times, err := p.touch()
	cancel()
	if serveErr := <-served; serveErr != nil && !errors.Is(serveErr, context.Canceled) {
		return FaultTimes{}, fmt.Errorf("serve faults: %w", serveErr)
	}
	return times, err
}

func newFaultProbe() (*faultProbe, error) {
	file, err := hostmem.NewMemfd("agentzip-doctor", probePages*units.PageSize)
	if err != nil {
		return nil, err
	}
	p := &faultProbe{file: file}
	template := bytes.Repeat([]byte{'T'}, 2*units.PageSize)
	if _, err := file.WriteAt(template, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("fill template: %w", err), file.Close())
	}
	if err := hostmem.Seal(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	// SAFETY: mem is never dereferenced; it is turned into a number, and into a
	// slice for madvise and munmap, which do not look at the content.
	p.mem, err = unix.MmapPtr(int(file.Fd()), 0, nil, probePages*units.PageSize,
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map template privately: %w", err), file.Close())
	}
	p.addr = uint64(uintptr(p.mem))
	if p.fd, err = uffd.Open(); err != nil {
		p.close()
		return nil, err
	}
	if err := p.fd.Enable(uffd.Needed); err != nil {
		p.close()
		return nil, err
	}
	mode := uffd.RegisterMissing | uffd.RegisterMinor | uffd.RegisterWP
	if err := p.fd.Register(p.addr, probePages*units.PageSize, mode); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// close gives everything back. The userfaultfd goes first: it wakes who waits.
func (p *faultProbe) close() {
	if p.fd != nil {
		_ = p.fd.Close()
	}
	if p.mem != nil {
		_ = unix.MunmapPtr(p.mem, probePages*units.PageSize)
	}
	_ = p.file.Close()
}

// serve answers faults until ctx ends. On an error or a timeout it drops the
// registration, so that nobody waits for an answer that never comes.
func (p *faultProbe) serve(ctx context.Context) error {
	err := p.answer(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		err = errors.Join(err, p.unregister(probePages*units.PageSize))
	}
	return err
}

func (p *faultProbe) answer(ctx context.Context) error {
	var events [4]uffd.Event
	for ctx.Err() == nil {
		// 20 ms bounds how long the end of ctx goes unnoticed; longer only makes the check slower.
		poll := []unix.PollFd{{Fd: int32(p.fd.Fd()), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, 20); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll: %w", err)
		}
		n, err := p.fd.Read(events[:])
		if err != nil {
			return fmt.Errorf("read event: %w", err)
		}
		for i := range events[:n] {
			if err := p.resolve(&events[i]); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

func (p *faultProbe) resolve(e *uffd.Event) error {
	addr := e.Addr &^ (units.PageSize - 1)
	switch page := p.install.Load(); {
	case e.WriteProtect():
		p.wp.Add(1)
		return wrap("unprotect", p.fd.Unprotect(addr, units.PageSize))
	case e.Minor() && page == nil:
		p.minor.Add(1)
		_, err := p.fd.Continue(addr, units.PageSize)
		return wrap("continue", err)
	case e.Minor():
		p.minor.Add(1)
		_, err := p.fd.Copy(addr, page[:], true)
		return wrap("copy", err)
	default:
		p.missing.Add(1)
		_, err := p.fd.ZeroPage(addr, units.PageSize)
		return wrap("zero page", err)
	}
}

// touch plays a guest and a pager: every kind of fault once, each with the
// content that must come of it.
func (p *faultProbe) touch() (FaultTimes, error) {
	var t FaultTimes
	var err error
	if t.Minor, err = p.read(0, 'T'); err != nil || p.minor.Load() != 1 {
		return t, p.unexpected("read a template page", err)
	}
	if t.Missing, err = p.read(2, 0); err != nil || p.missing.Load() != 1 {
		return t, p.unexpected("read a hole", err)
	}
	if _, err = p.write(0, 'W'); err != nil || p.wp.Load() != 0 {
		return t, p.unexpected("write a template page", err)
	}
	if err := p.fd.Protect(p.addr, units.PageSize); err != nil {
		return t, fmt.Errorf("write-protect a page: %w", err)
	}
	if t.WriteProtect, err = p.write(0, 'X'); err != nil || p.wp.Load() != 1 {
		return t, p.unexpected("write a protected page", err)
	}
	// The page is dropped and must come back as what the pager kept, not as the
	// template's page that lies below it.
	if err := unix.Madvise(unsafe.Slice((*byte)(p.mem), units.PageSize), unix.MADV_DONTNEED); err != nil {
		return t, fmt.Errorf("drop a page: %w", err)
	}
	var kept units.Page
	for i := range kept {
		kept[i] = 'K'
	}
	p.install.Store(&kept)
	if _, err = p.read(0, 'K'); err != nil || p.minor.Load() != 2 {
		return t, p.unexpected("read a dropped page", err)
	}
	if _, err = p.write(0, 'Y'); err != nil || p.wp.Load() != 2 {
		return t, p.unexpected("write a restored page", err)
	}
	return t, nil
}

// unexpected explains a touch that failed or raised other faults than it should.
func (p *faultProbe) unexpected(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: the kernel has raised %d minor, %d missing, %d write-protect faults by now",
		what, p.minor.Load(), p.missing.Load(), p.wp.Load())
}

// read reads a page and checks its first byte.
func (p *faultProbe) read(page int, want byte) (time.Duration, error) {
	var local units.Page
	took, err := p.move(unix.ProcessVMReadv, page, local[:])
	if err == nil && local[0] != want {
		err = fmt.Errorf("got %q, want %q", local[0], want)
	}
	return took, err
}

// write writes one byte of a page.
func (p *faultProbe) write(page int, value byte) (time.Duration, error) {
	return p.move(unix.ProcessVMWritev, page, []byte{value})
}

type vmFunc func(pid int, local []unix.Iovec, remote []unix.RemoteIovec, flags uint) (int, error)

func (p *faultProbe) move(vm vmFunc, page int, buf []byte) (time.Duration, error) {
	local := []unix.Iovec{{Base: &buf[0], Len: uint64(len(buf))}}
	remote := []unix.RemoteIovec{{Base: uintptr(p.addr) + uintptr(page*units.PageSize), Len: len(buf)}}
	start := time.Now()
	n, err := vm(os.Getpid(), local, remote, 0)
	took := time.Since(start)
	runtime.KeepAlive(buf)
	if err == nil && n != len(buf) {
		err = fmt.Errorf("moved %d of %d bytes", n, len(buf))
	}
	return took, err
}

// unregister is UFFDIO_UNREGISTER, which wakes everybody who waits. Only this
// probe needs it: a sandbox's memory stays registered for its whole life.
func (p *faultProbe) unregister(length uint64) error {
	const ioUnregister = 0x8010aa01 // _IOR(0xAA, 0x01, struct uffdio_range)
	arg := [2]uint64{p.addr, length}
	return wrap("unregister", ioctlPtr(p.fd.Fd(), ioUnregister, unsafe.Pointer(&arg)))
}

// tryUserfaultDevice is the Host.UserfaultDevice of a real host.
func tryUserfaultDevice() error {
	dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/userfaultfd: %w", err)
	}
	defer unix.Close(dev)            //nolint:errcheck // nothing was written
	const userfaultfdIOCNew = 0xaa00 // _IO(0xAA, 0x00)
	fd, err := ioctl(dev, userfaultfdIOCNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if err != nil {
		return fmt.Errorf("ask /dev/userfaultfd for a descriptor: %w", err)
	}
	return wrap("close userfaultfd", unix.Close(fd))
}

// tryPagemapScan is the Host.PagemapScan of a real host.
func tryPagemapScan() (exact bool, err error) {
	mem, err := hostmem.MapAnonymous(4 * units.PageSize)
	if err != nil {
		return false, err
	}
	defer mem.Close()              //nolint:errcheck // four pages
	mem.Data[units.PageSize] = 1   // page 1 becomes private
	_ = mem.Data[3*units.PageSize] // page 3 becomes the zero page, which is not
	// SAFETY: a number to compare with, never a pointer again.
	start := uint64(uintptr(unsafe.Pointer(&mem.Data[0])))
	pm, err := hostmem.OpenPagemap(os.Getpid())
	if err != nil {
		return false, err
	}
	defer pm.Close() //nolint:errcheck // read only
	var found []hostmem.Run
	if err := pm.Private(start, start+4*units.PageSize, func(r hostmem.Run) bool {
		found = append(found, r)
		return true
	}); err != nil {
		return false, err
	}
	if len(found) != 1 || found[0] != (hostmem.Run{Addr: start + units.PageSize, Pages: 1}) {
		return false, fmt.Errorf("found %+v instead of the one private page at %#x", found, start+units.PageSize)
	}
	// hostmem falls back to reading entries where the ioctl is absent. Given no
	// argument the ioctl fails either way, but not for the same reason.
	const ioPagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	self, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return false, fmt.Errorf("open pagemap: %w", err)
	}
	defer self.Close() //nolint:errcheck // read only
	_, err = ioctl(int(self.Fd()), ioPagemapScan, 0)
	return !errors.Is(err, unix.ENOTTY), nil
}

// wrap adds what was being done to a non-nil error.
func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
