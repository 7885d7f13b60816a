package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if given := flag.Lookup("rapid.checks"); given != nil && given.Value.String() == given.DefValue {
		_ = given.Value.Set("40") // each check starts a VMM: 80 ms
	}
	code := guestmemtest.Main(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
	}
	os.Exit(code)
}

// A rig is a fake VMM with a pager, and what they need.
type rig struct {
	t      testing.TB
	im     *guestmem.Image
	vm     *guestmemtest.VM
	guest  *guestmem.Guest
	cohort *cohort.Cohort
	pager  *Pager
	server *Server // nil until serve

	mu     sync.Mutex
	fatal  []error // guarded by mu
	closed bool
	leaky  bool // the pool was damaged on purpose
	shared bool // the cohort is another rig's, which was made before
}

// newRig starts a VMM with n channels; nobody serves its faults yet.
func newRig(t testing.TB, frames, n int, tune ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, im: guestmemtest.Image(t, frames)}
	var env []string
	if _, bench := t.(*testing.B); !bench {
		env = append(env, "FAKEVMM_NICE=15")
	}
	r.vm = guestmemtest.Start(t, r.im, n, env...)
	var err error
	if r.guest, err = guestmem.Attach(r.vm.Shim, r.vm.PID, r.im); err != nil {
		t.Fatal(err)
	}
	r.cohort = newCohort(t, r.im, cohort.Options{})
	o := Options{Name: "test", Guest: r.guest, Image: r.im, Cohort: r.cohort, OnFatal: func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.fatal = append(r.fatal, err)
	}}
	for _, f := range tune {
		f(&o)
	}
	if r.pager, err = New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

// newCohort returns a cohort over an image, without a root image.
func newCohort(t testing.TB, im *guestmem.Image, o cohort.Options) *cohort.Cohort {
	t.Helper()
	root, err := os.Create(filepath.Join(t.TempDir(), "root"))
	if err != nil {
		t.Fatal(err)
	}
	o.Library, err = library.Build(context.Background(), im, root)
	if err != nil {
		t.Fatal(err)
	}
	c, err := cohort.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(o.Library.Close(), root.Close()); err != nil {
			t.Error(err)
		}
	})
	return c
}

// useCohort gives the rig another cohort, before anything is kept in its own.
func (r *rig) useCohort(o cohort.Options) {
	r.t.Helper()
	r.cohort.Leave(r.pager)
	if err := r.cohort.Close(); err != nil {
		r.t.Fatal(err)
	}
	r.cohort = newCohort(r.t, r.im, o)
	r.pager.cohort = r.cohort
	r.cohort.Join(r.pager)
}

// flipBit damages the entry of an evicted frame.
func (r *rig) flipBit(f units.Frame) {
	r.t.Helper()
	reader := r.cohort.Pool().NewReader()
	defer reader.Close()
	reader.Pin()
	defer reader.Unpin()
	enc, err := reader.View(pool.Handle(r.pager.table.load(f).ref()))
	if err != nil {
		r.t.Fatal(err)
	}
	enc.Data[len(enc.Data)/2] ^= 4
}

// close ends everything in order and checks that the pool got all its entries back.
func (r *rig) close() {
	if r.closed {
		return
	}
	r.closed = true
	r.vm.Kill()
	if r.server != nil {
		r.server.Remove(r.pager)
	}
	if err := r.pager.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.guest.Close(); err != nil {
		r.t.Error(err)
	}
	if r.shared {
		return
	}
	if got := r.cohort.Stats().Pool; got.Entries != 0 && !r.leaky {
		r.t.Errorf("%d pool entries were not given back", got.Entries)
	}
	if err := r.cohort.Close(); err != nil {
		r.t.Error(err)
	}
}

// serve starts a server for the rig.
func (r *rig) serve() *rig {
	r.t.Helper()
	if r.server == nil {
		r.server = runServer(r.t)
	}
	if err := r.server.Add(r.pager); err != nil {
		r.t.Fatal(err)
	}
	return r
}

func runServer(t testing.TB) *Server {
	t.Helper()
	s := NewServer(ServerOptions{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// fatals returns what OnFatal was told, after waiting for at least n calls.
func (r *rig) fatals(n int) []error {
	for range 500 {
		r.mu.Lock()
		got := r.fatal
		r.mu.Unlock()
		if len(got) >= n {
			return got
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// unharmed fails the test if the sandbox died.
func (r *rig) unharmed() {
	r.t.Helper()
	if err := r.pager.Err(); err != nil {
		r.t.Fatalf("the sandbox died: %v", err)
	}
}

func (r *rig) evict() EvictResult {
	r.t.Helper()
	res, err := r.pager.Evict(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func (r *rig) read(f units.Frame) *units.Page {
	r.t.Helper()
	p, err := r.vm.Channels[0].Read(f, false)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) write(f units.Frame, p *units.Page) {
	r.t.Helper()
	if err := r.vm.Channels[0].Write(f, p, false); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) poke(f units.Frame, v uint64) {
	r.t.Helper()
	if err := r.vm.Channels[0].Poke(f, 64, v); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) state(f units.Frame) tag { return r.pager.table.load(f).tag() }

// hammer lets every channel hammer its share of all frames, while fn runs over and over.
func (r *rig) hammer(frames int, d time.Duration, fn func(ctx context.Context) error) (rounds uint64) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg, vm sync.WaitGroup
	n := frames / len(r.vm.Channels)
	for i, c := range r.vm.Channels {
		vm.Go(func() {
			a, err := c.Hammer(units.Frame(i*n), n, d)
			switch {
			case err != nil:
				r.t.Errorf("thread %d: %v", i, err)
			case a.Bad != 0:
				r.t.Errorf("thread %d read %d wrong pages, the first of them frame %d (now %v)", i, a.Bad, a.Frame, r.state(units.Frame(a.Frame)))
			}
			r.mu.Lock()
			rounds += a.Count
			r.mu.Unlock()
		})
	}
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := fn(ctx); err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
				r.t.Error(err)
				return
			}
		}
	})
	vm.Wait()
	cancel()
	wg.Wait()
	r.unharmed()
	return rounds
}

// hooked calls a function around an operation on the guest's memory: what a race would do
// at that moment.
type hooked struct {
	Memory
	afterScan, beforeProtect, beforeRead, afterRead, beforeDrop func()

	everyScan func() // after a whole scan
}

func (h *hooked) call(f *func()) {
	if fn := *f; fn != nil {
		*f = nil
		fn()
	}
}

// Scan calls afterScan when it has found the first page.
func (h *hooked) Scan(visit func(r guestmem.Run, swapped bool) bool) error {
	err := h.Memory.Scan(func(r guestmem.Run, swapped bool) bool {
		h.call(&h.afterScan)
		return visit(r, swapped)
	})
	if h.everyScan != nil {
		h.everyScan()
	}
	return err
}

func (h *hooked) Protect(r guestmem.Run) error {
	h.call(&h.beforeProtect)
	return h.Memory.Protect(r)
}

func (h *hooked) Read(dst []byte, runs []guestmem.Run) error {
	h.call(&h.beforeRead)
	err := h.Memory.Read(dst, runs)
	h.call(&h.afterRead)
	return err
}

func (h *hooked) Drop(runs []guestmem.Run) error {
	h.call(&h.beforeDrop)
	return h.Memory.Drop(runs)
}

func hook(h *hooked) func(*Options) {
	return func(o *Options) {
		h.Memory = o.Guest
		o.Guest = h
	}
}

// Contents that the pager or an encoder treats apart.
func zeroPage() *units.Page { return new(units.Page) }

func randomPage(seed uint64) *units.Page {
	p := new(units.Page)
	var key [32]byte
	binary.NativeEndian.PutUint64(key[:], seed)
	_, _ = rand.NewChaCha8(key).Read(p[:])
	return p
}

func textPage(seed uint64) *units.Page {
	p := new(units.Page)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range p {
		p[i] = "etaoin shrdlu\n"[r.IntN(14)]
	}
	return p
}

func deltaPage(f units.Frame, seed uint64) *units.Page {
	p := guestmemtest.Base(f)
	binary.NativeEndian.PutUint64(p[seed%500*8:], seed|1)
	return p
}

// waitForEvent waits until a thread of the guest waits for a fault to be served.
func waitForEvent(t *testing.T, r *rig) {
	t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(r.guest.PollFD()), Events: unix.POLLIN}}, 5000)
	if err != nil || n != 1 {
		t.Errorf("no fault came: %d, %v", n, err)
	}
}
