package pager

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/agentzip/agentzip/internal/codec"
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

// Workers are the encoding places of a host: each has an encoder, a decoder and buffers,
// and is used by one Evict or Restore at a time. Create one set with as many places as
// cores and give it to all pagers. Safe for concurrent use.
type Workers struct {
	free chan *worker // holds a place each; a nil worker is made when first used

	mu     sync.Mutex
	made   []*worker // guarded by mu
	closed bool      // guarded by mu
}

// NewWorkers returns n places. A place costs about 1 MiB once it was used.
func NewWorkers(n int) *Workers {
	w := &Workers{free: make(chan *worker, n)}
	for range n {
		w.free <- nil
	}
	return w
}

// A worker is the scratch of one pass. Owned by the goroutine that acquired it.
type worker struct {
	encoder *codec.Encoder
	decoder *codec.Decoder // independent of encoder: it verifies
	pages   *hostmem.Mapping
	check   units.Page // what the decoder made of an entry
	batch   batch

	runs  [BatchPages]guestmem.Run
	nice  int  // of the current thread
	tuned bool // the current thread may change its niceness
}

func (ws *Workers) acquire(ctx context.Context) (*worker, error) {
	select {
	case w := <-ws.free:
		if w != nil {
			return w, nil
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	w, err := ws.newWorker()
	if err != nil {
		ws.free <- nil
	}
	return w, err
}

func (ws *Workers) newWorker() (*worker, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.closed {
		return nil, ErrClosed
	}
	pages, err := hostmem.MapAnonymous(BatchPages * units.PageSize)
	if err != nil {
		return nil, fmt.Errorf("make encoding place: %w", err)
	}
	w := &worker{encoder: codec.NewEncoder(codec.Options{}), decoder: codec.NewDecoder(), pages: pages}
	ws.made = append(ws.made, w)
	return w, nil
}

func (ws *Workers) release(w *worker) { ws.free <- w }

// Close frees the places. No pager may use them any more.
func (ws *Workers) Close() error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.closed = true
	var errs []error
	for _, w := range ws.made {
		w.encoder.Close()
		w.decoder.Close()
		errs = append(errs, w.pages.Close())
	}
	ws.made = nil
	return errors.Join(errs...)
}

// page returns the i-th page of the buffer.
func (w *worker) page(i int) *units.Page {
	return (*units.Page)(w.pages.Data[i*units.PageSize : (i+1)*units.PageSize])
}

// onThread runs fn on an operating system thread of its own at encoding priority, and
// waits. The thread ends with fn, so that its niceness troubles nobody.
func (ws *Workers) onThread(ctx context.Context, fn func(w *worker) error) error {
	w, err := ws.acquire(ctx)
	if err != nil {
		return err
	}
	defer ws.release(w)
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread dies with this goroutine
		w.nice = 0
		// Without CAP_SYS_NICE a thread that became nice could not come back for the
		// time it holds a lock: then it stays as it is.
		w.tuned = hostmem.SetNice(0, niceLocked) == nil
		w.setNice(niceEncode)
		done <- fn(w)
	}()
	return <-done
}

func (w *worker) setNice(n int) {
	if w.tuned && w.nice != n {
		_ = hostmem.SetNice(0, n) // worked a moment ago; a failure costs time only
		w.nice = n
	}
}

// lock takes p.mu at a priority at which the holder is not kept from a core.
func (w *worker) lock(p *Pager) {
	w.setNice(niceLocked)
	p.mu.Lock()
}

func (w *worker) unlock(p *Pager) {
	p.mu.Unlock()
	w.setNice(niceEncode)
}

// makeWay lets waiting faults go first. Caller holds mu, and holds it again after.
func (w *worker) makeWay(p *Pager) {
	if p.waiting.Load() == 0 {
		return
	}
	p.mu.Unlock()
	for spin := 0; p.waiting.Load() > 0 && spin < 1000; spin++ {
		runtime.Gosched()
	}
	p.mu.Lock()
}
