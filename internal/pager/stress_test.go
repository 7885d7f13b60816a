package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

func TestAGuestThatWritesWhileItIsEvictedKeepsEveryByte(t *testing.T) {
	const frames = 768
	server := runServer(t)
	reached := map[string]uint64{}
	missing := func() (names []string) {
		for name, n := range reached {
			if n < 5 {
				names = append(names, name)
			}
		}
		return names
	}
	var rounds uint64
	var s Stats
	for try := 0; try < 2 || try < 10 && len(missing()) > 0; try++ { // more on a busy machine
		r := newRig(t, frames, 4, func(o *Options) { o.ProtectRestored = try%2 == 0 })
		r.server = server
		r.serve()
		rounds += r.hammer(frames, time.Second, r.disturb)
		s = r.pager.Stats()
		r.close()
		for name, n := range map[string]uint64{
			"encoded": s.Encoded, "zeros": s.Zeros, "equal": s.Equal, "clean": s.Clean, "kept": s.Kept, "cancelled": s.Cancelled,
			"dirtied": s.Dirtied, "write faults": s.WriteFaults, "prefetched": uint64(s.Prefetched.Count), "template": uint64(s.Template.Count), "zero": uint64(s.Zero.Count),
		} {
			reached[name] += n
		}
	}
	t.Logf("%d accesses, %d faults, %d encoded, %d cancelled, %d dirtied, %d stale; blocking p50 %v p99 %v max %v; template p50 %v; zero p50 %v; protected p50 %v",
		rounds, s.Faults, s.Encoded, s.Cancelled, s.Dirtied, s.Stale, s.Blocking.P50(), s.Blocking.P99(), s.Blocking.Max, s.Template.P50(), s.Zero.P50(), s.Protected.P50())
	if names := missing(); len(names) > 0 {
		t.Errorf("the stress did not reach %v: %v", names, reached)
	}
}

// disturb makes a pass, cancelled at a random moment or not, and restores random frames.
func (r *rig) disturb(ctx context.Context) error {
	pass, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(30_000))*time.Microsecond)
	defer cancel()
	if rand.IntN(2) == 0 {
		pass = ctx
	}
	if _, err := r.pager.Evict(pass); err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	some := make([]units.Frame, rand.IntN(400))
	for i := range some {
		some[i] = units.Frame(rand.IntN(r.im.Frames() + 5))
	}
	_, err := r.pager.Restore(ctx, mixed(some), Needed)
	return err
}

func TestThreadsThatWantTheSamePagesAllGetThem(t *testing.T) {
	const frames, threads = 256, 4
	r := newRig(t, frames, threads, func(o *Options) { o.FaultAround = 4 }).serve()
	var want uint64
	for f := range units.Frame(frames) {
		p := content(contentKinds[f%5], f, uint64(f)+1)
		r.write(f, p)
		want += binary.NativeEndian.Uint64(p[:])
	}
	for range 30 {
		r.evict()
		var wg sync.WaitGroup
		for i, c := range r.vm.Channels {
			wg.Go(func() {
				if a, err := c.Touch(0, frames, false); err != nil || a.Count != want {
					t.Errorf("thread %d: sum %#x, %v, want %#x", i, a.Count, err, want)
				}
			})
		}
		wg.Go(func() {
			if _, err := r.pager.Restore(context.Background(), reads(1, 2, 3, 4, 50, 51, 52, 250), Needed); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
	}
	r.unharmed()
}
