package bench

import (
	"slices"
	"time"
)

// A point is a value at a moment, as an offset from the run's start.
type point struct {
	at time.Duration
	v  float64
}

// timeAverage returns the average of a value over [from, to]: the integral of
// the straight lines between its points, divided by the length. Before the
// first and after the last point the value counts as constant. Points are in
// the order of time. ok is false without points or without a window.
func timeAverage(points []point, from, to time.Duration) (avg float64, ok bool) {
	if len(points) == 0 || to <= from {
		return 0, false
	}
	area := 0.0
	prev := point{from, valueAt(points, from)}
	for _, p := range points {
		if p.at <= from {
			continue
		}
		if p.at >= to {
			break
		}
		area += trapezoid(prev, p)
		prev = p
	}
	area += trapezoid(prev, point{to, valueAt(points, to)})
	return area / (to - from).Seconds(), true
}

func trapezoid(a, b point) float64 { return (a.v + b.v) / 2 * (b.at - a.at).Seconds() }

// valueAt interpolates the value at t.
func valueAt(points []point, t time.Duration) float64 {
	i, found := slices.BinarySearchFunc(points, t, func(p point, t time.Duration) int { return int(p.at - t) })
	switch {
	case found:
		return points[i].v
	case i == 0:
		return points[0].v
	case i == len(points):
		return points[i-1].v
	}
	a, b := points[i-1], points[i]
	return a.v + (b.v-a.v)*float64(t-a.at)/float64(b.at-a.at)
}
