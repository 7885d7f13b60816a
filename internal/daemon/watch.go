package daemon

import (
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/report"
)

// stallLooks are the times after a call's dispatch at which its stall is read: close
// together where most of it is, and a dozen wake-ups a call in all, which no call notices.
var stallLooks = []time.Duration{
	10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond,
	500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 30 * time.Second,
}

// watchStall notes what the pager has counted and, while a call runs, how its stall grows.
// The function it returns ends that and adds it to the call's result.
func (b *box) watchStall() func(*bench.CallResult) {
	before, on := b.Pager()
	if !on {
		return func(*bench.CallResult) {}
	}
	begin := time.Now()
	stop := make(chan struct{})
	var points []bench.StallAt // owned by the goroutine until it has ended
	var looking sync.WaitGroup
	looking.Go(func() {
		timer := time.NewTimer(stallLooks[0])
		defer timer.Stop()
		for i := range stallLooks {
			select {
			case <-stop:
				return
			case <-timer.C:
			}
			st, _ := b.Pager()
			points = append(points, bench.StallAt{After: time.Since(begin), Stall: st.Stall - before.Stall})
			if i+1 < len(stallLooks) {
				timer.Reset(time.Until(begin.Add(stallLooks[i+1])))
			}
		}
	})
	return func(res *bench.CallResult) {
		close(stop)
		looking.Wait()
		after, _ := b.Pager()
		res.Progress = append(points, bench.StallAt{After: time.Since(begin), Stall: after.Stall - before.Stall})
		// Also what was restored before the call came, because somebody had announced it.
		res.Ahead, b.ahead = uint64(after.Prefetched.Count-b.ahead), after.Prefetched.Count
		res.Ways = waysSince(before, after)
		res.Kinds = map[string]bench.FaultCost{
			report.KindEvicted:   cost(before.Blocking, after.Blocking),
			report.KindProtected: cost(before.Protected, after.Protected),
			report.KindZero:      cost(before.Zero, after.Zero),
			report.KindTemplate:  cost(before.Template, after.Template),
		}
	}
}

// cost is what was added to a distribution.
func cost(before, after pager.Latency) bench.FaultCost {
	return bench.FaultCost{Count: uint64(after.Count - before.Count), Stall: after.Total - before.Total}
}

// waysSince is what was added to the restores that faults waited for.
func waysSince(before, after pager.Stats) map[string]bench.FaultCost {
	ways := map[string]bench.FaultCost{}
	for _, w := range after.BlockingWays {
		ways[w.Way.String()] = bench.FaultCost{Count: w.Faults, Stall: w.Stall}
	}
	for _, w := range before.BlockingWays {
		c := ways[w.Way.String()]
		ways[w.Way.String()] = bench.FaultCost{Count: c.Count - w.Faults, Stall: c.Stall - w.Stall}
	}
	return ways
}
