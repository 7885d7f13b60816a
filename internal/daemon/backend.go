package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/vmm"
)

// factsAge is how old what was read of the template store may be. A template
// that is built or removed meanwhile shows that much later.
const factsAge = 2 * time.Second

// AgentVersion is the envdVersion that clients are told: from it they conclude
// what the agent in the guest can do.
const AgentVersion = "0.6.4"

// BackendOptions of a gateway's backend.
type BackendOptions struct {
	Isolation   cohort.Isolation
	Compression bool
}

// A Backend makes the gateway's sandboxes on this host. Close it after the
// gateway has ended, before the Daemon.
//
// Lock order: Backend.mu, then nothing.
type Backend struct {
	daemon *Daemon        // immutable
	opts   BackendOptions // immutable

	mu      sync.Mutex
	cohorts map[string]*shared // guarded by mu; by trust domain and template
	facts   []lifecycle.Facts  // guarded by mu
	factsAt time.Time          // guarded by mu
}

// shared is a cohort and how many sandboxes are in it.
type shared struct {
	ready  chan struct{} // closed when the fields below are set
	cohort *Cohort
	err    error
	users  int // guarded by Backend.mu
}

// NewBackend returns a backend that makes sandboxes in d.
func (d *Daemon) NewBackend(o BackendOptions) *Backend {
	return &Backend{daemon: d, opts: o, cohorts: map[string]*shared{}}
}

// Close frees the cohorts. All sandboxes must have ended.
func (b *Backend) Close() error {
	b.mu.Lock()
	all := b.cohorts
	b.cohorts = nil
	b.mu.Unlock()
	var errs []error
	for _, s := range all {
		<-s.ready
		if s.err == nil {
			errs = append(errs, s.cohort.Close())
		}
	}
	return errors.Join(errs...)
}

// Templates lists the templates of the host.
func (b *Backend) Templates() ([]lifecycle.Facts, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.factsAt) < factsAge {
		return b.facts, nil
	}
	list, err := b.daemon.store.List()
	if err != nil {
		return nil, err
	}
	facts := make([]lifecycle.Facts, 0, len(list))
	for _, t := range list {
		m, err := b.daemon.store.Inspect(t.Name)
		if err != nil {
			b.daemon.log.Warn("leave out template", "template", t.Name, "err", err)
			continue
		}
		facts = append(facts, factsOf(m))
	}
	b.facts, b.factsAt = facts, time.Now()
	return facts, nil
}

func factsOf(m *template.Manifest) lifecycle.Facts {
	const mib = 1 << 20
	return lifecycle.Facts{
		Name: m.Name, CPUs: max(1, m.Hardware.VCPUs), MemoryMB: int(m.Hardware.Memory / mib),
		DiskMB: int(m.Files["disk.img"].Size / mib), Created: m.Created,
	}
}

// Template returns what is known of a template.
func (b *Backend) Template(name string) (lifecycle.Facts, error) {
	all, err := b.Templates()
	if err != nil {
		return lifecycle.Facts{}, err
	}
	for _, f := range all {
		if f.Name == name {
			return f, nil
		}
	}
	return lifecycle.Facts{}, fmt.Errorf("%w: %s", lifecycle.ErrNoTemplate, name)
}

// Import builds a template from a container image, named by what the image is called.
func (b *Backend) Import(ctx context.Context, image string, report func(string)) (lifecycle.Facts, error) {
	sum := sha256.Sum256([]byte(image))
	name := "image-" + hex.EncodeToString(sum[:6])
	t, err := b.daemon.store.Build(ctx, template.BuildSpec{
		Name: name, Source: template.Source{OCI: image}, Launcher: b.daemon.host,
		Agent: filepath.Join(b.daemon.opts.LibDir, "agentzip-guest"),
	}, func(e template.Event) {
		if e.Message != "" {
			report(e.Step + ": " + e.Message)
		}
	})
	if err != nil {
		return lifecycle.Facts{}, err
	}
	facts := factsOf(&t.Manifest)
	if err := t.Close(); err != nil {
		return lifecycle.Facts{}, err
	}
	b.mu.Lock()
	b.factsAt = time.Time{}
	b.mu.Unlock()
	return facts, nil
}

// join returns the cohort of a trust domain, which is made for its first
// sandbox and freed with its last (leave).
func (b *Backend) join(ctx context.Context, domain, tmpl string) (*Cohort, func(), error) {
	if !b.opts.Compression {
		return nil, func() {}, nil
	}
	key := domain + "\x00" + tmpl
	b.mu.Lock()
	s := b.cohorts[key]
	first := s == nil
	if first {
		s = &shared{ready: make(chan struct{})}
		b.cohorts[key] = s
	}
	s.users++
	b.mu.Unlock()
	if first {
		s.cohort, s.err = b.daemon.NewCohort(ctx, CohortOptions{Template: tmpl, Isolation: b.opts.Isolation})
		close(s.ready)
	}
	<-s.ready
	leave := sync.OnceFunc(func() { b.leave(key, s) })
	if s.err != nil {
		leave()
		return nil, nil, s.err
	}
	return s.cohort, leave, nil
}

func (b *Backend) leave(key string, s *shared) {
	b.mu.Lock()
	s.users--
	last := s.users == 0 && b.cohorts[key] == s
	if last {
		delete(b.cohorts, key)
	}
	b.mu.Unlock()
	if last && s.err == nil {
		if err := s.cohort.Close(); err != nil {
			b.daemon.log.Error("close cohort", "err", err)
		}
	}
}

// Start clones a template.
func (b *Backend) Start(ctx context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	if spec.Snapshot != "" {
		return nil, fmt.Errorf("start from snapshot %s: %w", spec.Snapshot, lifecycle.ErrUnsupported)
	}
	c, leave, err := b.join(ctx, spec.Cohort, spec.Template)
	if err != nil {
		return nil, err
	}
	sb, err := b.daemon.Clone(ctx, CloneOptions{ID: spec.ID, Template: spec.Template, Cohort: c, Settings: settingsOf(spec)})
	if err != nil {
		leave()
		if errors.Is(err, template.ErrNotFound) {
			return nil, fmt.Errorf("%w: %w", lifecycle.ErrNoTemplate, err)
		}
		return nil, err
	}
	return &guest{Sandbox: sb, leave: leave}, nil
}

// settingsOf is what a new sandbox's guest is told about itself.
func settingsOf(spec lifecycle.Spec) *guestlink.Settings {
	s := &guestlink.Settings{SandboxID: &spec.ID, TemplateID: &spec.Requested, Internet: new(true)}
	if !spec.KeepEnv {
		s.Envs = spec.Env
	}
	return s
}

// Resume is not possible yet: nothing can have been kept.
func (b *Backend) Resume(_ context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	return nil, fmt.Errorf("resume %s: %w", spec.ID, lifecycle.ErrUnsupported)
}

// Kept lists what is kept on the disk.
func (b *Backend) Kept() (map[string]lifecycle.Kept, error) { return nil, nil }

// Forget deletes what is kept under key.
func (b *Backend) Forget(string) error { return nil }

// guest is one sandbox of the gateway.
type guest struct {
	*sandbox.Sandbox
	leave func() // the cohort, after Close

	mu        sync.Mutex
	lastStall time.Duration // guarded by mu
	killed    bool          // guarded by mu
}

// Agent carries requests to the guest's agent.
func (g *guest) Agent() http.RoundTripper { return g.Sandbox.Agent() }

// Dial connects to a port in the guest.
func (g *guest) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	conn, err := g.Sandbox.Dial(ctx, int(port))
	if errors.Is(err, guestlink.ErrPortClosed) {
		return nil, fmt.Errorf("%w: %w", lifecycle.ErrPortClosed, err)
	}
	return conn, err
}

// BeginCall opens a tool window.
func (g *guest) BeginCall(ctx context.Context, kind string) (func(), error) {
	end, err := g.Sandbox.BeginCall(ctx, sandbox.CallInfo{Kind: kind})
	if err != nil {
		return nil, err
	}
	return func() {
		m := end()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.lastStall = m.Stall
	}, nil
}

// Busy reports whether the guest computes.
func (g *guest) Busy() bool { return false }

// Signal passes a signal to the rhythm.
func (g *guest) Signal(lifecycle.Signal) {}

// Memory is the sandbox's memory statement.
func (g *guest) Memory() (lifecycle.Memory, error) {
	u, err := g.Usage()
	if err != nil {
		return lifecycle.Memory{}, err
	}
	m := lifecycle.Memory{
		Private: int64(u.ResidentPrivate), Encoded: int64(u.Encoded), PageTables: int64(u.PageTables),
		VMM: int64(u.VMMHeap), Kept: u.Kept, Phase: g.Phase().String(),
	}
	g.mu.Lock()
	m.LastStall = g.lastStall
	g.mu.Unlock()
	if st, on := g.Pager(); on {
		m.Stall = st.Blocking.Total + st.Template.Total + st.Zero.Total + st.Protected.Total
		m.Faults = uint64(st.Blocking.Count + st.Template.Count + st.Zero.Count + st.Protected.Count)
		for _, w := range st.Ways {
			m.Ways = append(m.Ways, lifecycle.Way{Name: w.Way.String(), Pages: w.Pages, Bytes: int64(w.Bytes)})
		}
	}
	return m, nil
}

// Pause is not possible yet.
func (g *guest) Pause(context.Context, bool) error {
	return fmt.Errorf("%w: pause is not supported yet", lifecycle.ErrUnchanged)
}

// Snapshot is not possible yet.
func (g *guest) Snapshot(context.Context, string) error { return lifecycle.ErrUnsupported }

// Fork is not possible yet.
func (g *guest) Fork(_ context.Context, specs []lifecycle.Spec) ([]lifecycle.Sandbox, []error) {
	errs := make([]error, len(specs))
	for i := range errs {
		errs[i] = lifecycle.ErrUnsupported
	}
	return make([]lifecycle.Sandbox, len(specs)), errs
}

// Kill ends the sandbox.
func (g *guest) Kill() error {
	g.mu.Lock()
	g.killed = true
	g.mu.Unlock()
	err := g.Close()
	g.leave()
	return err
}

// Cause says why the sandbox ended.
func (g *guest) Cause() (lifecycle.Cause, string) {
	err := g.Sandbox.Cause()
	if err == nil {
		return lifecycle.CauseNone, ""
	}
	if errors.Is(err, pager.ErrFatal) {
		return lifecycle.CauseIntegrity, err.Error()
	}
	e := g.Exit()
	switch e.Cause {
	case vmm.GuestPowerOff, vmm.GuestReboot:
		return lifecycle.CauseGuest, e.String()
	case vmm.GuestPanic:
		if strings.Contains(string(g.Console()), "Out of memory") {
			return lifecycle.CauseGuestOOM, e.String()
		}
		return lifecycle.CauseGuest, e.String()
	case vmm.OutOfMemory:
		return lifecycle.CausePressure, e.String()
	case vmm.Killed:
		return lifecycle.CauseKilled, e.String()
	case vmm.Alive, vmm.Crashed, vmm.HostGone:
	}
	return lifecycle.CauseCrash, e.String()
}
