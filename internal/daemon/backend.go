package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/template"
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
	Warm        int // sandboxes kept ready in each of the cohorts used last
}

// A Backend makes the gateway's sandboxes on this host. Close it after the
// gateway has ended, before the Daemon.
//
// Lock order: Backend.mu, then nothing.
type Backend struct {
	daemon  *Daemon        // immutable
	opts    BackendOptions // immutable
	figures *callFigures   // immutable

	// places bounds the clones that are made at once: more of them would only make
	// each slower. Those that wait for a client go before those for later.
	places  chan struct{}
	waiting atomic.Int64 // clients that wait for a clone

	mu      sync.Mutex
	cohorts map[domain]*shared // guarded by mu
	recent  []domain           // guarded by mu; those with warm sandboxes, the latest first
	facts   []lifecycle.Facts  // guarded by mu
	factsAt time.Time          // guarded by mu
}

// NewBackend returns a backend that makes sandboxes in d.
func (d *Daemon) NewBackend(o BackendOptions) *Backend {
	return &Backend{
		daemon: d, opts: o, figures: newCallFigures(d.memory.gauge.Level),
		places: make(chan struct{}, max(2, runtime.NumCPU())), cohorts: map[domain]*shared{},
	}
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

// Start clones a template.
func (b *Backend) Start(ctx context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	if spec.Snapshot != "" {
		return nil, fmt.Errorf("start from snapshot %s: %w", spec.Snapshot, lifecycle.ErrUnsupported)
	}
	g, err := b.start(ctx, domain{spec.Cohort, spec.Template}, spec)
	var short *policy.Refusal
	switch {
	case errors.Is(err, template.ErrNotFound):
		return nil, fmt.Errorf("%w: %w", lifecycle.ErrNoTemplate, err)
	case errors.As(err, &short):
		return nil, fmt.Errorf("%w: %w", lifecycle.ErrBusy, err)
	}
	return g, err
}

// start takes a sandbox that is ready, or clones one.
func (b *Backend) start(ctx context.Context, at domain, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	s, leave, err := b.join(ctx, at)
	if err != nil {
		return nil, err
	}
	to := settingsOf(spec)
	if s.warm != nil {
		if sb, ok := s.warm.Take(); ok {
			err := sb.Personalise(ctx, spec.ID, to)
			if err == nil {
				return &guest{Sandbox: sb, leave: leave, figures: b.figures}, nil
			}
			b.daemon.log.Warn("a sandbox that was kept ready is of no use", "err", err)
			drop(b.daemon.log, sb)
		}
	}
	sb, err := b.clone(ctx, CloneOptions{ID: spec.ID, Template: at.template, Cohort: s.cohort, Settings: to})
	if err != nil {
		leave()
		return nil, err
	}
	return &guest{Sandbox: sb, leave: leave, figures: b.figures}, nil
}

// clone makes a sandbox when it is its turn.
func (b *Backend) clone(ctx context.Context, o CloneOptions) (*sandbox.Sandbox, error) {
	b.waiting.Add(1)
	defer b.waiting.Add(-1)
	select {
	case b.places <- struct{}{}:
		defer func() { <-b.places }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the turn to clone: %w", ctx.Err())
	}
	return b.daemon.Clone(ctx, o)
}

// warmYield is how often the making of a warm sandbox looks whether clients still wait.
const warmYield = 100 * time.Millisecond

// spare makes a sandbox for later, when no client waits for one.
func (b *Backend) spare(ctx context.Context, o CloneOptions) (*sandbox.Sandbox, error) {
	for b.waiting.Load() > 0 {
		select {
		case <-time.After(warmYield):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return b.daemon.Clone(ctx, o)
}

// settingsOf is what the guest is told about itself.
func settingsOf(spec lifecycle.Spec) *guestlink.Settings {
	to := &guestlink.Settings{
		SandboxID: &spec.ID, TemplateID: &spec.Requested, AccessToken: &spec.Token,
		DefaultUser: &spec.User, DefaultWorkdir: &spec.Workdir, Internet: &spec.Internet,
	}
	if !spec.KeepEnv {
		to.Envs = map[string]string{}
		maps.Copy(to.Envs, spec.Env)
	}
	return to
}

// Resume is not possible yet: nothing can have been kept.
func (b *Backend) Resume(_ context.Context, spec lifecycle.Spec) (lifecycle.Sandbox, error) {
	return nil, fmt.Errorf("resume %s: %w", spec.ID, lifecycle.ErrUnsupported)
}

// Kept lists what is kept on the disk.
func (b *Backend) Kept() (map[string]lifecycle.Kept, error) { return nil, nil }

// Forget deletes what is kept under key.
func (b *Backend) Forget(string) error { return nil }
