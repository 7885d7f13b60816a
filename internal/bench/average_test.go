package bench

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func sec(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func TestTimeAverageIsExact(t *testing.T) {
	t.Parallel()
	ramp := []point{{sec(0), 0}, {sec(10), 100}}
	for _, c := range []struct {
		name     string
		points   []point
		from, to float64
		want     float64
		ok       bool
	}{
		{"a constant", []point{{sec(1), 7}, {sec(2), 7}}, 0, 10, 7, true},
		{"a ramp over its whole length", ramp, 0, 10, 50, true},
		{"a ramp cut on both sides", ramp, 2, 4, 30, true},
		{"a ramp that ends inside the window", ramp, 5, 15, (5*75 + 5*100) / 10.0, true},
		{"unevenly spaced samples weigh by time", []point{{sec(0), 10}, {sec(1), 10}, {sec(1), 20}, {sec(9), 20}}, 0, 9, (10 + 8*20) / 9.0, true},
		{"one sample", []point{{sec(3), 5}}, 0, 1, 5, true},
		{"a window between two samples", ramp, 4, 4.5, 42.5, true},
		{"no samples", nil, 0, 1, 0, false},
		{"an empty window", ramp, 3, 3, 0, false},
	} {
		got, ok := timeAverage(c.points, sec(c.from), sec(c.to))
		if ok != c.ok || math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%s: got %g, %v, want %g, %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

func TestTimeAverageLiesBetweenTheExtremesAndAddsUp(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var pts []point
		at := time.Duration(0)
		for range rapid.IntRange(1, 20).Draw(t, "n") {
			at += time.Duration(rapid.IntRange(1, 1000).Draw(t, "step")) * time.Millisecond
			pts = append(pts, point{at, rapid.Float64Range(0, 1e9).Draw(t, "v")})
		}
		from := time.Duration(rapid.IntRange(0, 5000).Draw(t, "from")) * time.Millisecond
		mid := from + time.Duration(rapid.IntRange(1, 5000).Draw(t, "mid"))*time.Millisecond
		to := mid + time.Duration(rapid.IntRange(1, 5000).Draw(t, "to"))*time.Millisecond
		lo, hi := math.Inf(1), math.Inf(-1)
		for _, p := range pts {
			lo, hi = min(lo, p.v), max(hi, p.v)
		}
		all, _ := timeAverage(pts, from, to)
		a, _ := timeAverage(pts, from, mid)
		b, _ := timeAverage(pts, mid, to)
		if all < lo-1e-3 || all > hi+1e-3 {
			t.Fatalf("average %g outside %g..%g", all, lo, hi)
		}
		sum := a*(mid-from).Seconds() + b*(to-mid).Seconds()
		if math.Abs(sum-all*(to-from).Seconds()) > 1e-6*(1+math.Abs(sum)) {
			t.Fatalf("parts integrate to %g, the whole to %g", sum, all*(to-from).Seconds())
		}
	})
}
