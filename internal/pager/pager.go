package pager

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
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
	ErrVerify = cohort.ErrVerify
	// ErrGone: the VMM process is dying or dead.
	ErrGone = guestmem.ErrGone
	// ErrClosed: the pager was closed.
	ErrClosed = errors.New("the pager is closed")
)

// BatchPages is how many pages an eviction or a restore takes in hand at once. The mutex
// is held for one drop of so many pages (about 0.1 ms): doubled, a fault waits twice as
// long at worst, and a pass is cancelled half as fast.
const BatchPages = 64

// defaultFaultAround is the aligned window, in pages, in which template and zero pages are
// mapped together: BenchmarkTemplateFault.
const defaultFaultAround = 16

// defaultEvictedAround is the aligned window, in pages, in which evicted pages come back
// together: 32 KiB. It cut blocking faults by 35 % at the same memory.
const defaultEvictedAround = 8

// Memory is a guest's memory; *guestmem.Guest is the real one. Scan, Read, Drop, Private and
// Report are never called concurrently with themselves.
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

	// What the guest reports free; see discard.go.
	ReportFD() int
	Report() (r guestmem.Run, ok bool, err error)
	Answer() error
	Private(r guestmem.Run, visit func(guestmem.Run)) error
}

var _ Memory = (*guestmem.Guest)(nil)

// Options of a Pager. Guest, Image and Cohort are required.
type Options struct {
	Name   string          // of the sandbox, for errors
	Guest  Memory          // stays the caller's; must outlive the Pager
	Image  *guestmem.Image // the template's memory, sealed; must outlive the Pager
	Cohort *cohort.Cohort  // keeps the pages, and is shared by the siblings; its library is of Image

	// OnFatal is called once, in a goroutine of its own, when the sandbox must be killed.
	OnFatal func(error)

	// Workers are the host's places for bulk work; nil uses the set that all pagers of
	// this process share, with as many places as cores.
	Workers *Workers

	// FaultAround is the window in pages (a power of two, at most 512) in which template
	// pages are mapped together; 0 is the default, 1 turns it off.
	FaultAround int

	// EvictedAround is the window in pages (a power of two, at most 64) in which evicted pages
	// are brought back together; 0 is the default, 1 turns it off.
	EvictedAround int

	// ProtectRestored write-protects evicted pages that come back, unless they will be written:
	// the first write to each is a fault, and one that was not written is dropped again without
	// a look at it. It is for measurements.
	ProtectRestored bool

	// LeaveUnmapped leaves template and zero pages that a pass dropped unmapped: each touch
	// is a fault. It is for measurements.
	LeaveUnmapped bool

	// From makes the pages those of a snapshot, instead of the template's. Guest must be a
	// fresh one that has not run: whatever is mapped there is dropped. The snapshot stays the
	// caller's, and has to be of the same image and cohort.
	From *Snapshot
	// Before is the closed pager of the same sandbox: counters go on where its have ended.
	Before *Pager
}

// A Pager owns the page states of one sandbox. The package doc has the rules.
type Pager struct {
	name    string          // immutable
	mem     Memory          // immutable
	image   *guestmem.Image // immutable
	cohort  *cohort.Cohort  // immutable
	onFatal func(error)     // immutable
	workers *Workers        // immutable
	around  units.Frame     // immutable
	leave   bool            // immutable; Options.LeaveUnmapped
	protect bool            // immutable; Options.ProtectRestored
	window  units.Frame     // immutable; Options.EvictedAround

	life   sync.RWMutex  // read-held while table and memory are in use outside mu; Close takes it
	passes chan struct{} // one token: at most one Evict at a time

	mu       sync.Mutex
	waiting  atomic.Int32 // faults that want mu; a pass makes way for them
	table    *table       // words: stored under mu
	kept     int          // guarded by mu; words with a ref
	discards uint64       // guarded by mu; how often a report dropped pages
	regions  regions      // guarded by mu; where shared pages are to be mapped
	dead     error        // guarded by mu; why nothing is served any more
	closed   bool         // guarded by life

	touched touchLog      // guarded by mu
	notify  chan struct{} // of Notify: a token when touched has something new

	soon atomic.Pointer[expectation] // of Expect

	lastTurn uint64 // guarded by turns.mu; when a batch of it was restored last

	stats *counters // immutable
}

// New returns the pager of one sandbox whose pages are all as its template's or mapped.
// Hand it to a Server before its guest runs on.
func New(o Options) (*Pager, error) {
	switch {
	case o.Guest == nil || o.Image == nil || o.Cohort == nil:
		return nil, errors.New("create pager: guest, image and cohort are required")
	case o.Guest.Frames() != o.Image.Frames():
		return nil, fmt.Errorf("create pager: the guest has %d pages, its image %d", o.Guest.Frames(), o.Image.Frames())
	case o.Guest.Frames() > touchFrames:
		return nil, fmt.Errorf("create pager: %d pages are more than %d", o.Guest.Frames(), touchFrames)
	case o.FaultAround < 0 || o.FaultAround > 512 || o.FaultAround&(o.FaultAround-1) != 0:
		return nil, fmt.Errorf("create pager: fault-around of %d pages is not a power of two up to 512", o.FaultAround)
	}
	if n := o.EvictedAround; n < 0 || n > 64 || n&(n-1) != 0 {
		return nil, fmt.Errorf("create pager: a window of %d evicted pages is not a power of two up to 64", n)
	}
	t, err := newTable(o.Guest.Frames())
	if err != nil {
		return nil, fmt.Errorf("create pager: %w", err)
	}
	touched, err := newTouchLog()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create pager: %w", err), t.close())
	}
	p := &Pager{
		name: o.Name, mem: o.Guest, image: o.Image, cohort: o.Cohort, onFatal: o.OnFatal,
		workers: o.Workers, around: units.Frame(o.FaultAround), table: t, regions: newRegions(o.Guest.Frames()), leave: o.LeaveUnmapped, protect: o.ProtectRestored, window: units.Frame(o.EvictedAround), passes: make(chan struct{}, 1),
		touched: touched, notify: make(chan struct{}, 1), stats: &counters{},
	}
	if o.Before != nil {
		p.stats = o.Before.stats
	}
	if p.window == 0 {
		p.window = defaultEvictedAround
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
	p.cohort.Join(p)
	if o.From != nil {
		if err := p.adopt(o.From); err != nil {
			return nil, errors.Join(fmt.Errorf("create pager of sandbox %s: %w", o.Name, err), p.Close())
		}
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

// release gives back the page's reference. Caller holds mu.
func (p *Pager) release(r cohort.Ref) {
	p.kept--
	p.unref(r)
}

// unref gives back a reference that is not counted as this sandbox's. Damage found then
// harms only those who still refer to the page: this one has it elsewhere.
func (p *Pager) unref(r cohort.Ref) {
	if err := p.cohort.Release(r); err != nil {
		p.stats.leaks.Add(1)
		p.cohort.ReportDamage(err, nil)
	}
}

// Refers reports whether a page of this sandbox refers to damage; see cohort.Member.
func (p *Pager) Refers(damaged func(cohort.Ref) bool) bool {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return false
	}
	return slices.ContainsFunc(p.refs(), damaged)
}

// refs returns what the table refers to now. Looking each up would be too long with mu held.
func (p *Pager) refs() []cohort.Ref {
	p.mu.Lock()
	defer p.mu.Unlock()
	refs := make([]cohort.Ref, 0, p.kept)
	p.table.each(func(_ units.Frame, e entry) bool {
		if e.hasRef() {
			refs = append(refs, e.ref())
		}
		return true
	})
	return refs
}

// Fail ends the sandbox because a page that it needs is lost; see cohort.Member.
func (p *Pager) Fail(err error) { p.abort(fmt.Errorf("%w: %w", ErrIntegrity, err)) }

// Evicted reports whether a page is evicted at this moment: a touch of it would wait for its
// content. It waits for no fault or pass. False for frames out of range.
func (p *Pager) Evicted(f units.Frame) bool {
	p.life.RLock()
	defer p.life.RUnlock()
	return !p.closed && int(f) < p.table.frames && p.table.load(f).tag() == tagEvicted
}

// Usage is what a sandbox's pages cost at one moment.
type Usage struct {
	Resident  units.Bytes // private pages in memory now, Clean ones included
	Swapped   units.Bytes // private pages in swap now
	PageTable units.Bytes // this package's page table, and the log of touched pages
	Kept      int         // pages that the cohort keeps for this sandbox, Clean ones included
	Encoded   units.Bytes // bytes of their entries, without slack and headers; shared ones count for each sandbox
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
	encoded := p.encodedBytes()
	p.mu.Lock()
	defer p.mu.Unlock()
	return Usage{
		Resident: units.Bytes(resident) * units.PageSize, Swapped: units.Bytes(swapped) * units.PageSize,
		PageTable: tableSize + p.touched.size(), Kept: p.kept, Encoded: encoded,
	}, nil
}

// encodedBytes sums the entries of this sandbox's pages. Those that come or go meanwhile may
// be counted or not.
func (p *Pager) encodedBytes() (sum units.Bytes) {
	w := cohort.NewLoader()
	defer w.Close()
	for _, r := range p.refs() {
		if _, n, err := p.cohort.Way(w, r); err == nil {
			sum += units.Bytes(n)
		}
	}
	return sum
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
	p.cohort.Leave(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead == nil {
		p.dead = ErrClosed
	}
	p.table.each(func(f units.Frame, e entry) bool {
		if e.hasRef() {
			p.release(e.ref())
			p.table.store(f, entryTemplate)
		}
		return true
	})
	return errors.Join(p.table.close(), p.touched.close())
}

// Stall returns how long this sandbox's faults took to serve, summed since New. Calls
// take the difference over their time.
func (p *Pager) Stall() time.Duration { return time.Duration(p.stats.stall.Load()) }

// Faults returns how many faults were served since New.
func (p *Pager) Faults() uint64 { return p.stats.faults.Load() }
