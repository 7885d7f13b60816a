package traj

import (
	"hash/fnv"
	"math/rand/v2"
	"sort"
	"time"
)

// thinkQuantiles is the distribution that missing think times are drawn from:
// what R2E-Gym's own agent measured per call (p10 2.33, p50 4.20, p90 11.68 s
// over 504 calls). Its p99 of 366 s are replies that ran into the token limit;
// the tail here follows Claude Code instead (gaps p99 29.9 s) and ends at 60 s.
var thinkQuantiles = []quantilePoint{
	{0, 1.1}, {0.10, 2.33}, {0.25, 3.05}, {0.50, 4.20}, {0.75, 6.36}, {0.90, 11.68}, {0.99, 29.9}, {1, 60},
}

// A quantilePoint says that the share p of all times is at most s seconds.
type quantilePoint struct{ p, s float64 }

// ThinkSource says where drawn think times come from, for reports.
const ThinkSource = "drawn from the think times of R2E-Gym's agent (p50 4.2 s, p90 11.7 s), tail of Claude Code (p99 29.9 s)"

// drawThink returns the think time before step n of a trajectory. The same
// seed, id and step always give the same time.
func drawThink(seed uint64, id string, n int) time.Duration {
	h := fnv.New64a()
	h.Write([]byte(id))                                   // never fails
	r := rand.New(rand.NewPCG(seed^h.Sum64(), uint64(n))) //nolint:gosec // the point is that it repeats
	return quantile(thinkQuantiles, r.Float64())
}

// leadQuantiles say for how long a model writes a call after its tool is known, by the kind of
// call, as far as it was recorded: p50 and p90 of Claude Code. Their ends are ours.
var leadQuantiles = map[Kind][]quantilePoint{
	Read:  {{0, 0.33}, {0.50, 0.67}, {0.90, 1.0}, {1, 1.0}},
	Edit:  {{0, 1.5}, {0.50, 3.1}, {0.90, 9.8}, {1, 9.8}},
	Write: {{0, 8}, {0.50, 17}, {0.90, 52}, {1, 52}},
	Other: {{0, 0.4}, {0.50, 0.82}, {0.90, 1.6}, {1, 1.6}}, // a shell command
}

// DrawLead returns a Lead for step n of a trajectory whose recording has none, from what was
// recorded of Claude Code for its kind of call, and never more than it thought. The same id
// and step always give the same time.
func DrawLead(id string, n int, s Step) time.Duration {
	q, ok := leadQuantiles[s.Kind]
	if !ok {
		q = leadQuantiles[Other]
	}
	h := fnv.New64a()
	h.Write([]byte("lead " + id))                    // never fails
	r := rand.New(rand.NewPCG(h.Sum64(), uint64(n))) //nolint:gosec // the point is that it repeats
	return min(quantile(q, r.Float64()), s.Think)
}

// quantile interpolates a distribution at p in [0, 1).
func quantile(q []quantilePoint, p float64) time.Duration {
	i := sort.Search(len(q), func(i int) bool { return q[i].p > p })
	if i == len(q) {
		return seconds(q[len(q)-1].s)
	}
	a, b := q[i-1], q[i]
	return seconds(a.s + (b.s-a.s)*(p-a.p)/(b.p-a.p))
}

// maxSeconds bounds every recorded time; a day is beyond any replay.
const maxSeconds = 86400

// seconds converts a recorded number of seconds, clamped to what is sane.
func seconds(s float64) time.Duration {
	switch {
	case !(s > 0): // also NaN
		return 0
	case s > maxSeconds:
		s = maxSeconds
	}
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond)
}
