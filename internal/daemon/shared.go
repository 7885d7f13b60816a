package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/vmm"
)

const (
	// cohortRest is how long a cohort without a sandbox is kept. Longer: its memory
	// (some MB, and its warm sandboxes) stays; shorter: a client that makes one
	// sandbox after the other starts cold each time.
	cohortRest = 5 * time.Minute
	// warmDomains is how many cohorts have warm sandboxes. Each sandbox is an idle
	// VMM of some 40 MB.
	warmDomains = 3
)

// A domain is what the sandboxes of one cohort have in common.
type domain struct {
	trust    string // team and job
	template string
}

// shared is a cohort and what waits for its next sandbox.
type shared struct {
	ready  chan struct{} // closed when cohort, warm and err are set
	cohort *Cohort       // nil without compression
	warm   *vmm.Warm[*sandbox.Sandbox]
	err    error

	users int         // guarded by Backend.mu; sandboxes that are not warm
	rest  *time.Timer // guarded by Backend.mu; ends the cohort; nil while it has users
}

// join returns the cohort of a domain, which is made for its first sandbox, and
// counts its caller in until leave.
func (b *Backend) join(ctx context.Context, at domain) (s *shared, leave func(), err error) {
	b.mu.Lock()
	if b.cohorts == nil {
		b.mu.Unlock()
		return nil, nil, errors.New("the backend is closed")
	}
	s = b.cohorts[at]
	first := s == nil
	if first {
		s = &shared{ready: make(chan struct{})}
		b.cohorts[at] = s
	}
	s.users++
	if s.rest != nil {
		s.rest.Stop()
		s.rest = nil
	}
	cooled := b.heat(at)
	b.mu.Unlock()
	if first {
		s.err = b.open(context.WithoutCancel(ctx), at, s)
		close(s.ready)
	}
	<-s.ready
	for _, c := range cooled {
		c.chill(0)
	}
	leave = sync.OnceFunc(func() { b.leave(at, s) })
	if s.err != nil {
		leave()
		return nil, nil, s.err
	}
	warm := b.opts.Warm
	if b.daemon.memory.gauge.Level() > policy.Normal {
		warm = 0 // those that wait are what is given up first
	}
	s.chill(warm)
	return s, leave, nil
}

// open makes the cohort and begins to keep sandboxes of it ready.
func (b *Backend) open(ctx context.Context, at domain, s *shared) error {
	if b.opts.Compression {
		c, err := b.daemon.NewCohort(ctx, CohortOptions{Template: at.template, Isolation: b.opts.Isolation})
		if err != nil {
			return err
		}
		s.cohort = c
	}
	if b.opts.Warm == 0 {
		return nil
	}
	s.warm = vmm.NewWarm(vmm.WarmOptions[*sandbox.Sandbox]{
		Log: b.daemon.log,
		Make: func(ctx context.Context) (*sandbox.Sandbox, error) {
			return b.spare(ctx, CloneOptions{Template: at.template, Cohort: s.cohort})
		},
		Drop:  func(sb *sandbox.Sandbox) { drop(b.daemon.log, sb) },
		Alive: func(sb *sandbox.Sandbox) bool { return sb.Cause() == nil },
	})
	return nil
}

func drop(log *slog.Logger, sb *sandbox.Sandbox) {
	if err := sb.Close(); err != nil {
		log.Error("end a sandbox that was kept ready", "err", err)
	}
}

// chill sets how many sandboxes are kept ready.
func (s *shared) chill(n int) {
	<-s.ready
	if s.warm != nil {
		s.warm.SetTarget(n)
	}
}

// heat makes at the domain used last and returns those that are no longer among
// the last ones. Caller holds mu.
func (b *Backend) heat(at domain) (cooled []*shared) {
	b.recent = slices.DeleteFunc(b.recent, func(d domain) bool { return d == at })
	b.recent = slices.Insert(b.recent, 0, at)
	for len(b.recent) > warmDomains {
		last := b.recent[len(b.recent)-1]
		b.recent = b.recent[:len(b.recent)-1]
		if s := b.cohorts[last]; s != nil {
			cooled = append(cooled, s)
		}
	}
	return cooled
}

// leave counts a sandbox out; a cohort that has none for a while ends.
func (b *Backend) leave(at domain, s *shared) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.users--
	if s.users > 0 || b.cohorts[at] != s {
		return
	}
	if s.err != nil { // the next one tries again
		delete(b.cohorts, at)
		return
	}
	s.rest = time.AfterFunc(cohortRest, func() { b.end(at, s) })
}

func (b *Backend) end(at domain, s *shared) {
	b.mu.Lock()
	if s.users > 0 || b.cohorts[at] != s {
		b.mu.Unlock()
		return
	}
	delete(b.cohorts, at)
	b.recent = slices.DeleteFunc(b.recent, func(d domain) bool { return d == at })
	b.mu.Unlock()
	if err := s.close(); err != nil {
		b.daemon.log.Error("close cohort", "err", err)
	}
}

func (s *shared) close() error {
	var errs []error
	if s.warm != nil {
		errs = append(errs, s.warm.Close())
	}
	if s.cohort != nil {
		errs = append(errs, s.cohort.Close())
	}
	return errors.Join(errs...)
}

// Prewarm begins to keep sandboxes ready for the first client.
func (b *Backend) Prewarm(ctx context.Context, trust, template string) error {
	if b.opts.Warm == 0 {
		return nil
	}
	_, leave, err := b.join(ctx, domain{trust, template})
	if err != nil {
		return err
	}
	leave()
	return nil
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
		b.mu.Lock()
		if s.rest != nil {
			s.rest.Stop()
		}
		b.mu.Unlock()
		if s.err == nil {
			errs = append(errs, s.close())
		}
	}
	return errors.Join(errs...)
}
