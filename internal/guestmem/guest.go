package guestmem

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

var (
	// ErrGone: the VMM process is dying or dead. Nothing is wrong with its pages.
	ErrGone = hostmem.ErrGone
	// ErrExists: the operation stopped at a page that is mapped already.
	ErrExists = uffd.ErrExists
	// ErrMergeable: KSM may merge the guest's pages, which would lose their write
	// protection and with it writes of the guest. Nothing was attached.
	ErrMergeable = errors.New("the guest's memory is open to KSM; start QEMU with merge=off on its memory backend")
)

// Failure points of the operations on a guest's memory.
var (
	copyPoint      = fault.NewPoint("guestmem.copy")
	continuePoint  = fault.NewPoint("guestmem.continue")
	zeroPoint      = fault.NewPoint("guestmem.zeropage")
	protectPoint   = fault.NewPoint("guestmem.protect")
	unprotectPoint = fault.NewPoint("guestmem.unprotect")
	readPoint      = fault.NewPoint("guestmem.read")
	scanPoint      = fault.NewPoint("guestmem.scan")
	wakePoint      = fault.NewPoint("guestmem.wake")
)

// A Run is a number of neighbouring frames.
type Run struct {
	Start units.Frame
	Pages int
}

// A Fault is one thread of the guest that waits for a page.
type Fault struct {
	Frame units.Frame
	Write bool // it wants to write
	WP    bool // the page is mapped but write-protected
	Minor bool // the page is not mapped, but the image has one (not a hole)
}

// A Guest is one guest's memory in a VMM process.
//
// Its methods do what they say to whatever page they are given; which page may be
// given is the pager's knowledge. They may be called from several goroutines, except
// that Scan excludes Scan, Read excludes Read, Private excludes Private, and Close
// everything.
type Guest struct {
	pid     int              // immutable
	base    uint64           // immutable; where frame 0 is in the VMM
	frames  int              // immutable
	uffd    *uffd.FD         // immutable
	shim    *Shim            // immutable
	pagemap *hostmem.Pagemap // owned by the caller of Scan
	reports int              // immutable; our end of the socket on which the shim reports

	reportMap *hostmem.Pagemap // owned by the caller of Private; nil until its first call

	ranges [MaxRanges]hostmem.Range    // owned by the caller of Read
	remote [MaxRanges]unix.RemoteIovec // owned by the caller of Read
	drops  [MaxRanges]hostmem.Range    // owned by the caller of Drop
}

// Attach puts process pid's private mapping of im under userfaultfd: from now on each
// access to a page that is not mapped waits until somebody serves it, and the VMM itself
// can no longer drop any: its tries become reports. The VMM must be
// paused or freshly loaded; what it did before stays as it is. The Guest takes over
// the shim's userfaultfd; the shim stays the caller's.
func Attach(sh *Shim, pid int, im *Image) (*Guest, error) {
	if im.memory == nil {
		return nil, errors.New("attach to guest: the image is not sealed")
	}
	size := uint64(im.size)
	base, err := hostmem.FindPrivate(pid, im.file, size)
	if err != nil {
		return nil, fmt.Errorf("attach to guest: %w", err)
	}
	mergeable, err := hostmem.Mergeable(pid, base)
	if err != nil {
		return nil, fmt.Errorf("attach to guest: %w", err)
	}
	if mergeable {
		return nil, fmt.Errorf("attach to guest: %w", ErrMergeable)
	}
	sh.mu.Lock()
	fd := sh.uffd
	sh.mu.Unlock()
	if fd == nil {
		return nil, errors.New("attach to guest: its shim is closed or attached already")
	}
	pagemap, err := hostmem.OpenPagemap(pid)
	if err != nil {
		return nil, fmt.Errorf("attach to guest: %w", err)
	}
	if err := fd.Enable(uffd.Needed); err != nil {
		return nil, errors.Join(fmt.Errorf("attach to guest: %w", err), pagemap.Close())
	}
	if err := fd.Register(base, size, uffd.RegisterMissing|uffd.RegisterMinor|uffd.RegisterWP); err != nil {
		return nil, errors.Join(fmt.Errorf("attach to guest: %w", translate(err)), pagemap.Close())
	}
	reports, err := sh.guard(base, im)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach to guest: %w", err), pagemap.Close())
	}
	sh.mu.Lock()
	sh.uffd = nil
	sh.mu.Unlock()
	return &Guest{pid: pid, base: base, frames: im.Frames(), uffd: fd, shim: sh, pagemap: pagemap, reports: reports}, nil
}

// translate gives the userfaultfd's word for a dead process this package's meaning.
func translate(err error) error {
	if errors.Is(err, uffd.ErrGone) {
		return ErrGone
	}
	return err
}

// PID returns the id of the VMM process.
func (g *Guest) PID() int { return g.pid }

// Frames returns the number of pages.
func (g *Guest) Frames() int { return g.frames }

// PollFD returns a descriptor that is readable when a fault waits.
func (g *Guest) PollFD() int { return g.uffd.Fd() }

func (g *Guest) addr(f units.Frame) uint64 { return g.base + uint64(f.Offset()) }

// Faults fills faults with threads that wait; 0 if there are none. events is scratch
// of the same length. It never blocks and does not allocate.
func (g *Guest) Faults(faults []Fault, events []uffd.Event) (int, error) {
	n, err := g.uffd.Read(events[:len(faults)])
	if err != nil {
		return 0, translate(err)
	}
	k := 0
	for i := range events[:n] {
		e := &events[i]
		off := e.Addr - g.base
		if !e.Fault() || off >= uint64(g.frames)*units.PageSize {
			continue // no other event was asked for, and no other range registered
		}
		faults[k] = Fault{Frame: units.Frame(off / units.PageSize), Write: e.Write(), WP: e.WriteProtect(), Minor: e.Minor()}
		k++
	}
	return k, nil
}

// Scan calls visit for the private pages of the guest in ascending order until it
// returns false. A page that is in swap counts.
func (g *Guest) Scan(visit func(r Run, swapped bool) bool) error {
	if err := scanPoint.Err(); err != nil {
		return err
	}
	return g.scan(g.pagemap, visit)
}

func (g *Guest) scan(pm *hostmem.Pagemap, visit func(r Run, swapped bool) bool) error {
	return pm.Private(g.base, g.base+uint64(g.frames)*units.PageSize, func(r hostmem.Run) bool {
		return visit(Run{Start: units.Frame((r.Addr - g.base) / units.PageSize), Pages: r.Pages}, r.Swapped)
	})
}

// Count returns how many private pages the guest has, in memory and in swap. Unlike
// Scan it may be called at any time from any goroutine.
func (g *Guest) Count() (resident, swapped int, err error) {
	return count(g.pid, g.base, uint64(g.frames)*units.PageSize)
}

// CountPrivate returns how many private pages the VMM process pid has of im, in memory
// or swap, without any shim or userfaultfd: the figure of a run without compression.
func CountPrivate(pid int, im *Image) (int, error) {
	base, err := hostmem.FindPrivate(pid, im.file, uint64(im.size))
	if err != nil {
		return 0, fmt.Errorf("count private pages: %w", err)
	}
	resident, swapped, err := count(pid, base, uint64(im.size))
	return resident + swapped, err
}

func count(pid int, base, size uint64) (resident, swapped int, err error) {
	pm, err := hostmem.OpenPagemap(pid)
	if err != nil {
		return 0, 0, fmt.Errorf("count private pages: %w", err)
	}
	defer pm.Close() //nolint:errcheck // read only
	err = pm.Private(base, base+size, func(r hostmem.Run) bool {
		if r.Swapped {
			swapped += r.Pages
		} else {
			resident += r.Pages
		}
		return true
	})
	if err != nil {
		return 0, 0, fmt.Errorf("count private pages: %w", err)
	}
	return resident, swapped, nil
}

// Read reads the frames of runs (at most MaxRanges), one after the other, into dst,
// whose length must be theirs. All or an error.
func (g *Guest) Read(dst []byte, runs []Run) error {
	if err := readPoint.Err(); err != nil {
		return err
	}
	if len(runs) > MaxRanges {
		return fmt.Errorf("read guest memory: %d runs are more than %d", len(runs), MaxRanges)
	}
	for i, r := range runs {
		g.ranges[i] = hostmem.Range{Addr: g.addr(r.Start), Len: uint64(r.Pages) * units.PageSize}
	}
	return hostmem.ReadProcess(g.pid, dst, g.ranges[:len(runs)], g.remote[:])
}

// Protect write-protects a run: when it returns, every later write of any thread
// waits first.
func (g *Guest) Protect(r Run) error {
	if err := protectPoint.Err(); err != nil {
		return err
	}
	return translate(g.uffd.Protect(g.addr(r.Start), uint64(r.Pages)*units.PageSize))
}

// Unprotect allows writing again, removes write-protect markers, and wakes.
func (g *Guest) Unprotect(r Run) error {
	if err := unprotectPoint.Err(); err != nil {
		return err
	}
	return translate(g.uffd.Unprotect(g.addr(r.Start), uint64(r.Pages)*units.PageSize))
}

// Copy installs src as private pages from frame f on, write-protected if protect is
// set, and wakes. done is how many pages were installed, also on an error.
func (g *Guest) Copy(f units.Frame, src []byte, protect bool) (done int, err error) {
	if err := copyPoint.Err(); err != nil {
		return 0, err
	}
	n, err := g.uffd.Copy(g.addr(f), src, protect)
	return n / units.PageSize, translate(err)
}

// Continue maps the image's own pages of a run (no holes) and wakes. done is how many
// pages were mapped, also on an error.
func (g *Guest) Continue(r Run) (done int, err error) {
	if err := continuePoint.Err(); err != nil {
		return 0, err
	}
	n, err := g.uffd.Continue(g.addr(r.Start), uint64(r.Pages)*units.PageSize)
	return int(n / units.PageSize), translate(err)
}

// ZeroPage maps the shared zero page in a run and wakes. done is as for Continue.
func (g *Guest) ZeroPage(r Run) (done int, err error) {
	if err := zeroPoint.Err(); err != nil {
		return 0, err
	}
	n, err := g.uffd.ZeroPage(g.addr(r.Start), uint64(r.Pages)*units.PageSize)
	return int(n / units.PageSize), translate(err)
}

// Wake wakes who waits for a page of a run; they try again.
func (g *Guest) Wake(r Run) error {
	if err := wakePoint.Err(); err != nil {
		return err
	}
	return translate(g.uffd.Wake(g.addr(r.Start), uint64(r.Pages)*units.PageSize))
}

// Drop frees the physical pages of runs (at most MaxRanges): the next access to each
// waits for a server. A page that was write-protected leaves a marker in the page
// table; Unprotect removes it. After an error nobody knows which pages are gone.
func (g *Guest) Drop(runs []Run) error {
	if len(runs) > MaxRanges {
		return fmt.Errorf("drop pages: %d runs are more than %d", len(runs), MaxRanges)
	}
	for i, r := range runs {
		g.drops[i] = hostmem.Range{Addr: g.addr(r.Start), Len: uint64(r.Pages) * units.PageSize}
	}
	return g.shim.Drop(g.drops[:len(runs)])
}

// Close gives up the userfaultfd, the pagemap and the reports.
//
// Preconditions: the VMM process is dead, or will be ended without running on: a
// guest that runs while its pages are missing waits for ever.
func (g *Guest) Close() error {
	errs := []error{g.uffd.Close(), g.pagemap.Close(), unix.Close(g.reports)}
	if g.reportMap != nil {
		errs = append(errs, g.reportMap.Close())
	}
	return errors.Join(errs...)
}
