package prefetch

// confidence is how many observations an estimate remembers: above it old ones count half.
// Halved, an estimate jumps by 5 % with each held-out page; doubled, a predictor that went
// wrong is believed for one call longer.
const confidence = 64

// priorWeight is how many observations what we expected before the first one counts for.
const priorWeight = 6

// An estimate is the probability that a page which was expected for a certain reason is
// touched. It learns from pages of which it is known for certain: those left out on purpose
// and those that were not expected enough.
type estimate struct{ hits, n float32 }

// guess returns an estimate that starts at p.
func guess(p float32) estimate { return estimate{hits: p * priorWeight, n: priorWeight} }

func (e *estimate) p() float32 { return e.hits / e.n }

// observe notes n pages, of which hits were touched. Many at once count for no more than
// confidence.
func (e *estimate) observe(hits, n int) {
	if n == 0 {
		return
	}
	h, m := float32(hits), float32(n)
	if m > confidence {
		h, m = h*confidence/m, confidence
	}
	if e.n+m > 2*confidence {
		e.hits, e.n = e.hits/2, e.n/2
	}
	e.hits, e.n = e.hits+h, e.n+m
}

// Levels of the hot set, beside heat 0..maxHeat: this kind of call was never seen.
const (
	noHeat = maxHeat + 1
	levels = noHeat + 1
)

// A class of pages: what it means to restore them, and how wrong it is to do so in vain,
// differ.
type class uint8

const (
	classEvicted class = iota // decode and install
	classShared               // zeros or the template's page: predicted to be written, so a copy ahead
	numClasses
)

// A calibration says how likely a page is touched by the coming call, from the heat that
// the sandbox's own calls have given it, the heat of this kind of call in the cohort, and
// the heat of the k-th call.
type calibration struct {
	joint  [numClasses][levels][levels]estimate // own heat, heat of the kind of call
	number [numClasses][levels]estimate         // heat of the k-th call
}

func newCalibration() calibration {
	var c calibration
	for k := range c.joint {
		for own := range levels {
			for kind := range levels {
				c.joint[k][own][kind] = guess(prior(class(k), own, kind))
			}
			c.number[k][own] = guess(priorNumber(own))
		}
	}
	return c
}

// prior is what was measured on other sandboxes, roughly: TestCalibrationPriors has it.
func prior(k class, own, kind int) float32 {
	if k == classShared {
		own /= 2 // the guest writes the pages that the last call freed, if it needs as many
	}
	p := float32(own) / (maxHeat + 2)
	if own == noHeat {
		p = 0
	}
	switch {
	case kind == noHeat:
		return p
	case own == 0 || own == noHeat:
		return float32(kind) / (maxHeat + 2)
	}
	return p/2 + float32(kind)/(maxHeat+2)/2
}

func priorNumber(heat int) float32 {
	if heat == noHeat {
		return 0
	}
	return float32(heat) / (2 * maxHeat)
}

// A score is what one call taught about the guesses.
type score struct {
	joint   [numClasses][levels][levels]sample
	number  [numClasses][levels]sample
	sources [NumSources]tally
	total   tally
	missed  int
}

// A sample counts pages: those that were touched, and all.
type sample struct{ touched, seen uint32 }

func (s *sample) add(touched bool, weight uint32) {
	if s.seen += weight; touched {
		s.touched += weight
	}
}

// note counts a page of which it is known whether it was touched. One that was left out on
// purpose counts for all those like it that were restored. What a page's own heat alone is
// worth is learned too: that is all there is before the kind of call is known.
func (s *score) note(c class, own, kind, number int, touched bool, weight uint32) {
	s.joint[c][own][kind].add(touched, 1)
	if kind != noHeat {
		s.joint[c][own][noHeat].add(touched, weight)
	}
	if number > 0 {
		s.number[c][number].add(touched, weight)
	}
}

func (c *calibration) learn(s *score) {
	for k := range c.joint {
		for own := range levels {
			for kind := range levels {
				n := s.joint[k][own][kind]
				c.joint[k][own][kind].observe(int(n.touched), int(n.seen))
			}
			n := s.number[k][own]
			c.number[k][own].observe(int(n.touched), int(n.seen))
		}
	}
}
