package sandbox

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/prefetch"
	"github.com/agentzip/agentzip/internal/units"
)

// A fakeMemory is a guest's memory of which only is known which pages are evicted.
type fakeMemory struct {
	notify chan struct{}
	batch  time.Duration // of a Restore

	mu       sync.Mutex
	evicted  map[units.Frame]bool
	log      []pager.Touch
	restored []units.Frame // in order
	classes  map[pager.Class]int
	cut      int // restores that were cancelled
}

func newFakeMemory() *fakeMemory {
	return &fakeMemory{notify: make(chan struct{}, 1), evicted: map[units.Frame]bool{}, classes: map[pager.Class]int{}}
}

func (m *fakeMemory) Restore(ctx context.Context, pages []pager.Touch, class pager.Class) (res pager.RestoreResult, err error) {
	if m.batch > 0 {
		select {
		case <-ctx.Done():
			m.mu.Lock()
			defer m.mu.Unlock()
			m.cut++
			return res, ctx.Err()
		case <-time.After(m.batch):
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.classes[class]++
	for _, t := range pages {
		if m.evicted[t.Frame] {
			delete(m.evicted, t.Frame)
			m.restored = append(m.restored, t.Frame)
			res.Evicted++
		}
	}
	return res, nil
}

func (m *fakeMemory) DrainTouched(dst []pager.Touch) []pager.Touch {
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.log...)
	m.log = nil
	return dst
}

func (m *fakeMemory) Notify() <-chan struct{} { return m.notify }

func (m *fakeMemory) Expect([]pager.Touch) {}

func (m *fakeMemory) isEvicted(f units.Frame) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.evicted[f]
}

// touch is the guest: it returns how many of the pages it had to wait for.
func (m *fakeMemory) touch(frames ...units.Frame) (waited int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range frames {
		if !m.evicted[f] {
			continue
		}
		delete(m.evicted, f)
		m.log = append(m.log, pager.Touch{Frame: f, Kind: pager.KindEvicted})
		waited++
	}
	select {
	case m.notify <- struct{}{}:
	default:
	}
	return waited
}

// evictAll is a whole pass.
func (m *fakeMemory) evictAll(frames ...units.Frame) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range frames {
		m.evicted[f] = true
	}
}

func frames(from, n units.Frame) (fs []units.Frame) {
	for f := range n {
		fs = append(fs, from+f)
	}
	return fs
}

// follows runs fn with a follower in a bubble in which time passes only when all wait.
func follows(t *testing.T, fn func(t *testing.T, f *follower, m *fakeMemory)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMemory()
		h := prefetch.NewHistory(prefetch.Options{HoldOut: 1 << 30})
		f := newFollower(m, h.NewPredictor("s1", m.isEvicted), func() bool { return true }, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { f.run(ctx) })
		fn(t, f, m)
		cancel()
		running.Wait()
	})
}

// call is one tool call with the pass after it; it returns how many pages it waited for.
func call(f *follower, m *fakeMemory, kind string, pages []units.Frame) (waited int) {
	f.begin(kind)
	synctest.Wait()
	waited = m.touch(pages...)
	synctest.Wait()
	f.end()
	synctest.Wait()
	m.evictAll(pages...)
	f.tell(order{what: orderLooked, pass: true})
	synctest.Wait()
	return waited
}

func TestACallOfAKindIsRestoredForAfterItWasSeen(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		tests, searches := frames(0, 200), frames(1000, 200)
		m.evictAll(tests...)
		m.evictAll(searches...)
		if n := call(f, m, "pytest", tests); n != 200 {
			t.Errorf("the first call waited for %d pages, want all 200", n)
		}
		for range 3 {
			call(f, m, "pytest", tests)
			call(f, m, "grep", searches)
		}
		if n := call(f, m, "pytest", tests); n > 0 {
			t.Errorf("a call of a known kind waited for %d pages, want none", n)
		}
		if m.classes[pager.Speculative] > 0 {
			t.Error("pages of calls that run were restored as speculative")
		}
	})
}

func TestAnAnnouncedCallFindsItsPages(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		pages := frames(0, 300)
		m.evictAll(pages...)
		for range 3 {
			call(f, m, "pytest", pages)
		}
		f.tell(order{what: orderAnnounce, kind: "bash"}) // as clients name their tools
		synctest.Wait()
		if len(m.evicted) > 0 || m.classes[pager.Speculative] == 0 {
			t.Errorf("%d pages are still evicted, %v", len(m.evicted), m.classes)
		}
		if n := call(f, m, "pytest", pages); n > 0 {
			t.Errorf("the call waited for %d pages, want none", n)
		}
		m.mu.Lock()
		m.restored = nil
		m.mu.Unlock()
		if n := call(f, m, "pytest", pages); n > 0 {
			t.Errorf("the call after it waited for %d pages, want none: an announcement must not count as uselessness", n)
		}
	})
}

func TestAWithdrawnCallTeachesNothing(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		pages := frames(0, 100)
		m.evictAll(pages...)
		for range 3 {
			call(f, m, "pytest", pages)
		}
		calls := f.Stats().Calls
		for range 10 {
			f.tell(order{what: orderAnnounce, kind: "pytest"})
			synctest.Wait()
			f.tell(order{what: orderWithdraw})
			m.evictAll(pages...)
			f.tell(order{what: orderLooked, pass: true})
			synctest.Wait()
		}
		if n := f.Stats().Calls; n != calls {
			t.Errorf("%d calls were learned from, want %d", n, calls)
		}
		if n := call(f, m, "pytest", pages); n > 0 {
			t.Errorf("the call waited for %d pages, want none", n)
		}
	})
}

func TestTheEndOfACallEndsItsRestores(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		pages := frames(0, 640)
		m.evictAll(pages...)
		for range 3 {
			call(f, m, "pytest", pages)
		}
		m.batch = time.Second
		f.begin("pytest")
		time.Sleep(2500 * time.Millisecond) // two of ten batches
		f.end()
		synctest.Wait()
		if left := len(m.evicted); left != 640-2*pager.BatchPages || m.cut != 1 {
			t.Errorf("%d pages are evicted, %d restores were cut: want 512 and 1", left, m.cut)
		}
	})
}

func TestMereGuessesAreNotRestoredWhenTheHostIsShort(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		pages := frames(0, 100)
		m.evictAll(pages...)
		for range 3 {
			call(f, m, "pytest", pages)
		}
		f.guided = func() bool { return false }
		f.tell(order{what: orderAnnounce, kind: "pytest"})
		synctest.Wait()
		if len(m.evicted) != 100 {
			t.Errorf("%d pages are evicted, want 100", len(m.evicted))
		}
		if n := call(f, m, "pytest", pages); n > 0 {
			t.Errorf("the call itself waited for %d pages, want none", n)
		}
	})
}

func TestParallelCallsAreFollowedUntilTheLastEnds(t *testing.T) {
	follows(t, func(t *testing.T, f *follower, m *fakeMemory) {
		tests, searches := frames(0, 100), frames(1000, 100)
		m.evictAll(tests...)
		m.evictAll(searches...)
		for range 3 {
			call(f, m, "pytest", tests)
			call(f, m, "grep", searches)
		}
		f.begin("pytest")
		synctest.Wait()
		f.begin("grep")
		synctest.Wait()
		f.end()
		synctest.Wait()
		if n := m.touch(append(tests, searches...)...); n > 0 {
			t.Errorf("two calls waited for %d pages, want none", n)
		}
		f.end()
	})
}
