package lifecycle

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

// idAlphabet of sandbox ids; 32 letters would do for 100 bits, clients accept these 36.
const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// idLength behind the "i": 20 letters are 103 bits.
const idLength = 20

// graveyard is how many dead boxes are remembered for their cause of death.
const graveyard = 4096

// Limits of the fleet; 0 means none.
type Limits struct {
	PerTeam func(team string) int // sandboxes with a VM that a team may have
	Total   int                   // sandboxes with a VM on this host
}

// Options of a Fleet.
type Options struct {
	Backend Backend
	Store   *store.Store
	Limits  Limits
	Token   func(id string) string // the agent's token of a sandbox; nil: none
	Log     *slog.Logger           // nil discards
}

// A Fleet is all boxes. Safe for concurrent use.
type Fleet struct {
	backend Backend      // immutable
	store   *store.Store // immutable
	quota   *quota       // immutable
	log     *slog.Logger // immutable
	token   func(id string) string
	ctx     context.Context
	stop    context.CancelFunc

	mu       sync.Mutex
	boxes    map[string]*Box // guarded by mu
	dead     []string        // guarded by mu; ids in order of death
	graves   map[string]*Box // guarded by mu; by id
	watchers sync.WaitGroup
}

// Open loads the paused boxes: those that the backend keeps, whatever their
// record says, for a daemon may die between the two. The others that have a
// record died with the daemon before this one and are remembered as lost.
func Open(o Options) (*Fleet, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	f := &Fleet{
		backend: o.Backend, store: o.Store, log: o.Log, token: o.Token,
		quota: &quota{limits: o.Limits, perTeam: map[string]int{}},
		boxes: map[string]*Box{}, graves: map[string]*Box{},
	}
	if f.token == nil {
		f.token = func(string) string { return "" }
	}
	f.ctx, f.stop = context.WithCancel(context.Background())
	kept, err := o.Backend.Kept()
	if err != nil {
		return nil, fmt.Errorf("load sandboxes: %w", err)
	}
	var lost []*Box
	known := map[string]bool{}
	err = store.Each(o.Store, store.Sandboxes, func(id string, rec store.Sandbox) {
		b := f.box(rec)
		what, ok := kept[id]
		if ok {
			b.rec.Paused, b.rec.MemoryKept = true, what.Memory
			b.state = Paused
			f.boxes[id], known[id] = b, true
			return
		}
		b.state, b.cause, b.ended = Gone, CauseLost, f.now()
		b.detail = "it ran when the daemon before this one ended"
		lost = append(lost, b)
	})
	if err != nil {
		return nil, fmt.Errorf("load sandboxes: %w", err)
	}
	err = errors.Join(
		store.Each(o.Store, store.Snapshots, func(_ string, s store.Snapshot) { known[s.Key] = true }),
		store.Each(o.Store, store.Steps, func(_ string, s store.Snapshot) { known[s.Key] = true }), // these have a key too
	)
	if err != nil {
		return nil, fmt.Errorf("load snapshots: %w", err)
	}
	for _, b := range lost {
		f.log.Warn("sandbox ended with the daemon before this one", "sandbox", b.id)
		f.remove(b)
	}
	for key := range kept {
		if !known[key] {
			f.log.Warn("delete what nobody refers to", "key", key)
			if err := o.Backend.Forget(key); err != nil {
				return nil, fmt.Errorf("delete %s, which nobody refers to: %w", key, err)
			}
		}
	}
	return f, nil
}

// now is the wall clock; tests run it under synctest.
func (f *Fleet) now() time.Time { return time.Now() }

func (f *Fleet) box(rec store.Sandbox) *Box {
	return &Box{fleet: f, id: rec.ID, team: rec.Team, rec: rec, changed: make(chan struct{})}
}

func (f *Fleet) spec(rec store.Sandbox) Spec {
	return Spec{
		ID: rec.ID, Template: rec.Template, Snapshot: rec.Snapshot, Requested: rec.Requested,
		Cohort: rec.Team + "/" + rec.Cohort, Env: rec.Env, User: rec.User, Workdir: rec.Workdir,
		Token: f.token(rec.ID), Internet: internet(rec),
	}
}

// internet says whether a sandbox may reach beyond itself. The guest's way out is
// open or closed as a whole: rules for single addresses close it, because what
// they forbid must not be reachable.
func internet(rec store.Sandbox) bool {
	if rec.InternetSet && !rec.Internet {
		return false
	}
	return rec.Network == nil || len(rec.Network.DenyOut) == 0
}

// NewID returns a fresh sandbox id.
func NewID() string {
	raw := make([]byte, idLength)
	rand.Read(raw) // never fails (crypto/rand, Go 1.24)
	for i, c := range raw {
		raw[i] = idAlphabet[int(c)%len(idAlphabet)]
	}
	return "i" + string(raw)
}

// Create makes a sandbox. rec needs no ID and no times; its template must be one
// that Backend.Template knows.
func (f *Fleet) Create(_ context.Context, rec store.Sandbox) (View, error) {
	if err := f.quota.admit(rec.Team, 1); err != nil {
		return View{}, err
	}
	rec.ID, rec.Started = NewID(), f.now()
	b := f.box(rec)
	b.mu.Lock()
	b.must(Create)
	ctx, done := b.begin()
	b.mu.Unlock()
	defer done()
	f.add(b)
	sb, err := f.backend.Start(ctx, f.spec(rec)) //nolint:contextcheck // it outlives its caller
	return f.born(b, sb, err)
}

func (f *Fleet) add(b *Box) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.boxes[b.id] = b
}

// born ends the creation of a box.
func (f *Fleet) born(b *Box, sb Sandbox, err error) (View, error) {
	b.mu.Lock()
	switch {
	case b.state != Creating: // killed meanwhile
		b.mu.Unlock()
		if err == nil {
			f.kill(sb)
		}
		f.quota.release(b.team)
		return View{}, fmt.Errorf("create sandbox: %w", ErrKilling)
	case err != nil:
		b.must(CreateFailed)
		b.cause, b.detail = CauseFailed, err.Error()
		b.mu.Unlock()
		f.quota.release(b.team)
		f.remove(b)
		return View{}, fmt.Errorf("create sandbox: %w", err)
	}
	b.rec.Started = f.now() // its life is as long as it asked for, however long the clone took
	b.must(Created)
	b.run(sb, b.rec.Timeout)
	v := b.view()
	b.mu.Unlock()
	return v, nil
}

func (f *Fleet) kill(sb Sandbox) {
	if err := sb.Kill(); err != nil {
		f.log.Error("kill sandbox", "err", err)
	}
}

// watch takes the box to gone when its VM ends by itself.
func (f *Fleet) watch(l *Live) {
	f.watchers.Go(func() {
		select {
		case <-l.Sandbox.Done():
		case <-l.ctx.Done():
			return
		}
		b := l.Box
		b.mu.Lock()
		if b.live != l || (b.state != Running && b.state != Copying) {
			b.mu.Unlock()
			return // whoever changed the state looks after it
		}
		cause, detail := l.Sandbox.Cause()
		if cause == CauseNone {
			cause = CauseCrash
		}
		b.died(l, cause, detail)
	})
}

// remove forgets a box that is gone, but for its cause of death.
func (f *Fleet) remove(b *Box) {
	f.store.DeleteLater(store.Sandboxes, b.id)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.boxes, b.id)
	if len(f.dead) >= graveyard {
		delete(f.graves, f.dead[0])
		f.dead = f.dead[1:]
	}
	f.dead = append(f.dead, b.id)
	f.graves[b.id] = b
}

// Get returns the box of a team; "" is any team. A box that clients do not see
// (being created, killed) is there too: its operations answer for it.
func (f *Fleet) Get(team, id string) (*Box, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.boxes[id]
	if b == nil || (team != "" && b.team != team) {
		if g := f.graves[id]; g != nil && (team == "" || g.team == team) {
			return nil, fmt.Errorf("%w: %s", ErrNotFound, explain(g.cause, g.detail)) // nobody changes a box that is gone
		}
		return nil, ErrNotFound
	}
	return b, nil
}

// Explain returns what is known of a box, dead or alive.
func (f *Fleet) Explain(team, id string) (View, error) {
	f.mu.Lock()
	b := f.boxes[id]
	if b == nil {
		b = f.graves[id]
	}
	f.mu.Unlock()
	if b == nil || b.team != team {
		return View{}, ErrNotFound
	}
	return b.View(), nil
}

// List returns what clients see of a team's boxes ("" is all teams), oldest first.
func (f *Fleet) List(team string) []View {
	f.mu.Lock()
	views := make([]View, 0, len(f.boxes))
	for _, b := range f.boxes {
		if team == "" || b.team == team {
			if v := b.View(); v.Visible() != "" {
				views = append(views, v)
			}
		}
	}
	f.mu.Unlock()
	slices.SortFunc(views, func(a, b View) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.ID, b.ID))
	})
	return views
}

// Match calls try for each box that has or had a VM until it says yes.
func (f *Fleet) Match(try func(id string) bool) (string, bool) {
	f.mu.Lock()
	ids := make([]string, 0, len(f.boxes))
	for id := range f.boxes {
		ids = append(ids, id)
	}
	f.mu.Unlock()
	for _, id := range ids {
		if try(id) {
			return id, true
		}
	}
	return "", false
}

// Lives returns the VMs that run now.
func (f *Fleet) Lives() []*Live {
	f.mu.Lock()
	defer f.mu.Unlock()
	var lives []*Live
	for _, b := range f.boxes {
		b.mu.Lock()
		if b.live != nil && (b.state == Running || b.state == Copying) {
			lives = append(lives, b.live)
		}
		b.mu.Unlock()
	}
	return lives
}

// Close ends the fleet: with pause, running sandboxes are paused with their
// memory, else they are killed. Those that cannot be paused are killed.
func (f *Fleet) Close(pause bool) error {
	f.quota.close()
	f.mu.Lock()
	boxes := make([]*Box, 0, len(f.boxes))
	for _, b := range f.boxes {
		boxes = append(boxes, b)
	}
	f.mu.Unlock()
	var wg sync.WaitGroup
	places := make(chan struct{}, 4) // pausing is bound by CPU and disk
	errs := make([]error, len(boxes))
	for i, b := range boxes {
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			errs[i] = b.shutDown(pause)
		})
	}
	wg.Wait()
	f.stop()
	f.watchers.Wait()
	return errors.Join(errs...)
}

// settled waits until no operation is under way and returns the state.
func (b *Box) settled(ctx context.Context) State {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.state != Running && b.state != Paused && b.state != Gone {
		if b.await(ctx) != nil {
			break
		}
	}
	return b.state
}

func (b *Box) shutDown(pause bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	switch b.settled(ctx) {
	case Paused, Gone:
		return nil
	case Absent, Creating, Running, Copying, Pausing, Resuming, Killing:
	}
	if pause {
		err := b.Pause(ctx, true)
		if err == nil || errors.Is(err, ErrPaused) || errors.Is(err, ErrNotFound) {
			return nil
		}
		b.fleet.log.Error("pause at the end of the daemon", "sandbox", b.id, "err", err)
	}
	if err := b.Kill(CauseShutdown); err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	return nil
}

// TeamLimit is how many concurrent sandboxes a team may have; 0 is any number.
func (f *Fleet) TeamLimit(team string) int {
	if f.quota.limits.PerTeam == nil {
		return 0
	}
	return f.quota.limits.PerTeam(team)
}
