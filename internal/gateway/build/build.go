// Package build makes templates the way E2B's Template SDK describes them: a base
// (a template, a snapshot, an image) and steps. A build is a sandbox of its own in
// which the steps run one after the other; what it has become is snapshotted, and
// that snapshot is the template.
//
//	Create --waiting--> Start --building--> ready
//	                                   \--> error (with the step and its last lines)
//
// After each RUN and COPY the sandbox is snapshotted under the digest of all
// that led to it, so that the next build with the same beginning starts there.
// maxCached such snapshots are kept.
//
// Lock order: Builder.mu, then Build.mu. Neither is held across a call out of the
// package. A build runs in a goroutine of the Builder, which Close ends.
package build

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

const (
	// limit of a whole build.
	limit = time.Hour
	// maxBuilds are remembered, and maxLines of each; the oldest finished one goes first.
	maxBuilds = 256
	maxLines  = 10_000
	// maxRunning at once: each has a VM, and compiling needs the cores.
	maxRunning = 2
	// maxCached snapshots of steps.
	maxCached = 48
	// maxSteps of one build.
	maxSteps = 500
)

// What callers branch on.
var (
	ErrNotFound = errors.New("no such build")
	ErrStarted  = errors.New("the build has been started already")
	ErrTooMany  = errors.New("too many builds")
	ErrBad      = errors.New("bad build")
)

// A Status is where a build is.
type Status string

// Statuses, as clients know them.
const (
	Waiting  Status = "waiting"
	Building Status = "building"
	Ready    Status = "ready"
	Failed   Status = "error"
)

// A Line is one line of a build's log.
type Line struct {
	At    time.Time
	Level string
	Text  string
	Step  string
}

// A Step is one instruction: RUN, COPY, ENV, WORKDIR, USER.
type Step struct {
	Type      string
	Args      []string
	FilesHash string
	Force     bool
}

// A Plan is what a build does. Exactly one of Base and Image is set.
type Plan struct {
	Base         store.Sandbox // Template, Snapshot and sizes of what it starts from
	Env          map[string]string
	User         string // of the base; "" is the agent's default
	Workdir      string
	Image        string
	Steps        []Step
	Start, Ready string
	Force        bool
}

// Options of a Builder.
type Options struct {
	Backend lifecycle.Backend
	Store   *store.Store
	Dir     string // uploads are kept here
	Keep    func(store.Snapshot) error
	Log     *slog.Logger
}

// A Builder runs builds. Safe for concurrent use.
type Builder struct {
	opts   Options
	ctx    context.Context //nolint:containedctx // the lifetime of the builds
	stop   context.CancelFunc
	runs   sync.WaitGroup
	places chan struct{}

	mu     sync.Mutex
	builds map[string]*Build // guarded by mu; by id
	order  []string          // guarded by mu; oldest first
}

// A Build is one build.
type Build struct {
	ID, Template string
	Team, Name   string // Name is the snapshot's id

	mu     sync.Mutex
	status Status // guarded by mu
	lines  []Line // guarded by mu
	reason string // guarded by mu
	failed string // guarded by mu; the step
}

// New makes a Builder.
func New(o Options) (*Builder, error) {
	if err := os.MkdirAll(filepath.Join(o.Dir, "uploads"), 0o700); err != nil {
		return nil, fmt.Errorf("prepare builds: %w", err)
	}
	b := &Builder{opts: o, places: make(chan struct{}, maxRunning), builds: map[string]*Build{}}
	b.ctx, b.stop = context.WithCancel(context.Background())
	return b, nil
}

// Close ends the builds under way.
func (b *Builder) Close() {
	b.stop()
	b.runs.Wait()
}

func newID(prefix string) string {
	raw := make([]byte, 10)
	rand.Read(raw) // never fails (crypto/rand, Go 1.24)
	return prefix + hex.EncodeToString(raw)
}

// Create makes a build that waits for its steps. name is the snapshot's id.
func (b *Builder) Create(team, name string) (*Build, error) {
	build := &Build{ID: newID("b"), Template: newID("t"), Team: team, Name: name, status: Waiting}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.order) >= maxBuilds && !b.forgetOne() {
		return nil, ErrTooMany
	}
	b.builds[build.ID] = build
	b.order = append(b.order, build.ID)
	return build, nil
}

// forgetOne forgets the oldest build that is not building. Caller holds mu.
func (b *Builder) forgetOne() bool {
	for i, id := range b.order {
		if s, _, _, _ := b.builds[id].State(0, 0); s != Building {
			delete(b.builds, id)
			b.order = append(b.order[:i], b.order[i+1:]...)
			return true
		}
	}
	return false
}

// Get finds a build of a team.
func (b *Builder) Get(team, template, id string) (*Build, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	build := b.builds[id]
	if build == nil || build.Team != team || build.Template != template {
		return nil, ErrNotFound
	}
	return build, nil
}

// Named says whether a template id of the wire belongs to a build of the team,
// and to which name.
func (b *Builder) Named(team, template string) (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, build := range b.builds {
		if build.Team == team && build.Template == template {
			return build.Name, true
		}
	}
	return "", false
}

// Start runs a build.
func (b *Builder) Start(build *Build, p Plan) error {
	if err := b.check(p); err != nil {
		return err
	}
	build.mu.Lock()
	defer build.mu.Unlock()
	if build.status != Waiting {
		return ErrStarted
	}
	build.status = Building
	b.runs.Go(func() {
		select {
		case b.places <- struct{}{}:
			defer func() { <-b.places }()
		case <-b.ctx.Done():
		}
		ctx, cancel := context.WithTimeout(b.ctx, limit)
		defer cancel()
		r := &run{builder: b, build: build, plan: p}
		err := r.do(ctx)
		build.end(r.step, err)
	})
	return nil
}

// State returns how the build is, and its log from a line on, at most n lines (0: all).
func (build *Build) State(from, n int) (s Status, lines []Line, reason, step string) {
	build.mu.Lock()
	defer build.mu.Unlock()
	from = max(0, min(from, len(build.lines)))
	lines = build.lines[from:]
	if n > 0 {
		lines = lines[:min(n, len(lines))]
	}
	return build.status, append([]Line(nil), lines...), build.reason, build.failed
}

func (build *Build) say(level, step, text string) {
	build.mu.Lock()
	defer build.mu.Unlock()
	if len(build.lines) < maxLines {
		build.lines = append(build.lines, Line{time.Now().UTC(), level, text, step})
	}
}

func (build *Build) end(step string, err error) {
	if err == nil {
		build.say("info", "finalize", "done")
	} else {
		build.say("error", step, err.Error())
	}
	build.mu.Lock()
	defer build.mu.Unlock()
	build.status = Ready
	if err != nil {
		build.status, build.reason, build.failed = Failed, err.Error(), step
	}
}
