package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"
)

// The names of the distributions of a run with compression: the keys of Report.Latencies.
// The kinds of faults are those of Activity.Faults and Call.Kinds too.
const (
	KindEvicted    = "evicted"    // faults on evicted pages: blocking restores
	KindProtected  = "protected"  // writes to pages that were clean or being encoded
	KindTemplate   = "template"   // faults on pages of the template
	KindZero       = "zero"       // faults on zero pages
	KindStale      = "stale"      // events that another thread had overtaken; no distribution
	KindPrefetched = "prefetched" // restores ahead of use, until their batch was installed: no fault
	KindPage       = "page"       // the same, a batch divided by its pages: no fault
	KindHeld       = "held"       // how long a batch of a pass or restore held the pager's lock: no fault
	KindCancel     = "cancel"     // from a call's arrival to the end of the compression it found: no fault
)

// A Histogram is a distribution of durations in buckets, so that distributions of several
// sandboxes or runs can be merged before a quantile is taken. Its buckets may be of any
// widths: where two have different bounds the merged one has both.
type Histogram struct {
	Total   time.Duration `json:"total_ns"`
	Max     time.Duration `json:"max_ns"`
	Buckets []Bucket      `json:"buckets"` // by LE, none empty
}

// A Bucket counts the durations up to LE that no bucket before it has. In JSON it is the
// pair [nanoseconds, count].
type Bucket struct {
	LE    time.Duration
	Count uint64
}

// MarshalJSON writes the pair.
func (b Bucket) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "[%d,%d]", b.LE.Nanoseconds(), b.Count), nil
}

// UnmarshalJSON reads the pair.
func (b *Bucket) UnmarshalJSON(data []byte) error {
	var pair [2]uint64
	if err := json.Unmarshal(data, &pair); err != nil {
		return fmt.Errorf("read bucket: %w", err)
	}
	b.LE, b.Count = time.Duration(min(pair[0], math.MaxInt64)), pair[1]
	return nil
}

// Count returns the number of durations.
func (h Histogram) Count() uint64 {
	var n uint64
	for _, b := range h.Buckets {
		n += b.Count
	}
	return n
}

// Merge adds the durations of o.
func (h *Histogram) Merge(o Histogram) {
	h.Total += o.Total
	h.Max = max(h.Max, o.Max)
	all := append(slices.Clone(h.Buckets), o.Buckets...)
	slices.SortStableFunc(all, func(a, b Bucket) int { return cmp.Compare(a.LE, b.LE) })
	h.Buckets = all[:0]
	for _, b := range all {
		if n := len(h.Buckets); n > 0 && h.Buckets[n-1].LE == b.LE {
			h.Buckets[n-1].Count += b.Count
			continue
		}
		h.Buckets = append(h.Buckets, b)
	}
}

// Since returns the durations of h that an earlier reading of the same distribution did not
// have. Its Max is exact if the longest is among them, else the bound of its bucket.
func (h Histogram) Since(earlier Histogram) Histogram {
	before := map[time.Duration]uint64{}
	for _, b := range earlier.Buckets {
		before[b.LE] = b.Count
	}
	d := Histogram{Total: h.Total - earlier.Total}
	for _, b := range h.Buckets {
		if n := b.Count - min(b.Count, before[b.LE]); n > 0 {
			d.Buckets = append(d.Buckets, Bucket{b.LE, n})
			d.Max = min(b.LE, h.Max)
		}
	}
	if h.Max > earlier.Max && len(d.Buckets) > 0 {
		d.Max = h.Max
	}
	return d
}

// Quantile returns a duration that at least the share q of all does not exceed, 0 < q <= 1;
// 0 if there are none. It is the upper bound of a bucket, and never above Max.
func (h Histogram) Quantile(q float64) time.Duration {
	rank := max(1, uint64(math.Ceil(q*float64(h.Count()))))
	var seen uint64
	for _, b := range h.Buckets {
		if seen += b.Count; seen >= rank {
			return min(b.LE, h.Max)
		}
	}
	return h.Max
}

// Above returns how many durations are surely longer than d: those of buckets above it.
func (h Histogram) Above(d time.Duration) (n uint64) {
	for _, b := range h.Buckets {
		if b.LE > d {
			n += b.Count
		}
	}
	return n
}

// Quantiles summarises h.
func (h Histogram) Quantiles() Quantiles {
	return Quantiles{Count: h.Count(), Total: h.Total, P50: h.Quantile(0.50), P95: h.Quantile(0.95), P99: h.Quantile(0.99), Max: h.Max}
}

// MergeAll merges the distributions of several runs by name.
func MergeAll(to, from map[string]Histogram) {
	for name, h := range from {
		m := to[name]
		m.Merge(h)
		to[name] = m
	}
}

// QuantilesOf summarises durations by nearest rank: the p-quantile of n values is the
// ceil(p*n)-th smallest. It sorts d.
func QuantilesOf(d []time.Duration) Quantiles {
	if len(d) == 0 {
		return Quantiles{}
	}
	slices.Sort(d)
	at := func(p float64) time.Duration { return d[max(0, int(math.Ceil(p*float64(len(d))))-1)] }
	q := Quantiles{Count: uint64(len(d)), P50: at(0.50), P95: at(0.95), P99: at(0.99), Max: d[len(d)-1]}
	for _, x := range d {
		q.Total += x
	}
	return q
}
