package prefetch

import (
	"strings"

	"github.com/agentzip/agentzip/internal/units"
)

// A Source is one of the ways to guess pages.
type Source uint8

// Sources.
const (
	SourceRecent         Source = iota // what this sandbox's calls touched
	SourceHotSet                       // what the cohort touched in this kind of call, and in its k-th call
	SourceTemporal                     // what followed a page before in this sandbox
	SourceCohortTemporal               // what followed it in siblings
	SourceStride                       // the next pages of a walk
	NumSources
)

// String names the source in one word.
func (s Source) String() string {
	switch s {
	case SourceRecent:
		return "recent"
	case SourceHotSet:
		return "hotset"
	case SourceTemporal:
		return "temporal"
	case SourceCohortTemporal:
		return "cohort"
	case SourceStride:
		return "stride"
	case NumSources:
	}
	return "unknown"
}

// Sources is a set of them.
type Sources uint8

// Only returns the set of one source.
func Only(s Source) Sources { return 1 << s }

// Has reports whether the set has s.
func (set Sources) Has(s Source) bool { return set&Only(s) != 0 }

// String names the sources, with commas between.
func (set Sources) String() string {
	var names []string
	for s := range NumSources {
		if set.Has(s) {
			names = append(names, s.String())
		}
	}
	return strings.Join(names, ",")
}

// SourceStats says what one source was worth. Pages that several sources expected count for
// each of them.
type SourceStats struct {
	Source Source
	Asked  int // pages asked for because of it
	Held   int // pages left out on purpose that it expected
	Useful int // of those: touched
}

// Accuracy is the estimated share of the pages asked for that are touched; 0 if nothing is
// known.
func (s SourceStats) Accuracy() float64 { return share(s.Useful, s.Held) }

// Stats says what prediction was worth, since the beginning.
type Stats struct {
	Calls  int
	Asked  int // pages asked for
	Held   int // pages left out on purpose
	Useful int // of those: touched
	Missed int // pages that nobody expected and that the guest waited for

	Sources [NumSources]SourceStats

	Footprint units.Bytes // of the predictor, now
}

// Accuracy is the estimated share of the pages asked for that are touched. It rests on the
// pages left out: those that were restored tell nothing.
func (s Stats) Accuracy() float64 { return share(s.Useful, s.Held) }

// Coverage is the estimated share of the pages that would have been waited for that had been asked for.
func (s Stats) Coverage() float64 {
	useful := s.Accuracy() * float64(s.Asked)
	all := useful + float64(s.Useful+s.Missed)
	if all == 0 {
		return 0
	}
	return useful / all
}

func share(part, of int) float64 {
	if of == 0 {
		return 0
	}
	return float64(part) / float64(of)
}

// A tally is SourceStats without the name.
type tally struct{ asked, held, useful int }

func (t *tally) add(o tally) {
	t.asked += o.asked
	t.held += o.held
	t.useful += o.useful
}

// add adds what one call taught.
func (s *Stats) add(c *score) {
	s.Calls++
	s.Asked += c.total.asked
	s.Held += c.total.held
	s.Useful += c.total.useful
	s.Missed += c.missed
	for i, t := range c.sources {
		s.Sources[i].Asked += t.asked
		s.Sources[i].Held += t.held
		s.Sources[i].Useful += t.useful
	}
}

// Merge adds the stats of another sandbox.
func (s *Stats) Merge(o Stats) {
	s.Calls += o.Calls
	s.Asked += o.Asked
	s.Held += o.Held
	s.Useful += o.Useful
	s.Missed += o.Missed
	s.Footprint += o.Footprint
	for i := range s.Sources {
		t := &s.Sources[i]
		t.Source = Source(i) //nolint:gosec // G115: a few
		t.Asked += o.Sources[i].Asked
		t.Held += o.Sources[i].Held
		t.Useful += o.Sources[i].Useful
	}
}
