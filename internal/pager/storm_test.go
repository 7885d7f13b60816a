package pager

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/pager/pagertest"
	"github.com/agentzip/agentzip/internal/units"
)

// faked is a pager on a fake memory whose first pages are evicted, at a server.
type faked struct {
	mem   *pagertest.Memory
	pager *Pager
}

func newFaked(t *testing.T, s *Server, im *guestmem.Image, c *cohort.Cohort, seed uint64) *faked {
	t.Helper()
	mem, err := pagertest.New(im)
	if err != nil {
		t.Fatal(err)
	}
	p, err := New(Options{Name: "storm", Guest: mem, Image: im, Cohort: c, EvictedAround: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Add(p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Remove(p)
		if err := p.Err(); err != nil {
			t.Error(err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	g := &faked{mem, p}
	guest := mem.Thread()
	for f := range units.Frame(im.Frames()) {
		g.access(t, guest, f, func(p *units.Page) { *p = *textPage(uint64(f) + seed*1000) })
	}
	if res, err := p.Evict(context.Background()); err != nil || res.Dropped != im.Frames() {
		t.Fatalf("evict: %+v, %v", res, err)
	}
	return g
}

// access makes an access and waits for it. write nil: read.
func (g *faked) access(t *testing.T, guest *pagertest.Thread, f units.Frame, write func(*units.Page)) {
	do := write
	if do == nil {
		do = func(*units.Page) {}
	}
	for !guest.Access(f, write != nil, do) {
		select {
		case <-guest.Woken():
		case <-time.After(20 * time.Second):
			t.Errorf("frame %d: nobody came", f)
			return
		}
	}
}

// Eight sandboxes wake at the same instant, one of them with sixteen threads. How long one
// waits is counted in faults that were served meanwhile: the machine may be busy.
func TestInAStormNoSandboxWaitsMuchLongerThanTheOthers(t *testing.T) {
	const sandboxes, frames, hog = 8, 256, 16
	im := guestmemtest.Image(t, frames)
	c := newCohort(t, im, cohort.Options{})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	server := runServer(t)
	guests := make([]*faked, sandboxes)
	for i := range guests {
		guests[i] = newFaked(t, server, im, c, uint64(i))
	}
	var served atomic.Int64
	var mu sync.Mutex
	waits := make([][]int64, sandboxes)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, g := range guests {
		threads := 1
		if i == 0 {
			threads = hog
		}
		for k := range threads {
			wg.Go(func() {
				guest := g.mem.Thread()
				<-start
				var own []int64
				for f := k; f < frames; f += threads {
					began := served.Load()
					g.access(t, guest, units.Frame(f), nil)
					own = append(own, served.Add(1)-began)
				}
				mu.Lock()
				defer mu.Unlock()
				waits[i] = append(waits[i], own...)
			})
		}
	}
	close(start)
	wg.Wait()
	p99 := make([]int64, sandboxes)
	for i, w := range waits {
		slices.Sort(w)
		p99[i] = w[len(w)*99/100]
	}
	sorted := slices.Clone(p99)
	slices.Sort(sorted)
	t.Logf("p99 of each, in faults served meanwhile: %v", p99)
	median := max(sorted[sandboxes/2], sandboxes)
	for i, n := range p99[1:] {
		if n > 3*median {
			t.Errorf("sandbox %d waits for %d faults at p99, the median one for %d", i+1, n, median)
		}
	}
}

// The garbage collector runs all the time: it must not stop for a fault thread, nor a fault
// for it, and no page may be freed or moved below the kernel.
func TestNothingIsLostWhileTheGarbageCollectorRunsAllTheTime(t *testing.T) {
	const frames = 512
	r := newRig(t, frames, 3).serve()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	r.hammer(frames, 700*time.Millisecond, r.disturb)
	close(stop)
	wg.Wait()
	if max := r.pager.Stats().StallMax; max > time.Second {
		t.Errorf("a fault took %v", max)
	}
}
