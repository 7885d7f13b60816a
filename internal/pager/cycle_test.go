package pager

import (
	"context"
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// A guest sleeps, wakes every few milliseconds and looks at all it has, while it is put away
// and brought back a thousand times. It must find every byte, and never wake late.
func TestAGuestThatSleepsThroughAThousandCyclesWakesOnTime(t *testing.T) {
	const (
		frames = 24
		cycles = 1000
		nap    = 5 * time.Millisecond
		late   = time.Second // issue: never a hang over 1 s
	)
	r := newRig(t, frames, 2).serve()
	var want uint64
	pages := make([]Touch, frames)
	for f := range units.Frame(frames) {
		p := content(contentKinds[f%5], f, uint64(f)+1)
		r.write(f, p)
		want += binary.NativeEndian.Uint64(p[:])
		pages[f] = Touch{Frame: f, Write: f%3 == 0}
	}
	stop := make(chan struct{})
	var guest sync.WaitGroup
	wakes, longest := 0, time.Duration(0)
	guest.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(nap):
			}
			begin := time.Now()
			a, err := r.vm.Channels[1].Touch(0, frames, false)
			if err != nil || a.Count != want {
				t.Errorf("wake %d: sum %#x, %v, want %#x", wakes, a.Count, err, want)
				return
			}
			wakes, longest = wakes+1, max(longest, time.Since(begin))
		}
	})
	for i := range cycles {
		if _, err := r.pager.Evict(context.Background()); err != nil {
			t.Fatalf("pass %d: %v", i, err)
		}
		if _, err := r.pager.Restore(context.Background(), pages, Needed); err != nil {
			t.Fatalf("restore %d: %v", i, err)
		}
	}
	close(stop)
	guest.Wait()
	s := r.pager.Stats()
	t.Logf("%d wakes, the longest took %v; %d faults, %d pages encoded, %d dropped clean", wakes, longest, s.Faults, s.Encoded, s.Clean)
	if wakes < 20 || longest > late {
		t.Errorf("%d wakes, the longest took %v: want 20 or more, none over %v", wakes, longest, late)
	}
	if s.Encoded < frames || s.Clean == 0 || s.Blocking.Count == 0 {
		t.Errorf("the cycles did not evict and restore: %+v", s)
	}
	r.unharmed()
}
