package pager

import (
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// counters are updated with atomics, outside the mutex where time allows.
type counters struct {
	faults   atomic.Uint64
	stall    atomic.Int64 // nanoseconds
	stallMax atomic.Int64 // nanoseconds

	restore      histogram // Evicted, absent: decode and install
	prefetch     histogram // Restore
	prefetchPage histogram // the same, a batch divided by its pages
	template     histogram // Template, absent
	zero         histogram // Zero or hole, absent
	protect      histogram // write to a protected page
	cancel       histogram // passes: from the end of ctx to their end
	held         histogram // the mutex, by passes and restores
	reports      histogram // reports of free pages: drop what is there
	stale        atomic.Uint64

	writes    atomic.Uint64 // restores for a write
	around    atomic.Uint64 // template and zero pages mapped beside the one asked for
	cancelled atomic.Uint64 // pages written while being encoded
	dirtied   atomic.Uint64 // Clean pages written

	passes, scanned, encodedPages, zeroPages, equalPages, cleanPages, keptPages atomic.Uint64
	mismatches, fullPasses                                                      atomic.Uint64

	reported, discarded, discardedEntries atomic.Uint64

	mappedBack      atomic.Uint64
	shared, private atomic.Uint64 // template and zero pages that Restore mapped, or installed to be written
	givenUp         atomic.Uint64 // entries of clean pages given up for room in the pool
	neighbours      atomic.Uint64 // evicted pages brought beside the one asked for
	used, wasted    [numSources]atomic.Uint64
	ways            [cohort.NumWays]atomic.Uint64 // of pages that were decoded and installed

	touchesLost atomic.Uint64 // faults that the full log had no room for

	leaks    atomic.Uint64 // entries that could not be released
	wayPages [cohort.NumWays]atomic.Uint64
	wayBytes [cohort.NumWays]atomic.Uint64
	evicting atomic.Int64 // nanoseconds in Evict

	wayFaults [cohort.NumWays]atomic.Uint64 // restores that a fault waited for
	wayStall  [cohort.NumWays]atomic.Int64  // nanoseconds
}

// WayStats counts the pages that were kept in one way.
type WayStats struct {
	Way   cohort.Way
	Pages uint64
	Bytes units.Bytes // added to the pool
}

// WayStall says how long faults waited for pages that were kept in one way.
type WayStall struct {
	Way    cohort.Way
	Faults uint64
	Stall  time.Duration
}

// Stats counts since New. All latencies run from the reading of the fault from the kernel
// until its page is installed and the guest's thread is woken.
type Stats struct {
	Faults   uint64        // all served, stale ones included
	Stall    time.Duration // sum of their service times
	StallMax time.Duration // longest

	Blocking       Latency // faults on evicted pages: the guest waited for decode and install
	Prefetched     Latency // pages brought back by Restore: from taking the batch in hand until it was installed
	PrefetchedPage Latency // what each of them cost: the time of its batch over the pages that were installed with it
	Template       Latency // faults on pages of the template
	Zero           Latency // faults on zero pages
	Protected      Latency // writes to pages that were clean or being encoded
	CancelLatency  Latency // cancelled passes: from the end of their context until Evict was about to return
	Held           Latency // how long a batch of a pass or restore held the mutex: what a fault may have to wait
	Reports        Latency // reports of free pages: the VMM's main thread waited, and vCPUs that need a device

	Stale       uint64 // events overtaken by another thread
	WriteFaults uint64 // blocking restores for a write
	Around      uint64 // template and zero pages mapped beside the one asked for
	Cancelled   uint64 // pages written while being encoded
	Dirtied     uint64 // clean pages written
	Passes      uint64
	Scanned     uint64 // private pages that passes found
	Encoded     uint64 // pages that the cohort keeps, verified
	Zeros       uint64 // dropped because all zeros
	Equal       uint64 // dropped because equal to the template
	Clean       uint64 // dropped without encoding
	Kept        uint64 // did not shrink
	Mismatches  uint64 // encodings that failed verification: must be 0
	FullPasses  uint64 // passes that met a full pool
	Evicting    time.Duration

	Reported         uint64 // pages that the guest reported free
	Discarded        uint64 // private pages dropped because of that
	DiscardedEntries uint64 // entries of evicted and clean pages given back because of that

	Neighbours  uint64 // evicted pages brought beside the one asked for
	GivenUp     uint64 // entries of clean pages that were given up because the pool was full
	MappedBack  uint64 // template and zero pages that passes mapped: no fault when they are touched
	TouchesLost uint64 // faults that DrainTouched did not tell, because nobody drained

	Leaks uint64 // damaged entries that could not be released

	Ways         []WayStats // those that kept a page
	BlockingWays []WayStall // Blocking by how the page was kept; those that had a fault
}

// Stats returns a snapshot. It takes no lock; counters may be a fault apart.
func (p *Pager) Stats() Stats {
	c := p.stats
	s := Stats{
		Faults: c.faults.Load(), Stall: time.Duration(c.stall.Load()), StallMax: time.Duration(c.stallMax.Load()),
		Blocking: c.restore.snapshot(), Prefetched: c.prefetch.snapshot(), PrefetchedPage: c.prefetchPage.snapshot(), Template: c.template.snapshot(),
		Zero: c.zero.snapshot(), Protected: c.protect.snapshot(), Held: c.held.snapshot(), CancelLatency: c.cancel.snapshot(),
		Reports: c.reports.snapshot(), Reported: c.reported.Load(), Discarded: c.discarded.Load(), DiscardedEntries: c.discardedEntries.Load(),
		Stale: c.stale.Load(), WriteFaults: c.writes.Load(), Around: c.around.Load(),
		Cancelled: c.cancelled.Load(), Dirtied: c.dirtied.Load(),
		Passes: c.passes.Load(), Scanned: c.scanned.Load(), Encoded: c.encodedPages.Load(), Zeros: c.zeroPages.Load(),
		Equal: c.equalPages.Load(), Clean: c.cleanPages.Load(), Kept: c.keptPages.Load(),
		Mismatches: c.mismatches.Load(), Leaks: c.leaks.Load(), Neighbours: c.neighbours.Load(), GivenUp: c.givenUp.Load(), MappedBack: c.mappedBack.Load(), TouchesLost: c.touchesLost.Load(), FullPasses: c.fullPasses.Load(), Evicting: time.Duration(c.evicting.Load()),
	}
	for k := range cohort.NumWays {
		if n := c.wayPages[k].Load(); n > 0 {
			s.Ways = append(s.Ways, WayStats{Way: cohort.Way(k), Pages: n, Bytes: units.Bytes(c.wayBytes[k].Load())})
		}
	}
	for k := range cohort.NumWays {
		if n := c.wayFaults[k].Load(); n > 0 {
			s.BlockingWays = append(s.BlockingWays, WayStall{Way: cohort.Way(k), Faults: n, Stall: time.Duration(c.wayStall[k].Load())})
		}
	}
	return s
}

// noteLoaded adds a restore that a fault waited for.
func (c *counters) noteLoaded(w cohort.Way, took time.Duration) {
	c.wayFaults[w].Add(1)
	c.wayStall[w].Add(int64(took))
}

// noteStall adds the service time of one fault.
func (c *counters) noteStall(d time.Duration) {
	c.faults.Add(1)
	c.stall.Add(int64(d))
	for {
		old := c.stallMax.Load()
		if int64(d) <= old || c.stallMax.CompareAndSwap(old, int64(d)) {
			return
		}
	}
}

// noteStored counts a page that was kept.
func (c *counters) noteStored(s cohort.Stored) {
	c.wayPages[s.Way].Add(1)
	c.wayBytes[s.Way].Add(uint64(s.Size)) //nolint:gosec // G115: below a page
}
