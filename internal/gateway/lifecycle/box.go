package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

// What operations on a box answer; control maps them to status codes.
var (
	ErrNotFound = errors.New("sandbox not found")
	ErrPaused   = errors.New("sandbox is already paused")
	ErrRunning  = errors.New("sandbox is already running")
	ErrKilling  = errors.New("sandbox is being killed")
	ErrNotReady = errors.New("sandbox is not running")
	// ErrLimit: a quota of the team is used up; try later.
	ErrLimit = errors.New("limit reached")
)

// opLimit bounds an operation of the backend. Clients give up after 60 s; an
// operation that takes longer than twice that is stuck.
const opLimit = 2 * time.Minute

// A Box is one sandbox as clients know it. Safe for concurrent use.
type Box struct {
	fleet *Fleet // immutable
	id    string // immutable
	team  string // immutable

	mu      sync.Mutex
	state   State
	rec     store.Sandbox      // guarded by mu
	live    *Live              // guarded by mu; nil without a VM
	changed chan struct{}      // guarded by mu; closed at the next change of state
	abort   context.CancelFunc // guarded by mu; ends the operation under way
	busy    chan struct{}      // guarded by mu; closed when the operation under way has ended; nil without one
	timer   *time.Timer        // guarded by mu; nil before the box runs
	cause   Cause              // guarded by mu; why it ended
	detail  string             // guarded by mu; what the VM said
	ended   time.Time          // guarded by mu
}

// A View is a box at one moment. Its maps and pointers are read only.
type View struct {
	store.Sandbox

	State  State
	Cause  Cause
	Detail string
	Ended  time.Time
}

// Visible is the state that clients are told; "" hides the box.
func (v View) Visible() string {
	switch v.State {
	case Running, Copying:
		return "running"
	case Pausing, Paused, Resuming:
		return "paused"
	case Absent, Creating, Killing, Gone:
	}
	return ""
}

// ID returns the sandbox's id.
func (b *Box) ID() string { return b.id }

// View returns the box as it is now.
func (b *Box) View() View {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.view()
}

func (b *Box) view() View {
	return View{Sandbox: b.rec, State: b.state, Cause: b.cause, Detail: b.detail, Ended: b.ended}
}

// move makes the transition for e, or says that it is not allowed. Caller holds mu.
func (b *Box) move(e Event) bool {
	to, ok := Next(b.state, e)
	if !ok {
		return false
	}
	b.fleet.log.Debug("sandbox", "id", b.id, "from", b.state, "event", e, "to", to)
	b.state = to
	close(b.changed)
	b.changed = make(chan struct{})
	if to == Gone {
		b.ended = b.fleet.now()
	}
	return true
}

// must is move for transitions that the state just checked allows. Caller holds mu.
func (b *Box) must(e Event) {
	if state := b.state; !b.move(e) {
		b.mu.Unlock() // so that the panic shows and does not hang in a deferred lock
		panic(fmt.Sprintf("sandbox %s: event %q in state %q", b.id, e, state))
	}
}

// begin makes a context for an operation of the backend. It outlives its
// caller; Kill ends it. Caller holds mu.
func (b *Box) begin() (ctx context.Context, done func()) {
	ctx, cancel := context.WithTimeout(b.fleet.ctx, opLimit)
	busy := make(chan struct{})
	b.abort, b.busy = cancel, busy
	return ctx, func() {
		cancel()
		b.mu.Lock()
		if b.busy == busy { // else the next operation has begun
			b.busy, b.abort = nil, nil
		}
		b.mu.Unlock()
		close(busy)
	}
}

// absent is the answer to an operation on a box in a state that clients do not
// see; nil in one that they do. Caller holds mu.
func (b *Box) absent() error {
	switch b.state {
	case Killing:
		return fmt.Errorf("%w: %w", ErrNotFound, ErrKilling)
	case Absent, Creating:
		return ErrNotFound
	case Gone:
		return fmt.Errorf("%w: %s", ErrNotFound, explain(b.cause, b.detail))
	case Running, Copying, Pausing, Paused, Resuming:
	}
	return nil
}

func explain(c Cause, detail string) string {
	if detail == "" {
		return "it ended, cause " + string(c)
	}
	return fmt.Sprintf("it ended, cause %s: %s", c, detail)
}

// await waits for the next change of state. Caller holds mu, and holds it again after.
func (b *Box) await(ctx context.Context) error {
	changed := b.changed
	b.mu.Unlock()
	defer b.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Pause puts the sandbox away. memory false keeps only its disk.
func (b *Box) Pause(ctx context.Context, memory bool) error {
	b.mu.Lock()
	for b.state == Copying {
		if err := b.await(ctx); err != nil {
			b.mu.Unlock()
			return err
		}
	}
	return b.pause(memory) //nolint:contextcheck // it outlives its caller
}

// pause pauses a box that is running now. Caller holds mu, which is given up.
func (b *Box) pause(memory bool) error {
	if err := b.absent(); err != nil {
		b.mu.Unlock()
		return err
	}
	if !b.move(Pause) {
		b.mu.Unlock()
		return ErrPaused
	}
	live := b.live
	ctx, done := b.begin()
	b.mu.Unlock()
	defer done()

	err := live.Sandbox.Pause(ctx, memory)

	b.mu.Lock()
	if b.state == Killing {
		b.mu.Unlock()
		return nil // it was paused, and then killed
	}
	switch {
	case err == nil:
		b.stopTimer()
		b.rec.Paused, b.rec.MemoryKept, b.rec.End = true, memory, b.fleet.now()
		rec := b.rec
		b.live = nil
		b.mu.Unlock()
		b.fleet.quota.release(b.team)
		err = b.fleet.store.Put(store.Sandboxes, b.id, rec)
		b.mu.Lock()
		if b.state == Killing {
			b.mu.Unlock()
			live.end()
			return nil
		}
		b.must(PauseDone)
		b.mu.Unlock()
		live.end()
		return err
	case errors.Is(err, ErrUnchanged):
		b.must(PauseFailed)
		b.fleet.watch(live) // it may have died meanwhile, when nobody looked
		b.mu.Unlock()
		return fmt.Errorf("pause sandbox %s: %w", b.id, err)
	}
	cause, detail := live.Sandbox.Cause()
	if cause == CauseNone || cause == CauseKilled {
		cause, detail = CauseFailed, err.Error()
	}
	b.died(live, cause, detail)
	return fmt.Errorf("pause sandbox %s: %w", b.id, err)
}

// A Connected says what Connect found.
type Connected struct {
	View    View
	Resumed bool
}

// A Wake says how a paused box is resumed.
type Wake struct {
	Timeout  time.Duration
	Cold     bool  // from the disk alone
	OnlyWake bool  // a running one is ErrRunning
	Pause    *bool // sets the record's AutoPause
}

// Connect resumes a paused sandbox; of a running one it extends the time to live.
func (b *Box) Connect(ctx context.Context, w Wake) (Connected, error) {
	b.mu.Lock()
	for {
		switch b.state {
		case Running, Copying:
			if w.OnlyWake {
				b.mu.Unlock()
				return Connected{}, ErrRunning
			}
			b.extend(w.Timeout)
			v := b.view()
			b.mu.Unlock()
			return Connected{View: v}, nil
		case Paused:
			return b.resume(w) //nolint:contextcheck // it outlives its caller
		case Killing:
			b.mu.Unlock()
			return Connected{}, ErrKilling
		case Absent, Creating, Gone:
			err := b.absent()
			b.mu.Unlock()
			return Connected{}, err
		case Pausing, Resuming:
			if err := b.await(ctx); err != nil {
				b.mu.Unlock()
				return Connected{}, err
			}
		}
	}
}

// resume makes a VM of a paused box. Caller holds mu, which is given up.
func (b *Box) resume(w Wake) (Connected, error) {
	if err := b.fleet.quota.admit(b.team, 1); err != nil {
		b.mu.Unlock()
		return Connected{}, err
	}
	b.must(Resume)
	spec := b.fleet.spec(b.rec)
	spec.ColdBoot = w.Cold || !b.rec.MemoryKept
	spec.KeepEnv = !spec.ColdBoot
	ctx, done := b.begin()
	b.mu.Unlock()
	defer done()

	sb, err := b.fleet.backend.Resume(ctx, spec)

	b.mu.Lock()
	if b.state == Killing {
		b.mu.Unlock()
		if err == nil {
			b.fleet.kill(sb)
		}
		b.fleet.quota.release(b.team)
		return Connected{}, ErrKilling
	}
	if err != nil {
		b.must(ResumeFailed)
		b.mu.Unlock()
		b.fleet.quota.release(b.team)
		return Connected{}, fmt.Errorf("resume sandbox %s: %w", b.id, err)
	}
	b.rec.Paused, b.rec.MemoryKept = false, false
	if w.Pause != nil {
		b.rec.AutoPause = *w.Pause
	}
	b.must(ResumeDone)
	b.run(sb, w.Timeout)
	v := b.view()
	b.mu.Unlock()
	return Connected{View: v, Resumed: true}, nil
}

// run gives a box that is running now its VM and its time. Caller holds mu.
func (b *Box) run(sb Sandbox, timeout time.Duration) {
	b.live = newLive(b, sb)
	b.fleet.watch(b.live)
	b.rec.End = b.fleet.now().Add(timeout)
	b.arm()
	b.save()
}

// save writes the record of a running box. Caller holds mu, which orders the writes.
func (b *Box) save() {
	if err := b.fleet.store.PutLater(store.Sandboxes, b.id, b.rec); err != nil {
		b.fleet.log.Error("write record", "sandbox", b.id, "err", err)
	}
}

// Kill ends the sandbox, running or paused, and returns when nothing of it is left.
func (b *Box) Kill(cause Cause) error {
	b.mu.Lock()
	if err := b.absent(); err != nil && b.state != Creating {
		b.mu.Unlock()
		return err
	}
	b.must(Kill)
	b.cause = cause
	b.stopTimer()
	live, busy := b.live, b.busy
	if b.abort != nil {
		b.abort()
	}
	b.mu.Unlock()
	if live != nil {
		live.end()
	}
	if busy != nil {
		<-busy
		b.mu.Lock()
		live = b.live // a pause has ended it, or not
		b.mu.Unlock()
	}
	var errs []error
	if live != nil {
		errs = append(errs, live.Sandbox.Kill())
	}
	errs = append(errs, b.fleet.backend.Forget(b.id))
	b.mu.Lock()
	b.live = nil
	b.must(Killed)
	b.mu.Unlock()
	if live != nil {
		b.fleet.quota.release(b.team)
	}
	b.fleet.remove(b)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", b.id, err)
	}
	return nil
}

// died takes the box to gone because its VM ended. Caller holds mu, which is given up.
func (b *Box) died(live *Live, cause Cause, detail string) {
	b.must(Died)
	b.cause, b.detail, b.live = cause, detail, nil
	b.stopTimer()
	b.mu.Unlock()
	live.end()
	b.fleet.log.Warn("sandbox died", "sandbox", b.id, "cause", cause, "detail", detail)
	if err := live.Sandbox.Kill(); err != nil {
		b.fleet.log.Error("clean up dead sandbox", "sandbox", b.id, "err", err)
	}
	if err := b.fleet.backend.Forget(b.id); err != nil {
		b.fleet.log.Error("clean up dead sandbox", "sandbox", b.id, "err", err)
	}
	b.fleet.quota.release(b.team)
	b.fleet.remove(b)
}

// copying runs f while the box is in Copying; it must be running.
func (b *Box) copying(ctx context.Context, f func(context.Context, *Live, store.Sandbox) error) error {
	b.mu.Lock()
	for b.state == Copying || b.state == Resuming {
		if err := b.await(ctx); err != nil {
			b.mu.Unlock()
			return err
		}
	}
	if err := b.absent(); err != nil {
		b.mu.Unlock()
		return err
	}
	if !b.move(Copy) {
		b.mu.Unlock()
		return ErrPaused
	}
	live, rec := b.live, b.rec
	op, done := b.begin()
	b.mu.Unlock()
	defer done()
	err := f(op, live, rec) //nolint:contextcheck // it outlives its caller
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state != Copying { // killed or died meanwhile
		return errors.Join(err, b.absent())
	}
	b.must(CopyDone)
	return err
}

// SetNetwork replaces the network configuration.
func (b *Box) SetNetwork(ctx context.Context, n *store.Network, open *bool) error {
	return b.copying(ctx, func(ctx context.Context, l *Live, rec store.Sandbox) error {
		if n != nil && n.Public == nil && rec.Network != nil {
			n.Public = rec.Network.Public // ingress is not part of an update
		}
		rec.Network = n
		rec.InternetSet, rec.Internet = open != nil, open != nil && *open
		if err := l.Sandbox.SetInternet(ctx, internet(rec)); err != nil {
			return fmt.Errorf("set network of sandbox %s: %w", b.id, err)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.rec.Network, b.rec.InternetSet, b.rec.Internet = rec.Network, rec.InternetSet, rec.Internet
		b.save()
		return nil
	})
}
