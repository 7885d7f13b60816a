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

// observe notes pages. Many at once count for no more than confidence.
func (e *estimate) observe(s sample) {
	if s.seen == 0 {
		return
	}
	h, m := float32(s.touched), float32(s.seen)
	if m > confidence {
		h, m = h*confidence/m, confidence
	}
	if e.n+m > 2*confidence {
		e.hits, e.n = e.hits/2, e.n/2
	}
	e.hits, e.n = e.hits+h, e.n+m
}

// Levels of heat, beside 0..maxHeat: nobody asked.
const (
	noHeat = maxHeat + 1
	levels = noHeat + 1
)

// Bands of heat, where the whole heat would make too many cases to learn from.
const bands = 3

// band returns the band of a level.
func band(level int) int {
	switch {
	case level == noHeat || level < 2:
		return 0
	case level < 5:
		return 1
	}
	return 2
}

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
	kind   [numClasses][levels][levels][bands]estimate // own heat, that of this kind of call, band of that in all calls
	any    [numClasses][levels][levels]estimate        // own heat, that in all calls: the kind is new or not known
	number [numClasses][levels][bands]estimate         // of pages that are new here: heat of the k-th call, band of the others
}

func newCalibration() calibration {
	var c calibration
	for k := range c.any {
		for own := range levels {
			for other := range levels {
				p := prior(class(k), own, other) //nolint:gosec // G115: two
				c.any[k][own][other] = guess(p)
				for b := range bands {
					c.kind[k][own][other][b] = guess(p)
				}
			}
			for b := range bands {
				c.number[k][own][b] = guess(priorNumber(own))
			}
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
	kind    [numClasses][levels][levels][bands]sample
	any     [numClasses][levels][levels]sample
	number  [numClasses][levels][bands]sample
	follow  [NumSources]sample
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

func (c *calibration) learn(s *score) {
	for k := range c.any {
		for own := range levels {
			for other := range levels {
				c.any[k][own][other].observe(s.any[k][own][other])
				for b := range bands {
					c.kind[k][own][other][b].observe(s.kind[k][own][other][b])
				}
			}
			for b := range bands {
				c.number[k][own][b].observe(s.number[k][own][b])
			}
		}
	}
}
