package control

import (
	"math"
	"sync"
	"time"
)

// burst is how many creations above its rate a team may have at once: what one
// batch of rollouts starts together.
const burst = 64

// buckets limits the rate of creations of each team.
type buckets struct {
	rate func(team string) float64 // immutable; may be nil

	mu   sync.Mutex
	fill map[string]bucket // guarded by mu; one a team that has created anything
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newBuckets(rate func(string) float64) *buckets {
	return &buckets{rate: rate, fill: map[string]bucket{}}
}

// take says whether the team may create one more now, and else in how many seconds.
func (b *buckets) take(team string, now time.Time) (wait int, ok bool) {
	if b.rate == nil {
		return 0, true
	}
	rate := b.rate(team)
	if rate <= 0 {
		return 0, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f, seen := b.fill[team]
	if !seen {
		f = bucket{tokens: burst, at: now}
	}
	f.tokens = min(burst, f.tokens+now.Sub(f.at).Seconds()*rate)
	f.at = now
	if f.tokens < 1 {
		b.fill[team] = f
		return int(math.Ceil((1 - f.tokens) / rate)), false
	}
	f.tokens--
	b.fill[team] = f
	return 0, true
}
