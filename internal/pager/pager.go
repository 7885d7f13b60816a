package pager

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

var (
	// ErrFatal: the sandbox can no longer be trusted or served, and OnFatal was told.
	// Its guest must be killed.
	ErrFatal = errors.New("the sandbox's memory failed")
	// ErrIntegrity: a page's content is not what was stored. Always inside ErrFatal.
	ErrIntegrity = errors.New("page content is damaged")
	// ErrVerify: an encoded page did not decode to itself. It was not dropped and the
	// guest is unharmed, but the codec is wrong: a report worth failing a run for.
	ErrVerify = errors.New("encoded page does not decode to itself")
	// ErrGone: the VMM process is dying or dead.
	ErrGone = guestmem.ErrGone
	// ErrClosed: the pager was closed.
	ErrClosed = errors.New("the pager is closed")
)

// Failure points. corruptPoint damages what a restore decoded; mismatchPoint what a pass
// compares; putPoint is a full pool.
var (
	corruptPoint  = fault.NewPoint("pager.corrupt")
	mismatchPoint = fault.NewPoint("pager.mismatch")
	putPoint      = fault.NewPoint("pager.put")
)

// BatchPages is how many pages an eviction or a restore takes in hand at once. The mutex
// is held for one drop of so many pages (about 0.1 ms): doubled, a fault waits twice as
// long at worst, and a pass is cancelled half as fast.
const BatchPages = 64

// defaultFaultAround is the aligned window, in pages, in which template and zero pages are
// mapped together: BenchmarkTemplateFault.
const defaultFaultAround = 16

// Memory is a guest's memory; *guestmem.Guest is the real one. Scan, Read and Drop are
// never called concurrently with themselves.
type Memory interface {
	Frames() int
	PollFD() int
	Faults(faults []guestmem.Fault, events []uffd.Event) (int, error)
	Scan(visit func(r guestmem.Run, swapped bool) bool) error
	Count() (resident, swapped int, err error)
	Read(dst []byte, runs []guestmem.Run) error
	Protect(r guestmem.Run) error
	Unprotect(r guestmem.Run) error
	Copy(f units.Frame, src []byte, protect bool) (done int, err error)
	Continue(r guestmem.Run) (done int, err error)
	ZeroPage(r guestmem.Run) (done int, err error)
	Wake(r guestmem.Run) error
	Drop(runs []guestmem.Run) error
}

var _ Memory = (*guestmem.Guest)(nil)

// Options of a Pager. Guest, Image and Pool are required.
type Options struct {
	Name   string          // of the sandbox, for errors
	Guest  Memory          // stays the caller's; must outlive the Pager
	Image  *guestmem.Image // the template's memory, sealed; must outlive the Pager
	Pool   *pool.Pool      // may be shared by many sandboxes
	Cohort *dictionary.Set // dictionaries; nil encodes without

	// OnFatal is called once, in a goroutine of its own, when the sandbox must be killed.
	OnFatal func(error)

	// Workers are the host's places for bulk work; nil uses the set that all pagers of
	// this process share, with as many places as cores.
	Workers *Workers

	// FaultAround is the window in pages (a power of two, at most 512) in which template
	// pages are mapped together; 0 is the default, 1 turns it off.
	FaultAround int
}

// A Pager owns the page states of one sandbox. The package doc has the rules.
type Pager struct {
	name    string          // immutable
	mem     Memory          // immutable
	image   *guestmem.Image // immutable
	pool    *pool.Pool      // immutable
	cohort  *dictionary.Set // immutable, may be nil
	onFatal func(error)     // immutable
	workers *Workers        // immutable
	around  units.Frame     // immutable

	life   sync.RWMutex  // read-held while table and memory are in use outside mu; Close takes it
	passes chan struct{} // one token: at most one Evict at a time

	mu      sync.Mutex
	waiting atomic.Int32 // faults that want mu; a pass makes way for them
	table   *table       // words: stored under mu
	pooled  int          // guarded by mu; words with a handle
	encoded units.Bytes  // guarded by mu; sum of their encoded bytes
	dead    error        // guarded by mu; why nothing is served any more
	closed  bool         // guarded by life

	stats counters
}

// New returns the pager of one sandbox whose pages are all as its template's or mapped.
// Hand it to a Server before its guest runs on.
func New(o Options) (*Pager, error) {
	switch {
	case o.Guest == nil || o.Image == nil || o.Pool == nil:
		return nil, errors.New("create pager: guest, image and pool are required")
	case o.Guest.Frames() != o.Image.Frames():
		return nil, fmt.Errorf("create pager: the guest has %d pages, its image %d", o.Guest.Frames(), o.Image.Frames())
	case o.FaultAround < 0 || o.FaultAround > 512 || o.FaultAround&(o.FaultAround-1) != 0:
		return nil, fmt.Errorf("create pager: fault-around of %d pages is not a power of two up to 512", o.FaultAround)
	}
	t, err := newTable(o.Guest.Frames())
	if err != nil {
		return nil, fmt.Errorf("create pager: %w", err)
	}
	p := &Pager{
		name: o.Name, mem: o.Guest, image: o.Image, pool: o.Pool, cohort: o.Cohort, onFatal: o.OnFatal,
		workers: o.Workers, around: units.Frame(o.FaultAround), table: t, passes: make(chan struct{}, 1),
	}
	if p.around == 0 {
		p.around = defaultFaultAround
	}
	if p.workers == nil {
		p.workers = shared()
	}
	if p.onFatal == nil {
		p.onFatal = func(error) {}
	}
	return p, nil
}

// Name returns the sandbox's name.
func (p *Pager) Name() string { return p.name }

// fail makes err the reason why nothing is served any more and returns it. Caller
// holds mu. A dead VMM is no failure: OnFatal is not told.
func (p *Pager) fail(err error) error {
	if p.dead != nil {
		return p.dead
	}
	if errors.Is(err, ErrGone) {
		p.dead = fmt.Errorf("sandbox %s: %w", p.name, ErrGone)
		return p.dead
	}
	p.dead = fmt.Errorf("%w: sandbox %s: %w", ErrFatal, p.name, err)
	go p.onFatal(p.dead)
	return p.dead
}

// Err returns why the sandbox is no longer served, or nil.
func (p *Pager) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

// release gives back the page's reference to a pool entry. Caller holds mu.
func (p *Pager) release(h pool.Handle) {
	p.pooled--
	p.encoded -= units.Bytes(len(p.pool.View(h).Data))
	p.unref(h)
}

// unref gives back a reference that is not counted as this sandbox's.
func (p *Pager) unref(h pool.Handle) {
	if freed, dict := p.pool.Release(h); freed && dict != 0 && p.cohort != nil {
		p.cohort.Release(dict)
	}
}

// hold counts a reference as this sandbox's. Caller holds mu.
func (p *Pager) hold(h pool.Handle) {
	p.pooled++
	p.encoded += units.Bytes(len(p.pool.View(h).Data))
}

// A Touch is a page that the guest was seen touching, or that it is expected to touch.
type Touch struct {
	Frame units.Frame
	Write bool // it was, or will be, written
}

// DrainTouched appends to dst the frames at which faults were served since the last call,
// each once, in ascending order. Of pages restored ahead, those that were installed
// writable or were only read are not among them: no fault tells.
func (p *Pager) DrainTouched(dst []Touch) []Touch {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return dst
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.table.drain(dst)
}

// Usage is what a sandbox's pages cost at one moment.
type Usage struct {
	Resident  units.Bytes // private pages in memory now, Clean ones included
	Swapped   units.Bytes // private pages in swap now
	PageTable units.Bytes // this package's page table
	Pooled    int         // pages that have an entry in the pool
	Encoded   units.Bytes // bytes of those entries, without slack and headers
}

// Usage counts exactly; while a pass runs, its batch in hand may count as swapped. It
// looks at every page table entry of the guest: about 1 ms for 512 MiB.
func (p *Pager) Usage() (Usage, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return Usage{}, ErrClosed
	}
	resident, swapped, err := p.mem.Count()
	if err != nil {
		return Usage{}, fmt.Errorf("count pages of sandbox %s: %w", p.name, err)
	}
	tableSize, err := p.table.resident()
	if err != nil {
		return Usage{}, fmt.Errorf("measure page table of sandbox %s: %w", p.name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return Usage{
		Resident: units.Bytes(resident) * units.PageSize, Swapped: units.Bytes(swapped) * units.PageSize,
		PageTable: tableSize, Pooled: p.pooled, Encoded: p.encoded,
	}, nil
}

// Close gives back every pool entry and the page table. It waits for a running Evict or
// Restore; cancel their contexts first.
//
// Preconditions: the VMM is dead, and no Server has this pager any more.
func (p *Pager) Close() error {
	p.life.Lock()
	defer p.life.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead == nil {
		p.dead = ErrClosed
	}
	p.table.each(func(f units.Frame, e entry) bool {
		if e.hasHandle() {
			p.release(e.handle())
			p.table.store(f, entryTemplate)
		}
		return true
	})
	return p.table.close()
}

// Stall returns how long this sandbox's faults took to serve, summed since New. Calls
// take the difference over their time.
func (p *Pager) Stall() time.Duration { return time.Duration(p.stats.stall.Load()) }

// Faults returns how many faults were served since New.
func (p *Pager) Faults() uint64 { return p.stats.faults.Load() }
