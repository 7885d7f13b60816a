package policy

import (
	"math"
	"time"
)

// Durations estimates the quantiles of durations of which the later ones count more. It
// keeps a histogram, so that it costs the same whatever it has seen. The zero value has seen
// nothing. Not safe for concurrent use.
type Durations struct {
	weight [durationBuckets]float64
	total  float64
	next   float64 // weight of the next one; 0 means 1
}

// Buckets are a factor of 2^(1/2) wide and reach from 10 ms to 23 hours: a quantile is right
// within 19 %.
const (
	durationBuckets = 48
	firstBucket     = 10 * time.Millisecond
)

// durationDecay is by how much an older duration counts less than the next: of sixteen agents
// with a call in 10 s each, the last half minute makes up for half of an estimate.
const durationDecay = 1.0 / 64

// rescaleAt is when all weights are made smaller, long before they are infinite.
const rescaleAt = 1e100

// Note adds a duration.
func (d *Durations) Note(t time.Duration) {
	if d.next == 0 {
		d.next = 1
	}
	d.weight[bucketOf(t)] += d.next
	d.total += d.next
	d.next *= 1 + durationDecay
	if d.next < rescaleAt {
		return
	}
	for i := range d.weight {
		d.weight[i] /= d.next
	}
	d.total /= d.next
	d.next = 1
}

func bucketOf(t time.Duration) int {
	if t <= firstBucket {
		return 0
	}
	i := int(2 * math.Log2(float64(t)/float64(firstBucket)))
	return min(i, durationBuckets-1)
}

// bucketMiddle is the duration that stands for a bucket.
func bucketMiddle(i int) time.Duration {
	return time.Duration(float64(firstBucket) * math.Exp2((float64(i)+0.5)/2))
}

// Quantile returns the duration that a share q of all is not longer than; false if none was
// noted.
func (d *Durations) Quantile(q float64) (time.Duration, bool) {
	return d.quantileFrom(0, q)
}

// Left returns how much longer one takes that took elapsed already, at the median of those
// that took so long. false: none did.
func (d *Durations) Left(elapsed time.Duration) (time.Duration, bool) {
	t, ok := d.quantileFrom(bucketOf(elapsed), 0.5)
	return max(0, t-elapsed), ok
}

func (d *Durations) quantileFrom(first int, q float64) (time.Duration, bool) {
	sum := 0.0
	for _, w := range d.weight[first:] {
		sum += w
	}
	if sum <= d.total*1e-6 { // decayed to nothing counts as nothing
		return 0, false
	}
	want := q * sum
	for i, w := range d.weight[first:] {
		if want -= w; want <= 0 && w > 0 {
			return bucketMiddle(first + i), true
		}
	}
	return bucketMiddle(durationBuckets - 1), true
}
