package lifecycle

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// What a Backend's errors wrap, so that the fleet can branch.
var (
	// ErrUnchanged: what was asked for could not be done now; the sandbox is as it was.
	ErrUnchanged = errors.New("nothing was changed")
	// ErrBusy: the host has no room for another sandbox now. Nothing was made.
	ErrBusy = errors.New("the host is full")
	// ErrNoTemplate: no template or snapshot of that name.
	ErrNoTemplate = errors.New("template not found")
	// ErrUnsupported: this backend cannot do it at all.
	ErrUnsupported = errors.New("not supported")
	// ErrPortClosed: nobody in the guest listens on the port.
	ErrPortClosed = errors.New("port is not open")
)

// Facts are what clients are told of a template.
type Facts struct {
	Name     string
	CPUs     int
	MemoryMB int
	DiskMB   int
	Created  time.Time
}

// A Spec says what to make. All fields are read only.
type Spec struct {
	ID        string
	Template  string // name of the template at the root of its history
	Snapshot  string // key of the snapshot to start from; "": the template
	Requested string // the templateID as clients know it
	Cohort    string // trust domain; sandboxes of one share pages. Holds the team
	Token     string // what programs in the guest must show its agent
	Env       map[string]string
	User      string // default user, "" is the agent's
	Workdir   string // default folder, "" is the user's home
	Internet  bool   // the guest may reach beyond itself, where its template has a network at all
	// KeepEnv: the guest's memory has its variables already; Env is only for a cold boot.
	KeepEnv  bool
	ColdBoot bool // Resume: from the disk alone
}

// A Backend makes sandboxes. Safe for concurrent use.
type Backend interface {
	// Template returns what is known of a template, or ErrNoTemplate.
	Template(name string) (Facts, error)
	Templates() ([]Facts, error)
	// Import makes a template of a container image: a reference, a layout folder or
	// an archive. An image that was imported before costs nothing.
	Import(ctx context.Context, image string, report func(string)) (Facts, error)
	// Start clones a template, or a snapshot of one.
	Start(ctx context.Context, spec Spec) (Sandbox, error)
	// Resume makes a sandbox again from what Pause kept under its id and, if it
	// succeeds, gives that up. If it fails, what was kept is still there.
	Resume(ctx context.Context, spec Spec) (Sandbox, error)
	// Kept lists what Pause and Snapshot have kept, by id or key.
	Kept() (map[string]Kept, error)
	// Forget deletes what was kept under a sandbox's id or a snapshot's key.
	// Nothing kept is no error.
	Forget(key string) error
}

// A Kept is a sandbox on the disk.
type Kept struct {
	Memory bool // with its memory
}

// A Sandbox is one VM. Safe for concurrent use.
type Sandbox interface {
	// Agent carries requests to the agent in the guest (the envd routes).
	Agent() http.RoundTripper
	// Dial connects to a port in the guest; ErrPortClosed if nobody listens.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
	// BeginCall says that a request of a client is about to reach the guest. It
	// returns when the guest can answer (a parked one is woken first). kind is
	// the command's name, "" if unknown. end may be called once, later.
	BeginCall(ctx context.Context, kind string) (end func(), err error)
	// Busy reports whether the guest computes although no bytes flow.
	Busy() bool
	// SetInternet lets the guest reach beyond itself, or not.
	SetInternet(ctx context.Context, open bool) error
	// Signal passes on what a client tells of the calls to come.
	Signal(s Signal)
	Memory() (Memory, error)
	// Pause puts the sandbox away under its id, durably, and ends the VM. An
	// error that wraps ErrUnchanged left it running; any other killed it.
	Pause(ctx context.Context, memory bool) error
	// Snapshot keeps a copy under key, durably. The sandbox goes on.
	Snapshot(ctx context.Context, key string) error
	// Fork makes a running copy for each spec; results and errors are in their order.
	Fork(ctx context.Context, specs []Spec) ([]Sandbox, []error)
	// Kill ends the VM and returns when nothing of it is left.
	Kill() error
	// Done is closed when the VM has ended; Cause says why, CauseNone before.
	Done() <-chan struct{}
	Cause() (Cause, string)
}

// A Cause is why a sandbox ended.
type Cause string

// Causes.
const (
	CauseNone      Cause = ""
	CauseKilled    Cause = "killed"    // a client asked for it
	CauseTimeout   Cause = "timeout"   // its time to live was over
	CauseGuest     Cause = "guest"     // it switched itself off, rebooted or its kernel panicked
	CauseGuestOOM  Cause = "guest-oom" // its kernel panicked for want of memory
	CauseCrash     Cause = "crash"     // the VMM died
	CauseIntegrity Cause = "integrity" // a page failed its check
	CausePressure  Cause = "pressure"  // the host's OOM killer
	CauseLost      Cause = "lost"      // the daemon ended while it ran
	CauseFailed    Cause = "failed"    // pausing it failed half-way
	CauseShutdown  Cause = "shutdown"  // the daemon was told to stop
)

// A Signal is what a client knows of the calls to come.
type Signal struct {
	Kind string // request, tool_name, arguments, dispatch, result, human_gap
	Tool string // the tool's or command's name, where known
}

// SignalKinds are the kinds a client may send.
var SignalKinds = []string{"request", "tool_name", "arguments", "dispatch", "result", "human_gap"}

// A Memory is a sandbox's memory statement. Sizes are in bytes.
type Memory struct {
	Private, Encoded, PageTables, VMM int64
	Kept                              int64 // pages
	Faults                            uint64
	Stall, LastStall                  time.Duration
	Parked                            bool
	Phase                             string
	Ways                              []Way

	// Of the call that ended last: faults it waited for, pages that were brought ahead of it,
	// pages that were brought before it and went without a sign of use, and how the pages were
	// kept that were decoded in it (Way.Bytes is not set).
	LastFaults, LastPrefetched, LastWasted uint64
	LastWays                               []Way
}

// A Way is one way in which pages are kept.
type Way struct {
	Name  string
	Pages uint64
	Bytes int64
}
