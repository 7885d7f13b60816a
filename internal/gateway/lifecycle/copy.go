package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

// Snapshot keeps a copy of a running sandbox under key.
func (b *Box) Snapshot(ctx context.Context, key string) (store.Sandbox, error) {
	var source store.Sandbox
	err := b.copying(ctx, func(ctx context.Context, l *Live, rec store.Sandbox) error {
		source = rec
		return l.Sandbox.Snapshot(ctx, key)
	})
	if err != nil {
		return source, fmt.Errorf("snapshot sandbox %s: %w", b.id, err)
	}
	return source, nil
}

// A Forked is one fork, or why there is none.
type Forked struct {
	View View
	Err  error
}

// Fork makes n running copies of a running sandbox. An error means that there
// is none; a Forked may have one of its own.
func (b *Box) Fork(ctx context.Context, n int, timeout time.Duration) ([]Forked, error) {
	f := b.fleet
	if err := f.quota.admit(b.team, n); err != nil {
		return nil, err
	}
	var forks []Forked
	err := b.copying(ctx, func(ctx context.Context, l *Live, rec store.Sandbox) error {
		boxes := make([]*Box, n)
		specs := make([]Spec, n)
		now := f.now()
		for i := range boxes {
			child := f.box(clone(rec, NewID(), now, timeout))
			child.mu.Lock()
			child.must(Create)
			child.mu.Unlock()
			boxes[i], specs[i] = child, f.spec(child.rec)
			specs[i].KeepEnv = true
			f.add(child)
		}
		sandboxes, errs := l.Sandbox.Fork(ctx, specs)
		forks = make([]Forked, n)
		for i, child := range boxes {
			var sb Sandbox
			err := errors.New("the backend returned too few forks")
			if i < len(sandboxes) && i < len(errs) {
				sb, err = sandboxes[i], errs[i]
			}
			forks[i].View, forks[i].Err = f.born(child, sb, err)
		}
		return nil
	})
	if err != nil && forks == nil { // f was not called: each fork gives its place back itself
		for range n {
			f.quota.release(b.team)
		}
		return nil, fmt.Errorf("fork sandbox %s: %w", b.id, err)
	}
	return forks, nil
}

// Acquire returns the VM of a sandbox for a request of the data plane. The
// request is held while the sandbox is on its way; a paused one that resumes by
// traffic is resumed if wake allows it. ErrNotFound: there is no VM and none will come.
func (f *Fleet) Acquire(ctx context.Context, id string, wake func(View) error, minimum time.Duration) (*Live, error) {
	b, err := f.Get("", id)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	allowed := false
	for {
		switch b.state {
		case Running, Copying:
			l := b.live
			b.mu.Unlock()
			return l, nil
		case Absent, Creating, Killing, Gone:
			b.mu.Unlock()
			return nil, ErrNotFound
		case Resuming:
		case Pausing, Paused:
			if v := b.view(); !v.wakes() {
				b.mu.Unlock()
				return nil, ErrNotFound
			} else if !allowed {
				b.mu.Unlock()
				if err := wake(v); err != nil {
					return nil, err
				}
				allowed = true
				b.mu.Lock()
				continue
			}
			if b.state == Paused {
				_, err := b.resume(Wake{Timeout: max(b.rec.Timeout, minimum)}) //nolint:contextcheck // it outlives its caller
				if err != nil && !errors.Is(err, ErrKilling) {
					return nil, err
				}
				b.mu.Lock()
				continue
			}
		}
		if err := b.await(ctx); err != nil {
			b.mu.Unlock()
			return nil, err
		}
	}
}

// wakes says whether traffic may resume the box: for one that pauses, it is not
// known yet whether its memory is kept.
func (v View) wakes() bool {
	return v.AutoResume && (v.State == Pausing || v.MemoryKept)
}

// clone returns a record for a fork: the same policies, its own identity.
func clone(rec store.Sandbox, id string, now time.Time, timeout time.Duration) store.Sandbox {
	rec.ID, rec.Started, rec.Timeout = id, now, timeout
	rec.Metadata, rec.Env = maps.Clone(rec.Metadata), maps.Clone(rec.Env)
	return rec
}
