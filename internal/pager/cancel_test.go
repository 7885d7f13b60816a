package pager

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// Passes are cancelled at random microseconds while the guest checks and writes all pages.
func TestPassesCancelledAtRandomMicrosecondsLoseNothingAndEndSoon(t *testing.T) {
	const frames = 768
	r := newRig(t, frames, 3).serve()
	r.hammer(frames, time.Second, func(ctx context.Context) error {
		pass, cancel := context.WithCancel(ctx)
		defer cancel()
		timer := time.AfterFunc(time.Duration(rand.IntN(3000))*time.Microsecond, cancel)
		defer timer.Stop()
		_, err := r.pager.Evict(pass)
		return err
	})
	l := r.pager.Stats().CancelLatency
	t.Logf("%d passes cancelled: p50 %v p99 %v max %v", l.Count, l.P50(), l.P99(), l.Max)
	if l.Count < 20 {
		t.Errorf("only %d passes were cancelled", l.Count)
	}
	if l.P50() > 20*time.Millisecond { // beside other tests on busy cores
		t.Errorf("half of the passes took more than %v to end", l.P50())
	}
}

// counting counts calls.
type counting struct {
	Memory
	unprotects atomic.Int64 // the fault threads count too
}

func (c *counting) Unprotect(r guestmem.Run) error { c.unprotects.Add(1); return c.Memory.Unprotect(r) }

func TestACancelledBatchIsUnprotectedInOneGo(t *testing.T) {
	c := &counting{}
	h := &hooked{}
	r := newRig(t, 1024, 1, protectRestored, func(o *Options) { o.EvictedAround, c.Memory, o.Guest = 1, o.Guest, c }, hook(h)).serve()
	for f := units.Frame(0); f < 128; f += 2 {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	r.read(64) // Clean: must stay protected between the others
	for f := units.Frame(1); f < 128; f += 2 {
		r.write(f, textPage(uint64(f)))
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.afterRead = cancel
	before := c.unprotects.Load()
	if res, err := r.pager.Evict(ctx); !errors.Is(err, context.Canceled) || res.Abandoned < 60 {
		t.Errorf("cancelled pass: %+v, %v", res, err)
	}
	if got := c.unprotects.Load() - before; got > 3 {
		t.Errorf("%d calls to unprotect a batch with one protected page in the middle", got)
	}
	protected := r.pager.Counts().Protected
	r.poke(64, 1)
	if got := r.pager.Counts().Protected - protected; got != 1 {
		t.Errorf("%d write faults at the clean page, want 1: it was unprotected with its neighbours", got)
	}
	faults := r.pager.Faults()
	for f := units.Frame(1); f < 128; f += 2 {
		r.poke(f, 1)
	}
	if got := r.pager.Faults() - faults; got != 0 {
		t.Errorf("%d faults at pages that the pass gave back", got)
	}
}
