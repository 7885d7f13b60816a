package sandbox

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/prefetch"
)

// Compression is what the sandboxes of one cohort share. Do not copy it once a sandbox uses it.
//
// Lock order: Compression.mu, then nothing. It comes after Sandbox.mu.
type Compression struct {
	Cohort  *cohort.Cohort
	Faults  *pager.Server
	History *prefetch.History // what was learned of the calls; nil: nothing is restored ahead
	Host    *Gauge            // how short the host is; nil: never

	mu    sync.Mutex
	gaps  policy.Durations             // guarded by mu; from call to call
	leads map[string]*policy.Durations // guarded by mu; from the naming of a tool to its call
}

// A Gauge shows how short of memory the host is. One writes, many read.
type Gauge struct{ level atomic.Uint32 }

// Set sets the level.
func (g *Gauge) Set(l policy.Level) { g.level.Store(uint32(l)) }

// Level returns the level; Normal for a nil Gauge.
func (g *Gauge) Level() policy.Level {
	if g == nil {
		return policy.Normal
	}
	return policy.Level(g.level.Load()) //nolint:gosec // G115: Set wrote it
}

// noteGap adds the length of a gap that a call has ended.
func (c *Compression) noteGap(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gaps.Note(d)
}

// reach says which pages are worth compressing in a gap that has lasted for elapsed.
func (c *Compression) reach(elapsed time.Duration) policy.Temperature {
	c.mu.Lock()
	defer c.mu.Unlock()
	return policy.DefaultCosts.Reach(&c.gaps, elapsed, c.Host.Level())
}

// Leads are remembered of so many tools; agents have a dozen.
const maxLeads = 32

// Restoring begins when nine in ten calls are still to come, and a while before the earliest
// of those: 8,192 pages at 9 us take 80 ms, and half an octave is how exact the quantiles are.
const (
	leadQuantile = 0.1
	leadReserve  = time.Second
)

// noteLead adds how long after its tool was named a call came.
func (c *Compression) noteLead(tool string, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leads == nil {
		c.leads = map[string]*policy.Durations{}
	}
	l := c.leads[tool]
	if l == nil {
		if len(c.leads) >= maxLeads {
			return
		}
		l = new(policy.Durations)
		c.leads[tool] = l
	}
	l.Note(d)
}

// lead returns how soon a call of a tool comes at the earliest, once that was named.
func (c *Compression) lead(tool string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.leads[tool]; l != nil {
		if d, ok := l.Quantile(leadQuantile); ok {
			return max(0, d*3/4-leadReserve)
		}
	}
	return 0
}
