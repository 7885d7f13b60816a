package vmm

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// thing is what a test keeps warm.
type thing struct{ dead, dropped atomic.Bool }

// warmThings keeps n ready; making one takes 100 ms and fails when fail says so.
func warmThings(n int, made *atomic.Int32, fail func(nth int32) bool) *Warm[*thing] {
	return NewWarm(WarmOptions[*thing]{
		Target: n,
		Make: func(ctx context.Context) (*thing, error) {
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			if fail != nil && fail(made.Add(1)) {
				return nil, errors.New("it cannot be made")
			}
			return &thing{}, nil
		},
		Drop:  func(t *thing) { t.dropped.Store(true) },
		Alive: func(t *thing) bool { return !t.dead.Load() },
	})
}

func TestWhatIsTakenIsMadeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := warmThings(3, nil, nil)
		if _, ok := w.Take(); ok {
			t.Error("something was ready at once")
		}
		time.Sleep(time.Second)
		for range 3 {
			if _, ok := w.Take(); !ok {
				t.Error("nothing was ready")
			}
		}
		if _, ok := w.Take(); ok {
			t.Error("a fourth was ready")
		}
		time.Sleep(time.Second)
		if diff := cmp.Diff(WarmStats{Ready: 3, Taken: 3, Missed: 2}, w.Stats()); diff != "" {
			t.Error(diff)
		}
		first, _ := w.Take()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if first.dropped.Load() || w.Stats().Ready != 0 {
			t.Error("Close dropped what was taken, or left what was not")
		}
		if _, ok := w.Take(); ok {
			t.Error("a closed one gives out")
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestADeadOneIsNotGivenOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := warmThings(2, nil, nil)
		defer w.Close() //nolint:errcheck // returns nil
		time.Sleep(time.Second)
		w.mu.Lock()
		first, second := w.ready[0], w.ready[1]
		w.mu.Unlock()
		first.dead.Store(true)
		if got, ok := w.Take(); !ok || got != second || !first.dropped.Load() {
			t.Error("the dead one was given out or not dropped")
		}
		time.Sleep(time.Second)
		w.mu.Lock()
		third := w.ready[1]
		w.mu.Unlock()
		third.dead.Store(true)
		time.Sleep(2 * warmLook)
		if s := w.Stats(); !third.dropped.Load() || s.Ready != 2 || s.Failed != 2 {
			t.Errorf("a dead one that waits is not replaced: %+v", s)
		}
	})
}

func TestAMakerThatFailsIsNotTriedAllTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var made atomic.Int32
		w := warmThings(1, &made, func(nth int32) bool { return nth <= 5 })
		defer w.Close() //nolint:errcheck // returns nil
		time.Sleep(3 * time.Second)
		if n := made.Load(); n > 3 {
			t.Errorf("%d tries in 3 s", n)
		}
		time.Sleep(10 * time.Second)
		if diff := cmp.Diff(WarmStats{Ready: 1, Failed: 5}, w.Stats()); diff != "" {
			t.Error(diff)
		}
		w.SetTarget(0)
		time.Sleep(time.Second)
		if w.Stats().Ready != 0 {
			t.Error("a lower target drops nothing")
		}
	})
}
