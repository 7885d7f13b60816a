package pager

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

func TestAGuestThatWritesWhileItIsEvictedKeepsEveryByte(t *testing.T) {
	const frames = 2048
	r := newRig(t, frames, 4).serve()
	rounds := r.hammer(frames, 3*time.Second, func(ctx context.Context) error {
		pass, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(30_000))*time.Microsecond)
		defer cancel()
		if rand.IntN(2) == 0 {
			pass = ctx
		}
		if _, err := r.pager.Evict(pass); err != nil {
			return err
		}
		some := make([]units.Frame, rand.IntN(400))
		for i := range some {
			some[i] = units.Frame(rand.IntN(frames + 5))
		}
		_, err := r.pager.Restore(ctx, some)
		return err
	})
	s := r.pager.Stats()
	t.Logf("%d accesses, %d faults, %d encoded, %d cancelled, %d dirtied, %d stale; blocking p50 %v p99 %v max %v; template p50 %v; zero p50 %v; protected p50 %v",
		rounds, s.Faults, s.Encoded, s.Cancelled, s.Dirtied, s.Stale, s.Blocking.P50(), s.Blocking.P99(), s.Blocking.Max, s.Template.P50(), s.Zero.P50(), s.Protected.P50())
	for name, n := range map[string]uint64{"encoded": s.Encoded, "zeros": s.Zeros, "equal": s.Equal, "clean": s.Clean, "kept": s.Kept,
		"dirtied": s.Dirtied, "write faults": s.WriteFaults, "prefetched": uint64(s.Prefetched.Count), "template": uint64(s.Template.Count), "zero": uint64(s.Zero.Count)} {
		if n == 0 {
			t.Errorf("no page was ever %s: the stress does not reach that path", name)
		}
	}
}
