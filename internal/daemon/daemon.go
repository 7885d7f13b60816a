// Package daemon wires a host together: it is the only package that knows all
// others. It holds what the sandboxes of one process share.
//
//	Open --VMM host, store, fault threads--> open --Clone, Fleet--> open --Close--> closed
//
// Lock order: Daemon.mu, then a pool's own. All exported methods may be called from
// any goroutine, Close once and last.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// shimFile is the shim's name in the folder of the binaries.
const shimFile = "agentzip-shim.so"

// Options of a Daemon.
type Options struct {
	StateDir  string       // "" = $AGENTZIP_STATE_DIR or the default
	LibDir    string       // folder of the shim and the guest agent
	PoolLimit units.Bytes  // hard limit of each cohort's pool; 0 = what the pool can address (4 GiB)
	Log       *slog.Logger // nil discards
}

// A Daemon is one host's shared parts.
type Daemon struct {
	opts   Options         // immutable
	log    *slog.Logger    // immutable
	host   *vmm.Host       // immutable
	store  *template.Store // immutable
	faults *pager.Server   // immutable
	shim   string          // immutable
	memory *shortage       // immutable

	stop    context.CancelFunc
	service sync.WaitGroup // the fault server, the watch over the host's memory

	mu        sync.Mutex
	templates map[string]*loaded // guarded by mu; by name
	cohorts   map[*Cohort]bool   // guarded by mu; those that live
}

// loaded is a template whose memory and files are open.
type loaded struct {
	ready chan struct{} // closed when the fields below are set
	err   error
	tmpl  *template.Template
	clone sandbox.Template

	public  sync.Mutex       // held while library is opened
	library *library.Library // guarded by public; nil until a cohort needs it
}

// Open prepares the host. It needs root and sweeps what dead processes left.
func Open(o Options) (*Daemon, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	shim := filepath.Join(o.LibDir, shimFile)
	if _, err := os.Stat(shim); err != nil {
		return nil, fmt.Errorf("open daemon: no %s in %s: run `make build`, or set AGENTZIP_LIBDIR to the folder that has it", shimFile, o.LibDir)
	}
	store, err := template.Open(o.StateDir)
	if err != nil {
		return nil, fmt.Errorf("open daemon: %w", err)
	}
	if err := store.Sweep(); err != nil {
		o.Log.Warn("sweep the template store", "err", err)
	}
	host, err := vmm.OpenHost(vmm.HostOptions{StateDir: store.Dir(), Logger: o.Log})
	if err != nil {
		return nil, fmt.Errorf("open daemon: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	d := &Daemon{
		opts: o, log: o.Log, host: host, store: store, shim: shim, stop: stop,
		faults:    pager.NewServer(pager.ServerOptions{}),
		templates: map[string]*loaded{}, cohorts: map[*Cohort]bool{},
	}
	d.memory = newShortage(lookAtHost, d.poolUsed, o.Log)
	d.service.Go(func() { d.memory.run(ctx) })
	d.service.Go(func() {
		if err := d.faults.Run(ctx); err != nil {
			d.log.Error("serve faults", "err", err)
		}
	})
	return d, nil
}

// Store returns the template store.
func (d *Daemon) Store() *template.Store { return d.store }

// Host returns the owner of the VMMs, for builds of templates.
func (d *Daemon) Host() *vmm.Host { return d.host }

// Close ends everything: sandboxes that still run are killed, and nothing is left.
func (d *Daemon) Close() error {
	errs := []error{d.host.Close()}
	d.stop()
	d.service.Wait()
	d.mu.Lock()
	templates := d.templates
	d.templates = nil
	d.mu.Unlock()
	for _, l := range templates {
		<-l.ready // a load under way that fails takes mu first
		if l.err == nil {
			errs = append(errs, l.close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close daemon: %w", err)
	}
	return nil
}

// Template verifies and loads a template; later calls share its memory.
func (d *Daemon) Template(ctx context.Context, name string) (*template.Template, sandbox.Template, error) {
	d.mu.Lock()
	if d.templates == nil {
		d.mu.Unlock()
		return nil, sandbox.Template{}, fmt.Errorf("load template %s: the daemon is closed", name)
	}
	l := d.templates[name]
	first := l == nil
	if first {
		l = &loaded{ready: make(chan struct{})}
		d.templates[name] = l
	}
	d.mu.Unlock()
	if first {
		l.err = l.load(ctx, d.store, name)
		if l.err != nil { // the next caller tries again
			d.mu.Lock()
			delete(d.templates, name)
			d.mu.Unlock()
		}
		close(l.ready)
	}
	select {
	case <-l.ready:
		return l.tmpl, l.clone, l.err
	case <-ctx.Done():
		return nil, sandbox.Template{}, ctx.Err()
	}
}

func (l *loaded) load(ctx context.Context, store *template.Store, name string) (err error) {
	if l.tmpl, err = store.Load(ctx, name); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	l.clone = sandbox.Template{Name: name, Hardware: l.tmpl.Hardware}
	if l.clone.Image, err = l.tmpl.OpenMemory(); err != nil {
		return err
	}
	if l.clone.Root, err = os.Open(l.tmpl.RootFile()); err != nil {
		return fmt.Errorf("open root image of template %s: %w", name, err)
	}
	if l.clone.State, err = os.Open(l.tmpl.StateFile()); err != nil {
		return fmt.Errorf("open device state of template %s: %w", name, err)
	}
	if l.clone.Disk, err = os.Open(l.tmpl.DiskFile()); err != nil {
		return fmt.Errorf("open disk of template %s: %w", name, err)
	}
	return nil
}

// library returns the public pages of a template, opened once.
func (d *Daemon) library(ctx context.Context, name string) (*library.Library, error) {
	if _, _, err := d.Template(ctx, name); err != nil {
		return nil, err
	}
	d.mu.Lock()
	l := d.templates[name]
	d.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("open public pages of template %s: the daemon is closed", name)
	}
	l.public.Lock()
	defer l.public.Unlock()
	if l.library == nil {
		lib, err := l.tmpl.OpenLibrary(ctx, l.clone.Image, l.clone.Root)
		if err != nil {
			return nil, err
		}
		l.library = lib
	}
	return l.library, nil
}

func (l *loaded) close() error {
	var errs []error
	if l.library != nil {
		errs = append(errs, l.library.Close())
	}
	for _, f := range []*os.File{l.clone.Root, l.clone.State, l.clone.Disk} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if l.clone.Image != nil {
		errs = append(errs, l.clone.Image.Close())
	}
	if l.tmpl != nil {
		errs = append(errs, l.tmpl.Close())
	}
	return errors.Join(errs...)
}

// A Cohort is a trust domain of siblings: they run from one template and share what its
// isolation lets them.
type Cohort struct {
	daemon   *Daemon
	template string
	cohort   *cohort.Cohort
	shared   *sandbox.Compression
	stop     context.CancelFunc
	tend     sync.WaitGroup // trains and compacts
}

// CohortOptions of a new cohort.
type CohortOptions struct {
	Template  string // its name
	Isolation cohort.Isolation
	Without   prefetch.Sources // of guesses that are off
}

// compactEvery is how often a cohort looks for memory to give back. A look costs
// microseconds when there is none; at ten times that a dead sandbox's pages stay a minute.
const compactEvery = 5 * time.Second

// compactBudget bounds what one look moves: some 4 ms of one core.
const compactBudget = 4 * units.MiB

// NewCohort returns an empty cohort. Close it after its last sandbox.
func (d *Daemon) NewCohort(ctx context.Context, o CohortOptions) (*Cohort, error) {
	lib, err := d.library(ctx, o.Template)
	if err != nil {
		return nil, fmt.Errorf("create cohort: %w", err)
	}
	kept, err := cohort.New(cohort.Options{Library: lib, Limit: d.opts.PoolLimit, Isolation: o.Isolation})
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx)) // lives until Close
	c := &Cohort{daemon: d, template: o.Template, cohort: kept, stop: stop}
	d.mu.Lock()
	d.cohorts[c] = true
	d.mu.Unlock()
	c.shared = &sandbox.Compression{Cohort: kept, Faults: d.faults, History: prefetch.NewHistory(prefetch.Options{Without: o.Without}), Host: &d.memory.gauge}
	c.tend.Go(func() {
		if err := kept.Run(run); err != nil && run.Err() == nil {
			d.log.Warn("train dictionaries", "err", err)
		}
	})
	c.tend.Go(func() {
		tick := time.NewTicker(compactEvery)
		defer tick.Stop()
		for {
			select {
			case <-run.Done():
				return
			case <-tick.C:
				kept.Compact(run, compactBudget)
			}
		}
	})
	return c, nil
}

// Stats returns what the cohort keeps.
func (c *Cohort) Stats() cohort.Stats { return c.cohort.Stats() }

// Close frees everything that the cohort kept.
func (c *Cohort) Close() error {
	c.daemon.mu.Lock()
	delete(c.daemon.cohorts, c)
	c.daemon.mu.Unlock()
	c.stop()
	c.tend.Wait()
	return c.cohort.Close()
}

// poolUsed returns the share of its limit that the fullest pool has used.
func (d *Daemon) poolUsed() (most float64) {
	limit := d.opts.PoolLimit
	if limit <= 0 || limit > poolMost {
		limit = poolMost
	}
	d.mu.Lock() // no cohort is closed meanwhile
	defer d.mu.Unlock()
	for c := range d.cohorts {
		most = max(most, float64(c.cohort.Pool().Footprint())/float64(limit))
	}
	return most
}

// CloneOptions of one sandbox.
type CloneOptions struct {
	ID         string  // "" makes one up
	Template   string  // its name; "" is the cohort's
	Cohort     *Cohort // of the same template; nil: no compression
	NoPrefetch bool
	Settings   *guestlink.Settings // what the guest is told about itself; nil: nothing, and no network
}

// Clone starts a sandbox from a template. The caller closes it. An error that wraps a
// *policy.Refusal says that the host is short of memory: nothing was started.
func (d *Daemon) Clone(ctx context.Context, o CloneOptions) (*sandbox.Sandbox, error) {
	if o.Template == "" && o.Cohort != nil {
		o.Template = o.Cohort.template
	}
	if o.Cohort != nil && o.Cohort.template != o.Template {
		return nil, fmt.Errorf("clone template %s: the cohort is of template %s: its pages refer to that one's", o.Template, o.Cohort.template)
	}
	_, t, err := d.Template(ctx, o.Template)
	if err != nil {
		return nil, err
	}
	if err := d.memory.admit(); err != nil {
		return nil, fmt.Errorf("clone template %s: %w", o.Template, err)
	}
	so := sandbox.Options{ID: o.ID, Host: d.host, Template: t, Shim: d.shim, NoPrefetch: o.NoPrefetch, Settings: o.Settings, Log: d.log}
	if o.Cohort != nil {
		so.Compression = o.Cohort.shared
	}
	sb, err := sandbox.Start(ctx, so)
	if err != nil {
		d.memory.started(nil)
		return nil, err
	}
	d.memory.started(sb)
	return sb, nil
}
