package bench

import (
	"context"
	"time"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/units"
)

// Mode says whether a run compresses.
type Mode uint8

// The two modes of a paired run.
const (
	Off Mode = iota // pages stay where the guest put them: the baseline
	On              // private pages are compressed in every gap
)

// String returns "off" or "on".
func (m Mode) String() string {
	if m == On {
		return "on"
	}
	return "off"
}

// MarshalText makes reports say "off" and "on".
func (m Mode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// A FleetFactory makes the fleet of one run. The context ends the fleet's
// background work too; the caller still calls Close.
type FleetFactory func(ctx context.Context, mode Mode) (Fleet, error)

// A Fleet is one run: sandboxes cloned from one template, compression on or
// off for all of them. All methods are safe for concurrent use.
type Fleet interface {
	// Start clones one sandbox and returns when it accepts commands.
	Start(ctx context.Context, name string) (Box, error)
	// Usage returns what the fleet's sandboxes cost right now, exactly. A Box
	// that was closed costs nothing and is not in it; that it was closed is no
	// error, not even while Usage runs.
	Usage() (FleetUsage, error)
	// Counters returns what happened since the fleet was made, also to
	// sandboxes that are closed by now.
	Counters() Counters
	// Close kills every sandbox and returns when nothing of them is left.
	Close() error
}

// A Box is one running sandbox. Run is called by one goroutine at a time; the
// other methods from any. Measure closes a Box when its trajectory is over,
// before the fleet.
type Box interface {
	// Run runs one tool call. The error says that the sandbox or its link
	// failed; a command that fails is a CallResult.
	Run(ctx context.Context, spec CallSpec) (CallResult, error)
	Usage() (BoxUsage, error)
	State() BoxState
	Close() error
}

// An Announcer is a Box that can be told early that a call comes.
type Announcer interface {
	// Announce says that the model has named the tool of its next call, as it was recorded:
	// "Bash", not which command. The call follows when it is written out. It waits for nothing.
	Announce(tool string)
}

// A CallSpec is one tool call as the sandbox gets it.
type CallSpec struct {
	Shell   string            // command text, run as `/bin/bash -l -c`
	Cwd     string            // working folder
	User    string            // account the command runs as
	Env     map[string]string // added to the account's environment
	Timeout time.Duration     // the command is killed after it; 0 = none
}

// A CallResult is how a tool call ended.
type CallResult struct {
	Stdout, Stderr []byte // bounded by the Box; what is beyond the bound is dropped, not kept elsewhere
	Truncated      bool   // some output was dropped at the bound
	Exit           int
	Signal         string // "" unless a signal ended the command
	TimedOut       bool
	Duration       time.Duration // as the host saw it, dispatch to exit
	Stall          time.Duration // time in which at least one fault blocked the guest during the call
	Faults         uint64        // faults served during the call

	Ways     map[string]FaultCost // restores that faults waited for, by how the page was kept
	Kinds    map[string]FaultCost // of them by kind, without the stale ones; nil without compression
	Ahead    uint64               // pages restored ahead since the call before
	Wasted   uint64               // pages brought ahead before that went without a sign of use since the last call
	Progress []StallAt            // how the stall grew, in order; empty where nobody looked
}

// FaultCost is how many faults of a kind there were and how long the guest waited for them.
type FaultCost struct {
	Count uint64
	Stall time.Duration
}

// StallAt is the stall of a call at a time after its dispatch.
type StallAt struct{ After, Stall time.Duration }

// FleetUsage is what all sandboxes of a fleet cost at one moment.
type FleetUsage struct {
	ResidentPrivate units.Bytes // private guest pages mapped now
	PoolFootprint   units.Bytes // encoded bytes, slack and the pool's own metadata
	PageTables      units.Bytes // the pagers' page tables and the like
	Dictionaries    units.Bytes // dictionaries of the cohort
	Index           units.Bytes // reference index, and what predictors remember; 0 where there is none
	VMMHeap         units.Bytes // anonymous memory of the VMM processes outside guest RAM; reported beside, not inside
	Pooled          int64       // pages in the pool
	Sandboxes       int
}

// Private returns the private memory of the fleet as the design defines it.
// The VMM's own heap is not part of it.
func (u FleetUsage) Private() units.Bytes {
	return u.ResidentPrivate + u.PoolShare()
}

// PoolShare returns everything the daemon keeps because of the sandboxes.
func (u FleetUsage) PoolShare() units.Bytes {
	return u.PoolFootprint + u.PageTables + u.Dictionaries + u.Index
}

// BoxUsage is what one sandbox costs at one moment.
type BoxUsage struct {
	ResidentPrivate units.Bytes // private guest pages mapped now
	Encoded         units.Bytes // bytes of the sandbox's pages in the pool, without slack
	PageTables      units.Bytes // its own page table
	VMMHeap         units.Bytes // anonymous memory of its VMM outside guest RAM
	Pooled          int64       // its pages in the pool
}

// A Phase is what a sandbox is doing.
type Phase uint8

// The phases a display distinguishes.
const (
	Booting     Phase = iota // cloned, agent not answering yet
	Running                  // a tool call runs
	Gap                      // no call runs, nothing to do
	Compressing              // no call runs, pages are being evicted
	Dead                     // gone; BoxState.Cause says why
)

// String names the phase in one word.
func (p Phase) String() string {
	switch p {
	case Booting:
		return "booting"
	case Running:
		return "running"
	case Gap:
		return "gap"
	case Compressing:
		return "compressing"
	case Dead:
		return "dead"
	}
	return "unknown"
}

// BoxState is a sandbox's phase and, when it is dead, why.
type BoxState struct {
	Phase Phase
	Cause string // "" unless Dead
}

// EncoderUse is what one encoder did.
type EncoderUse struct {
	Pages uint64      // pages it won
	Bytes units.Bytes // encoded bytes of them
}

// Counters is what happened in a fleet since it was made.
type Counters struct {
	Faults            map[string]uint64           // by kind, as the pager names them
	Latencies         map[string]report.Histogram // by report.KindEvicted, ...; from fault read to install
	Prefetchers       []report.Prefetcher         // what restored ahead; nil where that is not known
	Encoders          map[string]EncoderUse       // by encoder; "zero" and "template" count pages dropped without one
	Evicted           uint64                      // pages dropped
	CleanDrops        uint64                      // of them without encoding, because their entry was still valid
	Incompressible    uint64                      // pages left resident because they do not shrink
	Cancelled         uint64                      // pages whose eviction a write cancelled
	CancelledPasses   uint64                      // passes a call cut short
	Passes            uint64                      // all of them
	Evicting          time.Duration               // how long they took together
	PoolFull          uint64                      // times the pool refused a page
	IntegrityFailures []string                    // one line each: sandbox, page, encoder
	Ahead             report.Ahead                // what was there before the guest asked
}
