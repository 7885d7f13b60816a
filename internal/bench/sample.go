package bench

import (
	"time"

	"github.com/agentzip/agentzip/internal/report"
)

// A sample is what the fleet cost at one moment.
type sample struct {
	at    time.Duration // from the run's start: the middle of the reading
	fleet FleetUsage
	boxes []*BoxUsage // by lane; nil when the sandbox was not running
}

// sampleUntil reads the fleet's memory until stop is closed, and once more then.
func (r *run) sampleUntil(stop <-chan struct{}, fleet Fleet) {
	tick := time.NewTicker(r.cfg.SampleEvery)
	defer tick.Stop()
	for {
		s, err := r.read(fleet)
		if err != nil {
			r.failures++
			if r.failure == nil {
				r.failure = err
			}
		} else {
			r.samples = append(r.samples, s)
			r.cfg.Display.Rows(r.rows(time.Since(r.begin), s))
		}
		select {
		case <-tick.C:
		case <-stop:
			return
		}
	}
}

// read takes one sample. A sandbox that closes meanwhile counts as not running.
func (r *run) read(fleet Fleet) (sample, error) {
	before := time.Since(r.begin)
	s := sample{boxes: make([]*BoxUsage, len(r.lanes))}
	for i, l := range r.lanes {
		box := l.look().box
		if box == nil {
			continue
		}
		u, err := box.Usage()
		switch {
		case err == nil:
			s.boxes[i] = &u
		case l.look().box != nil:
			return sample{}, err
		}
	}
	u, err := fleet.Usage()
	if err != nil {
		return sample{}, err
	}
	s.fleet = u
	s.at = (before + time.Since(r.begin)) / 2
	return s, nil
}

// private returns the private memory of lane i at the sample: what is its own,
// and of what the sandboxes share a part in proportion to its encoded bytes.
func (s *sample) private(i int) (bytes float64, running bool) {
	u := s.boxes[i]
	if u == nil {
		return 0, false
	}
	var encoded, own float64
	n := 0
	for _, b := range s.boxes {
		if b != nil {
			encoded += float64(b.Encoded)
			own += float64(b.Encoded + b.PageTables)
			n++
		}
	}
	share := 1 / float64(n)
	if encoded > 0 {
		share = float64(u.Encoded) / encoded
	}
	shared := max(0, float64(s.fleet.PoolShare())-own)
	return float64(u.ResidentPrivate+u.Encoded+u.PageTables) + shared*share, true
}

// lanePoints are the private memory of lane i over time, while it ran.
func lanePoints(samples []sample, i int) []point {
	var out []point
	for k := range samples {
		if v, ok := samples[k].private(i); ok {
			out = append(out, point{samples[k].at, v})
		}
	}
	return out
}

// fleetPoints are a figure of the whole fleet over time.
func fleetPoints(samples []sample, f func(FleetUsage) float64) []point {
	out := make([]point, len(samples))
	for k, s := range samples {
		out[k] = point{s.at, f(s.fleet)}
	}
	return out
}

// window returns the start of the run's first and the end of its last call.
func (r *run) window() (from, to time.Duration, ok bool) {
	for _, l := range r.lanes {
		f, t, some := l.window()
		if !some {
			continue
		}
		if !ok || f < from {
			from = f
		}
		to, ok = max(to, t), true
	}
	return from, to, ok
}

// record is the sample as the report keeps it.
func (s *sample) record() report.Sample {
	u := s.fleet
	out := report.Sample{
		S: s.at.Seconds(), Resident: int64(u.ResidentPrivate), Pool: int64(u.PoolFootprint), PageTables: int64(u.PageTables),
		Dictionaries: int64(u.Dictionaries), Index: int64(u.Index), VMMHeap: int64(u.VMMHeap), Pooled: u.Pooled,
	}
	for i := range s.boxes {
		v, ok := s.private(i)
		if !ok {
			v = -1
		}
		out.Sandboxes = append(out.Sandboxes, int64(v))
	}
	return out
}
