// Package sandbox takes one clone of a template from its start to its death.
//
//	Start --cloned, pager attached, personalised--> Gap <--calls--> Running
//	any --the VMM ends, a page fails its check, Close--> Dead (with a cause)
//
// A sandbox owns its VMM, its link to the guest agent, its pager and its disk.
// Compression is a property of the sandbox: with Options.Compression nil its
// memory is left alone and no userfaultfd is attached, which is the baseline
// that every saving is measured against.
//
// Lock order: Sandbox.mu, then Compression.mu or follower.mu. None is held across a system call
// that can block or a call out of the package.
//
// Goroutines of a sandbox: breathe (does what the rhythm asks for: passes of eviction, above
// all), the follower's run (restores ahead of calls, and what follows their faults) and watch
// (notes the VMM's end). Close ends and waits for them.
package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// ErrDead is wrapped by what a sandbox answers after its death, together with
// the cause. The call was not run, or its outcome is unknown.
var ErrDead = errors.New("sandbox is dead")

// readyTimeout is how long a clone may take from Resume to the agent's first
// answer. Under TCG on a busy host 1-2 s were seen; doubled, a hung clone is
// noticed later.
const readyTimeout = 60 * time.Second

// entropyBytes seeds the guest's generator: twice what the kernel needs to
// consider it initialised (256 bits).
const entropyBytes = 64

// A Phase is what a sandbox is doing.
type Phase uint8

// Phases.
const (
	Starting    Phase = iota // cloned, not yet personalised
	Gap                      // no tool call runs
	Compressing              // no tool call runs, and a pass of eviction does
	Running                  // a tool call runs
	Dead
)

// String names the phase in one word.
func (p Phase) String() string {
	switch p {
	case Starting:
		return "starting"
	case Gap:
		return "gap"
	case Compressing:
		return "compressing"
	case Running:
		return "running"
	case Dead:
		return "dead"
	}
	return "unknown"
}

// A Template is what a sandbox is cloned from. All fields are shared by all
// clones and must outlive them.
type Template struct {
	Name     string
	Hardware vmm.Hardware
	Image    *guestmem.Image
	Root     *os.File // root image, read-only
	State    *os.File // device state
	Disk     *os.File // the disk as it was when the state was saved; copied
}

// Options of one sandbox.
type Options struct {
	ID          string // [a-z0-9-]; "" makes one up
	Host        *vmm.Host
	Template    Template
	Shim        string       // path of the shim; needed with Compression
	Compression *Compression // nil leaves the sandbox's memory alone
	NoPrefetch  bool         // restore only what faults ask for
	// Settings are what the guest is told about itself before its first command; nil: nothing.
	// Without Internet set to true the guest reaches nobody.
	Settings *guestlink.Settings
	Log      *slog.Logger // nil discards
}

// A Sandbox is one running clone. All methods may be called from any goroutine.
type Sandbox struct {
	id          string       // immutable
	opts        Options      // immutable
	log         *slog.Logger // immutable
	machine     vmm.Machine  // immutable
	disk        *os.File     // immutable
	link        *guestlink.Client
	memory      *guestmem.Guest // nil without compression
	pager       *pager.Pager    // nil without compression
	stopBreath  context.CancelFunc
	background  sync.WaitGroup
	wake        chan struct{}  // tells breathe that the rhythm has changed; capacity 1
	cancels     pager.Recorder // from the arrival of a call to the end of the pass it found
	closeOnce   sync.Once
	closeResult error

	shared *Compression // immutable; nil without compression
	ahead  *follower    // immutable once ready; nil when nothing is restored ahead

	mu         sync.Mutex
	rhythm     *policy.Rhythm     // guarded by mu
	later      policy.Action      // guarded by mu; Park or Wake, for breathe
	named      time.Time          // guarded by mu; when a tool was named whose call has not come, zero if none was
	tool       string             // guarded by mu; that tool
	need       policy.Need        // guarded by mu; of the next call
	wasted     uint64             // guarded by mu; pages brought in vain that calls have been told of
	cancelPass context.CancelFunc // guarded by mu; ends the pass under way, nil without one
	cancelled  time.Time          // guarded by mu; when a call arrived during the pass under way, zero if none did
	cause      error              // guarded by mu; why the sandbox died, nil while it lives
	ready      bool               // guarded by mu; personalised
}

// Start clones the template and returns when the clone has its own identity and
// accepts commands. If it fails nothing of the clone is left.
func Start(ctx context.Context, opts Options) (*Sandbox, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.ID == "" {
		opts.ID = "s" + hex.EncodeToString(randomBytes(6))
	}
	s := &Sandbox{
		id:     opts.ID,
		opts:   opts,
		log:    opts.Log.With("sandbox", opts.ID),
		wake:   make(chan struct{}, 1),
		shared: opts.Compression,
	}
	if err := s.start(ctx); err != nil {
		if cerr := s.Close(); cerr != nil {
			s.log.Warn("clean up after a failed start", "err", cerr)
		}
		return nil, fmt.Errorf("start sandbox %s from template %s: %w", s.id, opts.Template.Name, err)
	}
	return s, nil
}

func (s *Sandbox) start(ctx context.Context) error {
	if err := s.clone(ctx); err != nil {
		return err
	}
	s.background.Go(s.watch)
	if s.opts.Compression != nil {
		if err := s.attachPager(); err != nil { //nolint:contextcheck // a page table is adopted whole or not at all
			return err
		}
	}
	if err := s.machine.SetNetwork(ctx, online(s.opts.Settings)); err != nil {
		return err
	}
	if err := s.machine.Resume(ctx); err != nil {
		return fmt.Errorf("resume clone: %w", err)
	}
	s.link = guestlink.New(s.machine.Link())
	if err := s.personalise(ctx); err != nil {
		if cause := s.Cause(); cause != nil {
			return cause
		}
		return err
	}
	breath, stop := context.WithCancel(context.WithoutCancel(ctx)) // lives until Close
	s.stopBreath = stop
	if s.pager != nil && s.shared.History != nil && !s.opts.NoPrefetch {
		guided := func() bool { return s.shared.Host.Level() == policy.Normal }
		s.ahead = newFollower(s.pager, s.shared.History.NewPredictor(s.id, s.pager.Evicted), guided, s.log)
		s.background.Go(func() { s.ahead.run(breath) })
	}
	s.mu.Lock()
	s.ready = true
	s.rhythm = policy.NewRhythm(time.Now(), policy.Times{})
	s.mu.Unlock()
	if s.pager != nil {
		s.background.Go(func() { s.breathe(breath) })
	}
	return nil
}

// clone starts the VMM, paused, with a disk of its own.
func (s *Sandbox) clone(ctx context.Context) error {
	t := s.opts.Template
	disk, err := s.opts.Host.TempFile(s.id + ".disk")
	if err != nil {
		return fmt.Errorf("create disk: %w", err)
	}
	s.disk = disk
	if err := vmm.CopySparse(t.Disk, disk); err != nil {
		return fmt.Errorf("copy template disk: %w", err)
	}
	spec := vmm.Spec{
		ID:       s.id,
		Mode:     vmm.Clone,
		Hardware: t.Hardware,
		Memory:   t.Image.File(),
		Root:     t.Root,
		Disk:     disk,
		State:    t.State,
	}
	if s.opts.Compression != nil {
		spec.Shim = s.opts.Shim
	}
	m, err := s.opts.Host.Start(ctx, spec)
	if err != nil {
		return fmt.Errorf("start VMM: %w", err)
	}
	s.machine = m
	return nil
}

// attachPager puts the guest's memory under the pager. The vCPU has not run yet.
func (s *Sandbox) attachPager() error {
	c := s.opts.Compression
	mem, err := guestmem.Attach(s.machine.Shim(), s.machine.PID(), s.opts.Template.Image)
	if err != nil {
		return fmt.Errorf("attach to guest memory: %w", err)
	}
	s.memory = mem
	p, err := pager.New(pager.Options{
		Name:    s.id,
		Guest:   mem,
		Image:   s.opts.Template.Image,
		Cohort:  c.Cohort,
		OnFatal: s.fatal,
	})
	if err != nil {
		return fmt.Errorf("create pager: %w", err)
	}
	s.pager = p
	if err := c.Faults.Add(p); err != nil {
		return fmt.Errorf("serve faults: %w", err)
	}
	return nil
}

// personalise gives the clone entropy, time and names that no sibling has. The
// agent must acknowledge it: a clone that shares its siblings' random numbers
// is worse than none.
func (s *Sandbox) personalise(ctx context.Context) error {
	return s.identify(ctx, s.id, s.opts.Settings)
}

// Personalise gives a sandbox that waited for its user a name, an identity and
// settings: once more, since Start has given it some.
func (s *Sandbox) Personalise(ctx context.Context, hostname string, settings *guestlink.Settings) error {
	if err := s.machine.SetNetwork(ctx, online(settings)); err != nil {
		return err
	}
	return s.identify(ctx, hostname, settings)
}

func (s *Sandbox) identify(ctx context.Context, hostname string, settings *guestlink.Settings) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	err := s.link.Personalize(ctx, guestlink.Identity{
		Entropy:   randomBytes(entropyBytes), // no Time: the link sends the present one, again if it came late
		Hostname:  hostname,
		MachineID: hex.EncodeToString(randomBytes(16)),
		BootID:    uuid.NewString(),
		Settings:  settings,
	})
	if err != nil {
		return fmt.Errorf("personalise clone: %w", err)
	}
	return nil
}

// ID returns the sandbox's name.
func (s *Sandbox) ID() string { return s.id }

// PID returns the VMM's process id.
func (s *Sandbox) PID() int { return s.machine.PID() }

// Timing says how long the VMM took to start.
func (s *Sandbox) Timing() vmm.Timing { return s.machine.Timing() }

// Console returns the end of the guest's serial console.
func (s *Sandbox) Console() []byte { return s.machine.Console() }

// Done is closed when the VMM has ended and nothing of it is left.
func (s *Sandbox) Done() <-chan struct{} { return s.machine.Done() }

// Cause returns why the sandbox died, wrapping ErrDead, or nil while it lives.
func (s *Sandbox) Cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil {
		return nil
	}
	return s.death()
}

// death is the error of a dead sandbox. Caller holds mu.
func (s *Sandbox) death() error { return fmt.Errorf("%w: %w", ErrDead, s.cause) }

// Phase returns what the sandbox is doing.
func (s *Sandbox) Phase() Phase {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.cause != nil:
		return Dead
	case !s.ready:
		return Starting
	case s.rhythm.Calls() > 0:
		return Running
	case s.cancelPass != nil:
		return Compressing
	}
	return Gap
}

// fatal is the pager's last word, told in a goroutine of its own: a page could
// not be given back as it was. The guest must not run on.
func (s *Sandbox) fatal(err error) {
	s.die(err)
	s.machine.Kill()
}

// die notes why the sandbox died; the first cause stays.
func (s *Sandbox) die(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil {
		s.cause = cause
	}
	if s.cancelPass != nil {
		s.cancelPass()
	}
}

// watch notes the VMM's end.
func (s *Sandbox) watch() {
	<-s.machine.Done()
	s.die(s.machine.Exit().Err())
}

// Close kills the sandbox and returns when nothing of it is left: process,
// cgroup, disk, pool entries. It may be called again.
func (s *Sandbox) Close() error {
	s.closeOnce.Do(func() { s.closeResult = s.close() })
	return s.closeResult
}

func (s *Sandbox) close() error {
	var errs []error
	if s.stopBreath != nil {
		s.stopBreath()
	}
	if s.machine != nil {
		s.machine.Kill()
	}
	s.background.Wait()
	if s.link != nil {
		if err := s.link.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, fmt.Errorf("close link: %w", err))
		}
	}
	if s.pager != nil {
		s.opts.Compression.Faults.Remove(s.pager)
		errs = append(errs, s.pager.Close())
	}
	if s.memory != nil {
		errs = append(errs, s.memory.Close())
	}
	if s.disk != nil {
		errs = append(errs, s.disk.Close())
	}
	return errors.Join(errs...)
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails (crypto/rand, Go 1.24)
	return b
}

// Pager returns the pager's counters; false when compression is off.
func (s *Sandbox) Pager() (pager.Stats, bool) {
	if s.pager == nil {
		return pager.Stats{}, false
	}
	return s.pager.Stats(), true
}

// Counts returns what the guest has waited for and what was brought ahead; zero without compression.
func (s *Sandbox) Counts() pager.Counts {
	if s.pager == nil {
		return pager.Counts{}
	}
	return s.pager.Counts()
}

// Cancels returns how long passes ran on after a call had arrived: what the call shared
// with them at most.
func (s *Sandbox) Cancels() pager.Latency { return s.cancels.Snapshot() }

// Memory returns what the VMM process occupies.
func (s *Sandbox) Memory() (vmm.Memory, error) { return s.machine.Memory() }

// Usage is what a sandbox costs at one moment.
type Usage struct {
	ResidentPrivate units.Bytes // private guest pages mapped now
	PageTables      units.Bytes // the pager's page table
	Encoded         units.Bytes // bytes of its pages in the pool, without slack; shared entries count for each sandbox
	Kept            int64       // its pages that the cohort keeps: in the pool, or as references
	VMMHeap         units.Bytes // anonymous memory of the VMM outside guest memory
}

// Usage counts exactly, by walking the VMM's page tables (1-3 ms).
func (s *Sandbox) Usage() (Usage, error) {
	var u Usage
	if s.pager != nil {
		pu, err := s.pager.Usage()
		if err != nil {
			return u, fmt.Errorf("count pages of sandbox %s: %w", s.id, err)
		}
		u = Usage{ResidentPrivate: pu.Resident + pu.Swapped, PageTables: pu.PageTable, Encoded: pu.Encoded, Kept: int64(pu.Kept)}
	} else {
		n, err := guestmem.CountPrivate(s.machine.PID(), s.opts.Template.Image)
		if err != nil {
			return u, fmt.Errorf("count pages of sandbox %s: %w", s.id, err)
		}
		u.ResidentPrivate = units.Bytes(n) * units.PageSize
	}
	mem, err := s.machine.Memory()
	if err != nil {
		return u, fmt.Errorf("measure VMM of sandbox %s: %w", s.id, err)
	}
	u.VMMHeap = max(0, mem.Anon-u.ResidentPrivate)
	return u, nil
}
