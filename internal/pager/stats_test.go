package pager

import (
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

func TestBlockingRestoresAreCountedByHowThePageWasKept(t *testing.T) {
	r := newRig(t, 128, 1, func(o *Options) { o.FaultAround, o.EvictedAround, o.LeaveUnmapped = 1, 1, true }).serve()
	for f := units.Frame(64); f < 72; f++ {
		r.write(f, textPage(uint64(f%4))) // four of them twice: kept once
	}
	r.evict()
	for f := units.Frame(64); f < 72; f++ {
		r.read(f)
	}
	s := r.pager.Stats()
	var faults uint64
	var stall time.Duration
	for _, w := range s.BlockingWays {
		faults, stall = faults+w.Faults, stall+w.Stall
	}
	if faults != 8 || int64(faults) != s.Blocking.Count || stall != s.Blocking.Total {
		t.Errorf("by way %d faults in %v (%+v), in all %d in %v; want 8", faults, stall, s.BlockingWays, s.Blocking.Count, s.Blocking.Total)
	}
}

func TestAPageOfABatchCostsItsPart(t *testing.T) {
	r := newRig(t, 128, 1, func(o *Options) { o.FaultAround, o.EvictedAround, o.LeaveUnmapped = 1, 1, true }).serve()
	for f := units.Frame(64); f < 96; f++ {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	var pages []Touch
	for f := units.Frame(64); f < 96; f++ {
		pages = append(pages, Touch{Frame: f})
	}
	r.restore(pages...)
	s := r.pager.Stats()
	if s.Prefetched.Count != 32 || s.PrefetchedPage.Count != 32 {
		t.Fatalf("%d and %d pages restored, want 32 of both", s.Prefetched.Count, s.PrefetchedPage.Count)
	}
	if got, most := s.PrefetchedPage.Max, s.Prefetched.Max/32; got != most {
		t.Errorf("a page cost %v, want a 32nd of its batch, %v", got, most)
	}
}
