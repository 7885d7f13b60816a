package pager

import (
	"iter"
	"math/bits"
	"sync/atomic"
	"time"
)

// A histogram counts durations in buckets of 1/16 of a power of two, so that a
// percentile is at most 6 % too high. Recording takes three atomic adds and no lock.
type histogram struct {
	counts [histBuckets]atomic.Uint32
	n      atomic.Uint64
	total  atomic.Int64 // nanoseconds
	max    atomic.Int64 // nanoseconds
}

const (
	histSub     = 16 // buckets for each power of two
	histShift   = 8  // the finest bucket is 256/16 = 16 ns wide
	histOctaves = 28 // up to 2^(8+27) ns = 34 s; longer ones count as that
	histBuckets = histSub * histOctaves
)

// bucket returns the index of a duration.
func bucket(ns int64) int {
	if ns < 1<<histShift {
		return int(max(ns, 0) >> (histShift - 4))
	}
	octave := bits.Len64(uint64(ns)) - histShift // 1 for 256..511
	return min(octave*histSub+int(ns>>(octave+histShift-5))&(histSub-1), histBuckets-1)
}

// upper returns the end of bucket i in nanoseconds.
func upper(i int) int64 {
	octave, sub := i/histSub, int64(i%histSub)
	if octave == 0 {
		return (sub + 1) << (histShift - 4)
	}
	return (histSub + sub + 1) << (octave + histShift - 5)
}

func (h *histogram) record(d time.Duration) { h.recordN(d, 1) }

func (h *histogram) recordN(d time.Duration, n int) {
	h.counts[bucket(int64(d))].Add(uint32(n))
	h.n.Add(uint64(n)) //nolint:gosec // G115: a batch at most
	h.total.Add(int64(d) * int64(n))
	for {
		old := h.max.Load()
		if int64(d) <= old || h.max.CompareAndSwap(old, int64(d)) {
			return
		}
	}
}

// A Recorder collects durations as the pager does its own, for those above it. Its zero
// value is ready; all methods may be called from any goroutine.
type Recorder struct{ h histogram }

// Record adds one observation.
func (r *Recorder) Record(d time.Duration) { r.h.record(d) }

// Snapshot returns what was recorded so far.
func (r *Recorder) Snapshot() Latency { return r.h.snapshot() }

// A Latency is a snapshot of a histogram. Snapshots of several sandboxes can be
// merged before a percentile is taken.
type Latency struct {
	Count  int64
	Total  time.Duration
	Max    time.Duration
	counts [histBuckets]uint32
}

// count returns how many there are.
func (h *histogram) count() uint64 { return h.n.Load() }

func (h *histogram) snapshot() Latency {
	l := Latency{Total: time.Duration(h.total.Load()), Max: time.Duration(h.max.Load())}
	for i := range h.counts {
		l.counts[i] = h.counts[i].Load()
		l.Count += int64(l.counts[i])
	}
	return l
}

// Merge adds the observations of o to l.
func (l *Latency) Merge(o Latency) {
	l.Count += o.Count
	l.Total += o.Total
	l.Max = max(l.Max, o.Max)
	for i := range l.counts {
		l.counts[i] += o.counts[i]
	}
}

// Buckets yields the upper bound of each bucket that is not empty, in order, and how many
// observations it has.
func (l Latency) Buckets() iter.Seq2[time.Duration, uint64] {
	return func(yield func(time.Duration, uint64) bool) {
		for i, n := range l.counts {
			if n > 0 && !yield(time.Duration(upper(i)), uint64(n)) {
				return
			}
		}
	}
}

// Quantile returns a duration that at least the share q of the observations does not
// exceed (0 < q <= 1); 0 if there are none. It is at most 6 % too high and never above Max.
func (l Latency) Quantile(q float64) time.Duration {
	rank := int64(q*float64(l.Count) + 0.9999999)
	var seen int64
	for i, n := range l.counts {
		seen += int64(n)
		if n > 0 && seen >= rank {
			return min(time.Duration(upper(i)), l.Max)
		}
	}
	return l.Max
}

// P50 returns the median.
func (l Latency) P50() time.Duration { return l.Quantile(0.50) }

// P95 returns the 95th percentile.
func (l Latency) P95() time.Duration { return l.Quantile(0.95) }

// P99 returns the 99th percentile.
func (l Latency) P99() time.Duration { return l.Quantile(0.99) }

// Mean returns the average.
func (l Latency) Mean() time.Duration {
	if l.Count == 0 {
		return 0
	}
	return l.Total / time.Duration(l.Count)
}
