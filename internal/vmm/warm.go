package vmm

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// A Warm is a set of things that are dear to make and are kept ready: machines prepared or
// loaded, with what belongs to them. It has a goroutine that makes as many as are missing, one
// at a time, and looks after those that wait.
//
//	missing --Make--> ready --Take--> the caller's
//	                  ready --no longer Alive, or Close--> Drop
//
// Safe for concurrent use. Lock order: Warm.mu, then nothing; it is not held across Make,
// Drop or Alive.
type Warm[T any] struct {
	o WarmOptions[T] // immutable

	cancel context.CancelFunc
	ended  chan struct{} // closed when the goroutine has ended
	poke   chan struct{} // capacity 1: something was taken, or the target has changed

	mu     sync.Mutex
	ready  []T  // guarded by mu; the oldest first
	target int  // guarded by mu
	closed bool // guarded by mu
	takes  WarmStats
}

// WarmOptions of a Warm. Make and Drop are required.
type WarmOptions[T any] struct {
	Target int                                  // how many are kept ready
	Make   func(ctx context.Context) (T, error) // may take long; gives up when ctx ends
	Drop   func(T)                              // ends one that nobody took
	Alive  func(T) bool                         // nil: they live until they are dropped

	Log *slog.Logger // nil discards
}

// WarmStats counts.
type WarmStats struct {
	Ready  int // waiting now
	Taken  int // ever given out
	Missed int // asked for while none was ready
	Failed int // that could not be made, or died while they waited
}

const (
	// warmLook is how often those that wait are looked at. A dead one that is given out costs
	// its taker a cold start; doubled, that happens twice as often.
	warmLook = 2 * time.Second
	// warmRetry is the pause after a failure: a host that cannot make one must not be
	// kept busy with trying.
	warmRetry = time.Second
)

// NewWarm begins to make what is to be ready. Close it.
func NewWarm[T any](o WarmOptions[T]) *Warm[T] {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:gosec // G118: Close calls it
	w := &Warm[T]{o: o, cancel: cancel, ended: make(chan struct{}), poke: make(chan struct{}, 1), target: o.Target}
	go w.keep(ctx)
	return w
}

// Take returns one that is ready; false: there is none now, and the caller makes its own.
// It never waits.
func (w *Warm[T]) Take() (T, bool) {
	for {
		w.mu.Lock()
		if len(w.ready) == 0 || w.closed {
			w.takes.Missed++
			w.mu.Unlock()
			var none T
			return none, false
		}
		t := w.ready[0]
		w.ready = append(w.ready[:0:0], w.ready[1:]...)
		w.mu.Unlock()
		w.wake()
		if w.o.Alive != nil && !w.o.Alive(t) {
			w.lost(t)
			continue
		}
		w.mu.Lock()
		w.takes.Taken++
		w.mu.Unlock()
		return t, true
	}
}

// SetTarget changes how many are kept ready; those too many are dropped. A host that is short
// of memory sets 0.
func (w *Warm[T]) SetTarget(n int) {
	w.mu.Lock()
	w.target = n
	w.mu.Unlock()
	w.wake()
}

// Stats returns the counts.
func (w *Warm[T]) Stats() WarmStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.takes
	s.Ready = len(w.ready)
	return s
}

// Close drops those that nobody took and returns when nothing of the Warm is left. A second
// Close does nothing.
func (w *Warm[T]) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.cancel()
	<-w.ended
	return nil
}

func (w *Warm[T]) wake() {
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

func (w *Warm[T]) lost(t T) {
	w.mu.Lock()
	w.takes.Failed++
	w.mu.Unlock()
	w.o.Drop(t)
}

// keep runs until ctx ends.
func (w *Warm[T]) keep(ctx context.Context) {
	defer close(w.ended)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			w.shrink(0)
			return
		case <-w.poke:
		case <-timer.C:
		}
		timer.Reset(w.fill(ctx))
	}
}

// fill brings the number of those ready to the target and returns when to look again.
func (w *Warm[T]) fill(ctx context.Context) time.Duration {
	w.bury()
	for ctx.Err() == nil {
		w.mu.Lock()
		target, have := w.target, len(w.ready)
		w.mu.Unlock()
		if have >= target {
			w.shrink(target)
			break
		}
		t, err := w.o.Make(ctx)
		if err != nil {
			if ctx.Err() == nil {
				w.o.Log.Warn("keep one ready", "err", fmt.Errorf("make it: %w", err))
				w.mu.Lock()
				w.takes.Failed++
				w.mu.Unlock()
			}
			return warmRetry
		}
		w.mu.Lock()
		w.ready = append(w.ready, t)
		w.mu.Unlock()
	}
	return warmLook
}

// bury drops those that died.
func (w *Warm[T]) bury() {
	if w.o.Alive == nil {
		return
	}
	w.mu.Lock()
	all := append([]T(nil), w.ready...)
	w.mu.Unlock()
	for i, t := range all {
		if w.o.Alive(t) {
			continue
		}
		w.mu.Lock()
		// Only this goroutine adds, and Take takes from the front: if it is still there it is
		// as far from the end as it was.
		at := len(w.ready) - (len(all) - i)
		mine := at >= 0
		if mine {
			w.ready = append(w.ready[:at:at], w.ready[at+1:]...)
			all = append(all[:i:i], all[i+1:]...)
		}
		w.mu.Unlock()
		if mine {
			w.lost(t)
			w.bury()
			return
		}
	}
}

// shrink drops the oldest until n are left.
func (w *Warm[T]) shrink(n int) {
	for {
		w.mu.Lock()
		if len(w.ready) <= n {
			w.mu.Unlock()
			return
		}
		t := w.ready[0]
		w.ready = append(w.ready[:0:0], w.ready[1:]...)
		w.mu.Unlock()
		w.o.Drop(t)
	}
}
