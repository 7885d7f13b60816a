package pager

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// Niceness of the thread of a pass: low while it encodes, so that vCPUs and faults go
// first; high while it holds a pager's mutex, so that no fault waits for a thread that
// waits for a core (priority inversion).
const (
	niceEncode = 10
	niceLocked = -10
)

// Workers are the places of a host at which pages are encoded or restored in bulk: each
// has a codec and a buffer, and is used by one Evict or Restore at a time. Restores have
// places of their own, because a call that begins must not wait for the end of another
// sandbox's pass. Safe for concurrent use.
type Workers struct {
	encoding  chan *worker // a token for each free place; nil: not made yet
	frozen    chan *worker // the same, for passes while a guest stands still
	restoring turns
	restores  atomic.Int32 // Restores that run or wait: encoding stands back
	plain     bool         // immutable; in tests: passes run on their caller's thread, and none changes its niceness

	mu     sync.Mutex
	made   []*worker // guarded by mu
	closed bool      // guarded by mu
}

// NewWorkers returns n places for encoding, n for restoring and n for guests that stand still. A place costs about
// 1 MiB from its first use on.
func NewWorkers(n int) *Workers {
	ws := &Workers{encoding: make(chan *worker, n), frozen: make(chan *worker, n)}
	ws.restoring.free = make([]*worker, n)
	for range n {
		ws.encoding <- nil
		ws.frozen <- nil
	}
	return ws
}

// shared is the set of pagers that were given none: as many places as cores. More passes
// at once would only make each of them slower to cancel.
var shared = sync.OnceValue(func() *Workers { return NewWorkers(runtime.NumCPU()) })

// A worker is the scratch of one pass or restore. Owned by the goroutine that took it.
type worker struct {
	codec *cohort.Worker // loads only, at a place for restoring
	pages *hostmem.Mapping
	batch batch

	runs  [BatchPages]guestmem.Run
	rest  int  // niceness of the current thread outside locks
	nice  int  // its niceness now
	tuned bool // it may change its niceness

	hurried atomic.Bool // its pass was cancelled: its thread stays at niceLocked

	held time.Time // since when it holds a pager's mutex
}

// takeEncoding waits for one of the places for encoding.
func (ws *Workers) takeEncoding(ctx context.Context, places chan *worker) (*worker, error) {
	select {
	case w := <-places:
		if w != nil {
			return w, nil
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	w, err := ws.newWorker(true)
	if err != nil {
		places <- nil
	}
	return w, err
}

func (ws *Workers) newWorker(encodes bool) (*worker, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.closed {
		return nil, ErrClosed
	}
	pages, err := hostmem.MapAnonymous((BatchPages + 1) * units.PageSize)
	if err != nil {
		return nil, fmt.Errorf("make a place for bulk work: %w", err)
	}
	w := &worker{pages: pages}
	if encodes {
		w.codec = cohort.NewWorker()
	} else {
		w.codec = cohort.NewLoader()
	}
	ws.made = append(ws.made, w)
	return w, nil
}

// Close frees the places. No pager may use them any more.
func (ws *Workers) Close() error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.closed = true
	var errs []error
	for _, w := range ws.made {
		w.codec.Close()
		errs = append(errs, w.pages.Close())
	}
	ws.made = nil
	return errors.Join(errs...)
}

// page returns the i-th page of the buffer; BatchPages is one beyond the batch's.
func (w *worker) page(i int) *units.Page {
	return (*units.Page)(w.pages.Data[i*units.PageSize : (i+1)*units.PageSize])
}

// encode runs fn at a place for encoding, on an operating system thread of its own at
// encoding priority, and waits. The thread ends with fn, so that its niceness troubles
// nobody. A panic of fn becomes an error. frozen: a guest stands still meanwhile; then it has a
// place of its own, and does not stand back.
func (ws *Workers) encode(ctx context.Context, frozen bool, fn func(w *worker) error) error {
	places, nice := ws.encoding, niceEncode
	if frozen {
		places, nice = ws.frozen, niceLocked
	}
	w, err := ws.takeEncoding(ctx, places)
	if err != nil {
		return err
	}
	defer func() { places <- w }()
	if ws.plain {
		return fn(w)
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread dies with this goroutine
		defer func() {
			if r := recover(); r != nil {
				done <- fmt.Errorf("%w: %v\n%s", errPanic, r, debug.Stack())
			}
		}()
		// Without CAP_SYS_NICE a thread that became nice could not come back for the
		// time it holds a lock: so the first step is up, and without it there is none.
		w.rest, w.nice, w.tuned = nice, 0, true
		w.setNice(niceLocked)
		w.setNice(nice)
		done <- fn(w)
	}()
	return <-done
}

// errPanic: a pass ran into a bug of ours. The states of its batch are unknown.
var errPanic = errors.New("panic in a pass")

// restore runs fn at a place for restoring, on the caller's goroutine, when it is p's turn.
func (ws *Workers) restore(ctx context.Context, p *Pager, class Class, fn func(w *worker) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	w, err := ws.restoring.take(ctx, p, class)
	if err != nil {
		return err
	}
	if w == nil {
		w, err = ws.newWorker(false)
	}
	defer func() { ws.restoring.give(w) }()
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	w.rest, w.nice, w.tuned = 0, 0, !ws.plain
	return fn(w)
}

// standBackFor bounds for how long a batch of a pass stands back for restores: its pages are
// protected all the while. Halved, a storm of restores has the encoder on its core; doubled,
// a page that the guest writes meanwhile is more likely encoded in vain.
const standBackFor = 5 * time.Millisecond

// standBack waits while restores run, at most for what is left of standBackFor. ctx ends it.
func (ws *Workers) standBack(ctx context.Context, left *time.Duration) {
	const step = 100 * time.Microsecond // and so much is added to the time of a cancellation
	for ws.restores.Load() > 0 && *left > 0 && ctx.Err() == nil {
		*left -= step
		time.Sleep(step)
	}
}

func (w *worker) setNice(n int) {
	if w.hurried.Load() {
		n = niceLocked
	}
	if !w.tuned || w.nice == n {
		return
	}
	if hostmem.SetNice(0, n) != nil {
		w.tuned = false // costs time only
		return
	}
	w.nice = n
}

// locked runs fn with p.mu held, at a priority at which the holder is not kept from a core.
func (w *worker) locked(p *Pager, fn func() error) error {
	w.setNice(niceLocked)
	defer w.setNice(w.rest)
	p.mu.Lock()
	w.held = time.Now()
	defer func() {
		p.mu.Unlock()
		p.stats.held.record(time.Since(w.held))
	}()
	return fn()
}

// makeWay lets waiting faults go first. Caller holds mu, and holds it again after.
func (w *worker) makeWay(p *Pager) {
	if p.waiting.Load() == 0 {
		return
	}
	p.mu.Unlock()
	p.stats.held.record(time.Since(w.held))
	for spin := 0; p.waiting.Load() > 0 && spin < 1000; spin++ {
		runtime.Gosched()
	}
	p.mu.Lock()
	w.held = time.Now()
}
