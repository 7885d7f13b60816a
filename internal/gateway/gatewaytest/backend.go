// Package gatewaytest is a lifecycle.Backend without VMs, for tests: a sandbox
// is a handler in this process that answers a few routes of the agent, keeps
// files in a map, and dies, pauses and forks when told to.
//
// Lock order: Backend.mu, then Sandbox.mu.
package gatewaytest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// A Backend holds the fake sandboxes. The hooks are set before it is used; they
// may sleep and fail.
type Backend struct {
	Hook     func(op, id string) error // start, resume, pause, snapshot, fork, kill; nil does nothing
	Handlers map[uint16]http.Handler   // servers on ports of every guest
	// Guest starts an agent of one's own instead of the fake's routes; end stops it. nil does not.
	Guest   func(id string) (agent http.RoundTripper, end func())
	Calls   atomic.Int64 // tool windows that are open
	Windows atomic.Int64 // tool windows ever opened
	Idle    atomic.Bool  // guests do not compute although bytes do not flow

	mu   sync.Mutex
	live map[string]*Sandbox // guarded by mu
	kept map[string]image    // guarded by mu
	made []lifecycle.Spec    // guarded by mu; specs of all starts, resumes and forks
}

// image is what is kept of a sandbox.
type image struct {
	files  map[string]string
	memory map[string]string // nil without memory
}

// New returns an empty backend.
func New() *Backend {
	b := &Backend{live: map[string]*Sandbox{}, kept: map[string]image{}}
	b.Idle.Store(true)
	return b
}

func (b *Backend) hook(op, id string) error {
	if b.Hook == nil {
		return nil
	}
	return b.Hook(op, id)
}

// Templates lists "base" and "other".
func (b *Backend) Templates() ([]lifecycle.Facts, error) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return []lifecycle.Facts{
		{Name: "base", CPUs: 2, MemoryMB: 512, DiskMB: 1024, Created: at},
		{Name: "other", CPUs: 1, MemoryMB: 256, DiskMB: 512, Created: at},
	}, nil
}

// Template finds one of them.
func (b *Backend) Template(name string) (lifecycle.Facts, error) {
	all, _ := b.Templates()
	for _, f := range all {
		if f.Name == name {
			return f, nil
		}
	}
	return lifecycle.Facts{}, fmt.Errorf("%w: %s", lifecycle.ErrNoTemplate, name)
}

// Import makes nothing: an image is the template "other".
func (b *Backend) Import(_ context.Context, image string, report func(string)) (lifecycle.Facts, error) {
	if err := b.hook("import", image); err != nil {
		return lifecycle.Facts{}, err
	}
	report("imported " + image)
	return b.Template("other")
}

// Start makes a sandbox, empty or as a snapshot was.
func (b *Backend) Start(ctx context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	if err := errors.Join(b.hook("start", spec.ID), ctx.Err()); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	im := image{memory: map[string]string{}}
	if spec.Snapshot != "" {
		var ok bool
		if im, ok = b.kept[spec.Snapshot]; !ok {
			return nil, fmt.Errorf("%w: snapshot %s", lifecycle.ErrNoTemplate, spec.Snapshot)
		}
	}
	return b.add(spec, im), nil
}

// Resume makes a sandbox as it was when it was paused.
func (b *Backend) Resume(ctx context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	if err := errors.Join(b.hook("resume", spec.ID), ctx.Err()); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	im, ok := b.kept[spec.ID]
	if !ok {
		return nil, fmt.Errorf("nothing is kept of %s", spec.ID)
	}
	if spec.ColdBoot {
		im.memory = nil
	}
	delete(b.kept, spec.ID)
	return b.add(spec, im), nil
}

// add makes the sandbox. Caller holds mu.
func (b *Backend) add(spec lifecycle.Spec, im image) *Sandbox {
	s := newSandbox(b, spec.ID)
	s.files, s.memory = maps.Clone(im.files), maps.Clone(im.memory)
	if s.files == nil {
		s.files = map[string]string{}
	}
	if s.memory == nil {
		s.memory = map[string]string{}
	}
	if !spec.KeepEnv {
		for k, v := range spec.Env {
			s.memory["env:"+k] = v
		}
	}
	b.live[spec.ID] = s
	b.made = append(b.made, spec)
	return s
}

// Kept lists what is kept.
func (b *Backend) Kept() (map[string]lifecycle.Kept, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := map[string]lifecycle.Kept{}
	for k, im := range b.kept {
		kept[k] = lifecycle.Kept{Memory: im.memory != nil}
	}
	return kept, nil
}

// Forget deletes what is kept under key.
func (b *Backend) Forget(key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.kept, key)
	return nil
}

// Live returns a running sandbox, nil if there is none of that id.
func (b *Backend) Live(id string) *Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.live[id]
}

// Count returns how many sandboxes run and how many images are kept.
func (b *Backend) Count() (live, kept int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.live), len(b.kept)
}

// Made returns the specs of all sandboxes made so far.
func (b *Backend) Made() []lifecycle.Spec {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]lifecycle.Spec(nil), b.made...)
}

// Lose ends all sandboxes, as the end of a daemon does.
func (b *Backend) Lose() {
	b.mu.Lock()
	all := b.live
	b.live = map[string]*Sandbox{}
	b.mu.Unlock()
	for _, s := range all {
		s.end(lifecycle.CauseLost, "")
	}
}

// A Sandbox is one fake.
type Sandbox struct {
	backend  *Backend
	id       string
	agent    *host
	guest    http.RoundTripper // instead of agent; may be nil
	endGuest func()            // set with guest
	done     chan struct{}

	mu      sync.Mutex
	files   map[string]string
	memory  map[string]string
	ports   map[uint16]*host
	signals []lifecycle.Signal
	kinds   []string
	cause   lifecycle.Cause
	detail  string
}

func newSandbox(b *Backend, id string) *Sandbox {
	s := &Sandbox{backend: b, id: id, done: make(chan struct{}), ports: map[uint16]*host{}}
	s.agent = newHost(s.routes())
	if b.Guest != nil {
		s.guest, s.endGuest = b.Guest(id)
	}
	return s
}

// Agent answers the routes of agent.go.
func (s *Sandbox) Agent() http.RoundTripper {
	if s.guest != nil {
		return s.guest
	}
	return s.agent.transport
}

// Dial connects to one of Backend.Handlers.
func (s *Sandbox) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	h := s.backend.Handlers[port]
	if h == nil {
		return nil, lifecycle.ErrPortClosed
	}
	s.mu.Lock()
	p := s.ports[port]
	if p == nil {
		p = newHost(h)
		s.ports[port] = p
	}
	s.mu.Unlock()
	return p.dial(ctx)
}

// BeginCall counts.
func (s *Sandbox) BeginCall(ctx context.Context, kind string) (func(), error) {
	select {
	case <-s.done:
		return nil, errors.New("sandbox has ended")
	case <-ctx.Done():
		return nil, ctx.Err()
	default:
	}
	s.mu.Lock()
	s.kinds = append(s.kinds, kind)
	s.mu.Unlock()
	s.backend.Calls.Add(1)
	s.backend.Windows.Add(1)
	return func() { s.backend.Calls.Add(-1) }, nil
}

// Kinds returns the kinds of the calls so far.
func (s *Sandbox) Kinds() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.kinds...)
}

// Busy is what Backend.Idle says.
func (s *Sandbox) Busy() bool { return !s.backend.Idle.Load() }

// SetInternet remembers.
func (s *Sandbox) SetInternet(_ context.Context, open bool) error {
	if err := s.backend.hook("network", s.id); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.memory["internet"] = strconv.FormatBool(open)
	return nil
}

// Signal remembers.
func (s *Sandbox) Signal(g lifecycle.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.signals = append(s.signals, g)
}

// Signals returns what was signalled so far.
func (s *Sandbox) Signals() []lifecycle.Signal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]lifecycle.Signal(nil), s.signals...)
}

// Memory is made up.
func (s *Sandbox) Memory() (lifecycle.Memory, error) {
	return lifecycle.Memory{Private: 4096, Encoded: 100, Kept: 10, Ways: []lifecycle.Way{{Name: "zstd", Pages: 10, Bytes: 100}}}, nil
}

// copyOf returns what would be kept.
func (s *Sandbox) copyOf(memory bool) image {
	s.mu.Lock()
	defer s.mu.Unlock()
	im := image{files: maps.Clone(s.files)}
	if memory {
		im.memory = maps.Clone(s.memory)
	}
	return im
}

// Pause keeps the sandbox and ends it.
func (s *Sandbox) Pause(ctx context.Context, memory bool) error {
	if err := errors.Join(s.backend.hook("pause", s.id), ctx.Err()); err != nil {
		return fmt.Errorf("%w: %w", lifecycle.ErrUnchanged, err)
	}
	select {
	case <-s.done:
		return errors.New("sandbox has ended")
	default:
	}
	s.backend.mu.Lock()
	s.backend.kept[s.id] = s.copyOf(memory)
	delete(s.backend.live, s.id)
	s.backend.mu.Unlock()
	s.end(lifecycle.CauseNone, "paused")
	return nil
}

// Snapshot keeps a copy.
func (s *Sandbox) Snapshot(ctx context.Context, key string) error {
	if err := errors.Join(s.backend.hook("snapshot", s.id), ctx.Err()); err != nil {
		return err
	}
	s.backend.mu.Lock()
	defer s.backend.mu.Unlock()
	s.backend.kept[key] = s.copyOf(true)
	return nil
}

// Fork makes copies.
func (s *Sandbox) Fork(ctx context.Context, specs []lifecycle.Spec) ([]lifecycle.Sandbox, []error) {
	out, errs := make([]lifecycle.Sandbox, len(specs)), make([]error, len(specs))
	im := s.copyOf(true)
	for i, spec := range specs {
		if errs[i] = errors.Join(s.backend.hook("fork", spec.ID), ctx.Err()); errs[i] != nil {
			continue
		}
		s.backend.mu.Lock()
		out[i] = s.backend.add(spec, im)
		s.backend.mu.Unlock()
	}
	return out, errs
}

// Kill ends the sandbox.
func (s *Sandbox) Kill() error {
	err := s.backend.hook("kill", s.id)
	s.backend.mu.Lock()
	if s.backend.live[s.id] == s {
		delete(s.backend.live, s.id)
	}
	s.backend.mu.Unlock()
	s.end(lifecycle.CauseKilled, "")
	return err
}

// Die ends the sandbox by itself.
func (s *Sandbox) Die(cause lifecycle.Cause, detail string) { s.end(cause, detail) }

func (s *Sandbox) end(cause lifecycle.Cause, detail string) {
	s.mu.Lock()
	select {
	case <-s.done:
		s.mu.Unlock()
		return
	default:
	}
	s.cause, s.detail = cause, detail
	close(s.done)
	ports := s.ports
	s.mu.Unlock()
	s.agent.close()
	if s.guest != nil {
		s.endGuest()
	}
	for _, p := range ports {
		p.close()
	}
}

// Done is closed at the end.
func (s *Sandbox) Done() <-chan struct{} { return s.done }

// Cause says why it ended.
func (s *Sandbox) Cause() (lifecycle.Cause, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause, s.detail
}
