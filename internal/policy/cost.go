package policy

import "time"

// Costs say what it takes to keep a page compressed through one gap. They are times of one
// core, a page each.
type Costs struct {
	Encode  time.Duration // find it, encode it, verify it
	Drop    time.Duration // free it when its encoding is still valid
	Restore time.Duration // bring it back ahead of its use
	// PageSecond is how much of a core the freed memory of a page is worth, each second.
	PageSecond time.Duration
}

// DefaultCosts are measured, but for PageSecond: in LLM gaps cores are idle, and a gap that
// lasts two seconds is to pay for encoding a page that comes back with the next call. Half as
// much, gaps below four seconds (half of them) keep a sandbox's warm pages, some 3 MB.
var DefaultCosts = Costs{
	Encode:     60 * time.Microsecond,
	Drop:       2 * time.Microsecond,
	Restore:    9 * time.Microsecond,
	PageSecond: 35 * time.Microsecond,
}

// unknownGap is how long a gap is taken to last as long as a cohort's are not known: the
// median of recorded ones.
const unknownGap = 4800 * time.Millisecond

// Payback returns how long a gap must last for a page to be worth compressing that the next
// call will touch (warm), and whose encoding is still valid (clean) or not.
func (c Costs) Payback(clean bool) time.Duration {
	cost := c.Encode + c.Restore
	if clean {
		cost = c.Drop + c.Restore
	}
	return time.Duration(float64(cost) / float64(c.PageSecond) * float64(time.Second))
}

// A Temperature says which pages a pass takes.
type Temperature uint8

// Temperatures.
const (
	Cold  Temperature = iota // only pages that the next call will not touch: they pay in every gap that comes
	Clean                    // those, and warm ones that need no encoding
	Warm                     // all
)

// String names the temperature as logs show it.
func (t Temperature) String() string {
	switch t {
	case Cold:
		return "cold"
	case Clean:
		return "clean"
	case Warm:
		return "warm"
	}
	return "unknown"
}

// Reach says which pages are worth compressing in a gap that has lasted for elapsed, when the
// cohort's gaps are as gaps says. A host that is short takes all.
func (c Costs) Reach(gaps *Durations, elapsed time.Duration, host Level) Temperature {
	if host > Normal {
		return Warm
	}
	left, known := gaps.Left(elapsed)
	if !known { // no gap of the cohort was that long, or none has ended
		left = max(unknownGap, elapsed)
	}
	switch {
	case left >= c.Payback(false):
		return Warm
	case left >= c.Payback(true):
		return Clean
	}
	return Cold
}
