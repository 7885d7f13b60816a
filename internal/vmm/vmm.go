// Package vmm launches, controls, confines, kills and cleans up the QEMU
// process of one machine.
//
// A machine is started in one of two modes, from one command line, so that the
// device state of the first always loads into the second:
//
//	Boot   fresh shared memory, kernel and initrd, no shim   (template builder)
//	Clone  a template's sealed memory mapped privately, device state loaded,
//	       paused until Resume so that a pager can attach    (sandbox)
//
// The life of a machine:
//
//	Start --process, shim, cgroup, QMP--> prepared --state loaded--> paused --Resume--> running
//	                                                                 paused <--Stop---- running
//	any of these --guest off, reboot or panic; crash; OOM kill; Kill--> dead (Done is closed)
//
// Done is closed after the process was reaped and its cgroup, uid and
// descriptors were given back: a machine that is done has left nothing behind.
//
// What guarantees that when this process dies: each VMM has SIGKILL as its
// parent-death signal and (clones) a shim that exits when its socket closes; a
// guard process empties the run's cgroups and folders when its pipe closes; and
// Sweep, run by every OpenHost, does the same for runs whose lock nobody holds.
//
// Everything a VMM needs is passed by file descriptor: it opens no path of ours
// and runs as a uid that owns nothing.
//
// Lock order: Host.mu, then nothing; Host.mu and machine.mu are never held together.
// No lock is held across a syscall that can block or a call out of the package.
// All exported methods may be called from any goroutine.
package vmm

import (
	"context"
	"net"
	"os"
	"time"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A Mode says where the machine's memory and device state come from.
type Mode uint8

const (
	// Boot starts a kernel in fresh memory that is shared with this process.
	Boot Mode = iota + 1
	// Clone maps a sealed image privately and loads saved device state.
	Clone
)

// An Accel is the way guest code runs.
type Accel string

const (
	TCG Accel = "tcg" // QEMU's translator; works everywhere, 10-20 times slower
	KVM Accel = "kvm" // hardware virtualisation; see `agentzip doctor` for whether it is real
)

// A Hardware is what the guest sees. A clone must have exactly the hardware its
// template was booted with, or its device state does not load; store it in the
// template's manifest.
type Hardware struct {
	Memory  units.Bytes `json:"memory"`  // guest memory; a multiple of 2 MiB
	VCPUs   int         `json:"vcpus"`   // 0 means 1
	Accel   Accel       `json:"accel"`   // "" means TCG
	CPU     string      `json:"cpu"`     // QEMU's -cpu; "" means max (TCG) or host (KVM)
	Network bool        `json:"network"` // user-mode network to everywhere the host reaches; false: no network device at all

	// Reporting gives the guest a balloon device to which it reports free pages. In a clone the
	// shim passes the reports on; without a shim the seal of guest memory refuses them, which
	// costs a line of the log each and nothing else. Omitted where false: templates from before
	// it are still what they were.
	Reporting bool `json:"free_page_reporting,omitempty"`
}

// A Spec describes one machine. The files stay the caller's: Start duplicates
// what it needs, and they may be closed when it has returned.
type Spec struct {
	ID       string // shows in cgroup names and errors: [a-z0-9-], at most 40 bytes, unique in the Host; "" means one is made up
	Mode     Mode
	Hardware Hardware

	// Memory is guest memory, of exactly Hardware.Memory bytes. Boot: an unsealed
	// memfd, mapped shared. Clone: the template's sealed memfd, mapped privately.
	Memory *os.File
	// Root is the root image (an NVDIMM, /dev/pmem0 to the guest, read-only). Others must be able to
	// read it (mode o+r), because an unprivileged VMM opens it again; nil: none.
	Root *os.File
	// Disk is the machine's own writable raw disk, opened read-write; nil: no disk.
	Disk *os.File

	Kernel, Initrd string // Boot only: paths. No Kernel: the firmware boots the disk. Initrd may be empty
	Cmdline        string // Boot only: the kernel's command line

	// State is for a Clone: what SaveState wrote; read from its start, whatever its offset. nil
	// leaves the machine prepared: Load must come before Resume.
	State *os.File

	// Wire is the machine's link; nil: it makes one of its own. It stays the caller's and outlives
	// the machine.
	Wire *Wire

	// Shim is the path of agentzip-shim.so; "" starts without one (no pager can attach).
	Shim string
}

// A Machine is one running VMM process.
type Machine interface {
	ID() string
	PID() int
	UID() int // the numeric user the VMM runs as

	// Link returns the host's end of the virtio-serial stream: the same
	// connection each time, until Reconnect or SetWire replaces it. The caller closes it.
	Link() net.Conn
	// Reconnect gives the port a new host end and returns it. The guest sees the
	// port close and open again. Use it when the previous one was closed.
	// A machine with a wire refuses.
	Reconnect(ctx context.Context) (net.Conn, error)

	// Of a prepared machine, and of no other: prepare.go says in which order.
	SetWire(ctx context.Context, w *Wire) error
	SetDisk(ctx context.Context, disk *os.File) error
	Load(ctx context.Context, state *os.File) error

	// Shim returns the daemon's end of the preloaded library, for guestmem.Attach
	// before Resume; nil if the Spec named none. It is closed with the machine.
	Shim() *guestmem.Shim

	// Resume lets the vCPUs run. Stop halts them and flushes the disk.
	Resume(ctx context.Context) error
	Stop(ctx context.Context) error
	// SaveState writes the device state, without memory, to f from its start,
	// and leaves the machine stopped. Of a machine without a wire, close the link first: a guest
	// that was told of no disconnect would go on with a stream nobody holds.
	SaveState(ctx context.Context, f *os.File) error
	// Settle waits until a stopped machine, whose wire is held, no longer moves bytes between
	// wire and guest, and returns what lies in the wire. State and memory belong together if that
	// is the same before SaveState and after the memory was read.
	Settle(ctx context.Context) (Level, error)
	// CopyDisk begins a copy of the disk, which is src, to dst, an empty file, while the machine
	// may run on and write.
	CopyDisk(ctx context.Context, src, dst *os.File) (*DiskCopy, error)

	// SetNetwork plugs the guest's network cable in or out: without it the guest reaches
	// nobody, whatever its root does. Device state brings its own setting, so it comes after
	// Load. A machine without a network device is left as it is.
	SetNetwork(ctx context.Context, in bool) error

	Console() []byte // the last 64 KiB of the serial console
	Log() []byte     // the last 16 KiB of what the VMM wrote to stdout and stderr
	Timing() Timing
	Memory() (Memory, error) // what the VMM costs the host now

	// Done is closed when nothing of the machine is left. Exit says why; before
	// Done its Cause is Alive.
	Done() <-chan struct{}
	Exit() Exit
	// Kill ends the VMM and waits until Done.
	Kill()
}

// A Timing says how long the phases of Start took.
type Timing struct {
	Spawn time.Duration // fork and exec, cgroup, shim handshake
	QMP   time.Duration // from exec until QMP answered
	Load  time.Duration // Clone: from QMP until the device state was in
}

// A Memory is what a VMM process occupies, from /proc/PID/status and its cgroup.
type Memory struct {
	Anon       units.Bytes // RssAnon: private guest pages and the VMM's heap
	File       units.Bytes // RssFile: binary, libraries, root image; shared
	Shmem      units.Bytes // RssShmem: template pages mapped; shared
	PageTables units.Bytes // VmPTE
	Kernel     units.Bytes // kernel memory charged to the cgroup, page tables included; 0 without a memory controller
	Group      units.Bytes // charged to the cgroup, kernel memory and page cache included; 0 without a memory controller
}
