package prefetch

import "github.com/agentzip/agentzip/internal/units"

// Streams of a sandbox: a guest with a few threads walks through as many arrays at once.
const (
	maxStreams  = 8
	deltas      = 8  // remembered of a stream
	streamReach = 64 // a fault within so many pages of a stream's last one belongs to it
)

// strides guess that a walk goes on: Leap's majority vote over the recent deltas (ATC 2020), for
// several streams at once, so that two walks that take turns do not hide each other.
type strides struct {
	streams [maxStreams]stream
	clock   uint32
}

type stream struct {
	last  units.Frame
	used  uint32 // strides.clock; 0: there is no such stream
	n     uint8  // deltas seen, at most `deltas`
	at    uint8  // where the next one goes
	delta [deltas]int8
}

// follow notes a fault and guesses the next pages of its stream.
func (s *strides) follow(f units.Frame, n int, want func(units.Frame) bool, dst []units.Frame) []units.Frame {
	s.clock++
	st := s.stream(f)
	d := int64(f) - int64(st.last)
	known := st.used > 0
	st.last, st.used = f, s.clock
	if !known || d == 0 {
		return dst
	}
	st.delta[st.at] = int8(d) //nolint:gosec // G115: within streamReach
	st.at = (st.at + 1) % deltas
	st.n = min(st.n+1, deltas)
	step, ok := st.majority()
	if !ok {
		return dst
	}
	for i := int64(1); i <= int64(n); i++ {
		next := int64(f) + i*step
		if next < 0 || next > 1<<32-1 {
			break
		}
		if want(units.Frame(next)) {
			dst = append(dst, units.Frame(next))
		}
	}
	return dst
}

// stream returns the stream that the fault belongs to, or the one that was not used for the
// longest time, emptied.
func (s *strides) stream(f units.Frame) *stream {
	oldest := &s.streams[0]
	for i := range s.streams {
		st := &s.streams[i]
		if d := int64(f) - int64(st.last); st.used > 0 && d >= -streamReach && d <= streamReach {
			return st
		}
		if st.used < oldest.used {
			oldest = st
		}
	}
	*oldest = stream{}
	return oldest
}

// majority returns the delta that more than half of the latest ones are: of the latest 4, or
// else of all.
func (st *stream) majority() (int64, bool) {
	for _, n := range [...]uint8{deltas / 2, deltas} {
		if n = min(n, st.n); n < 2 {
			return 0, false
		}
		best, votes := int8(0), 0
		for i := range n {
			d := st.back(i)
			switch {
			case votes == 0:
				best, votes = d, 1
			case d == best:
				votes++
			default:
				votes--
			}
		}
		count := uint8(0)
		for i := range n {
			if st.back(i) == best {
				count++
			}
		}
		if 2*count > n {
			return int64(best), true
		}
	}
	return 0, false
}

// back returns the i-th latest delta.
func (st *stream) back(i uint8) int8 { return st.delta[(st.at+2*deltas-1-i)%deltas] }
