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
var thinkQuantiles = []struct{ p, s float64 }{
	{0, 1.1}, {0.10, 2.33}, {0.25, 3.05}, {0.50, 4.20}, {0.75, 6.36}, {0.90, 11.68}, {0.99, 29.9}, {1, 60},
}

// ThinkSource says where drawn think times come from, for reports.
const ThinkSource = "drawn from the think times of R2E-Gym's agent (p50 4.2 s, p90 11.7 s), tail of Claude Code (p99 29.9 s)"

// drawThink returns the think time before step n of a trajectory. The same
// seed, id and step always give the same time.
func drawThink(seed uint64, id string, n int) time.Duration {
	h := fnv.New64a()
	h.Write([]byte(id))                                   // never fails
	r := rand.New(rand.NewPCG(seed^h.Sum64(), uint64(n))) //nolint:gosec // the point is that it repeats
	return quantile(r.Float64())
}

// quantile interpolates thinkQuantiles at p in [0, 1).
func quantile(p float64) time.Duration {
	q := thinkQuantiles
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
