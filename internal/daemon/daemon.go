// Package daemon wires a host together: it is the only package that knows all
// others. It holds what the sandboxes of one process share.
//
//	Open --VMM host, store, fault threads--> open --Clone, Fleet--> open --Close--> closed
//
// Lock order: Daemon.mu, then nothing. All exported methods may be called from
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

	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/pool"
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
	PoolLimit units.Bytes  // hard limit of each cohort's pool; 0 = what the pool can address
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

	stop    context.CancelFunc
	service sync.WaitGroup // the fault server

	mu        sync.Mutex
	templates map[string]*loaded // guarded by mu; by name
}

// loaded is a template whose memory and files are open.
type loaded struct {
	ready chan struct{} // closed when the fields below are set
	err   error
	tmpl  *template.Template
	clone sandbox.Template
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
		templates: map[string]*loaded{},
	}
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

func (l *loaded) close() error {
	var errs []error
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

// A Cohort is a trust domain with its pool; sandboxes that share one share
// dictionaries and the pool's limit.
type Cohort struct {
	pool   *pool.Pool
	cohort *dictionary.Set
	faults *pager.Server
	stop   context.CancelFunc
	train  sync.WaitGroup
}

// NewCohort returns an empty cohort. Close it after its last sandbox.
func (d *Daemon) NewCohort() (*Cohort, error) {
	p, err := pool.New(pool.Options{Limit: d.opts.PoolLimit})
	if err != nil {
		return nil, fmt.Errorf("create pool: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	c := &Cohort{pool: p, cohort: dictionary.New(dictionary.Options{}), faults: d.faults, stop: stop}
	c.train.Go(func() {
		if err := c.cohort.Run(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("train dictionaries", "err", err)
		}
	})
	return c, nil
}

// Close frees the pool and the dictionaries.
func (c *Cohort) Close() error {
	c.stop()
	c.train.Wait()
	c.cohort.Close()
	if err := c.pool.Close(); err != nil {
		return fmt.Errorf("close pool: %w", err)
	}
	return nil
}

// CloneOptions of one sandbox.
type CloneOptions struct {
	ID         string  // "" makes one up
	Template   string  // its name
	Cohort     *Cohort // nil: no compression
	NoPrefetch bool
}

// Clone starts a sandbox from a template. The caller closes it.
func (d *Daemon) Clone(ctx context.Context, o CloneOptions) (*sandbox.Sandbox, error) {
	_, t, err := d.Template(ctx, o.Template)
	if err != nil {
		return nil, err
	}
	so := sandbox.Options{ID: o.ID, Host: d.host, Template: t, Shim: d.shim, NoPrefetch: o.NoPrefetch, Log: d.log}
	if o.Cohort != nil {
		so.Compression = &sandbox.Compression{Pool: o.Cohort.pool, Cohort: o.Cohort.cohort, Faults: d.faults}
	}
	return sandbox.Start(ctx, so)
}
