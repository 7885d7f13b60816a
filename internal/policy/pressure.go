package policy

import (
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// A Level says how short of memory a host is.
type Level uint8

// Levels.
const (
	Normal Level = iota
	Tight        // compress harder: all pages, sooner; restore nothing on a mere guess
	Full         // as Tight, and take no new sandbox
)

// String names the level as logs show it.
func (l Level) String() string {
	switch l {
	case Normal:
		return "normal"
	case Tight:
		return "tight"
	case Full:
		return "full"
	}
	return "unknown"
}

// A HostSample is a host's memory at one moment.
type HostSample struct {
	At        time.Time
	Total     units.Bytes
	Available units.Bytes // the kernel's MemAvailable: what can be had without swapping
	// Some and Full are the shares of the last ten seconds, in percent, in which some or all
	// tasks waited for memory (PSI). Without StallKnown they mean nothing.
	Some, Full float64
	StallKnown bool
	PoolUsed   float64     // share of its limit that the fullest pool has used, 0 to 1
	Reserve    units.Bytes // what the next calls of all sandboxes bring back
}

// Limits of a Pressure. Zero means the default.
type Limits struct {
	Floor units.Bytes   // of what is available above the reserve; the default is 1/32 of the memory, at least 256 MiB
	Calm  time.Duration // how long a level must not have been reached before it ends
}

const (
	floorShare = 32
	floorLeast = 256 * units.MiB
	// defaultCalm: doubled, new sandboxes are refused 10 s longer than needed; halved, the
	// level flutters with each wave of calls.
	defaultCalm = 10 * time.Second
	// Shares of time at which tasks wait for memory: the kernel's documentation
	// (Documentation/accounting/psi.rst) calls Some the point where latency suffers and Full
	// the one where throughput is lost. systemd-oomd kills at 60 % of Full.
	someTight, fullTight = 10.0, 2.0
	fullFull             = 10.0
	// poolTight leaves room for one pass of a sandbox in a pool of 4 GiB.
	poolTight = 0.9
)

// A Pressure follows a host's memory. It rises at once and falls slowly. Not safe for
// concurrent use.
type Pressure struct {
	limits Limits // immutable

	level Level
	last  HostSample
	when  [Full + 1]time.Time // when each level was last called for
}

// NewPressure returns the pressure of a host of which nothing is known: Normal.
func NewPressure(l Limits) *Pressure {
	if l.Calm <= 0 {
		l.Calm = defaultCalm
	}
	return &Pressure{limits: l}
}

// Note takes a sample and returns the level. Samples come in the order of their times.
func (p *Pressure) Note(s HostSample) Level {
	p.last = s
	now := p.judge(s)
	for l := Tight; l <= now; l++ {
		p.when[l] = s.At
	}
	for p.level > now && s.At.Sub(p.when[p.level]) >= p.limits.Calm {
		p.level--
	}
	p.level = max(p.level, now)
	return p.level
}

// judge is the level that one sample calls for.
func (p *Pressure) judge(s HostSample) Level {
	free, floor := s.Available-s.Reserve, p.floor(s)
	switch {
	case free < floor, s.StallKnown && s.Full >= fullFull:
		return Full
	case free < 2*floor, s.StallKnown && (s.Some >= someTight || s.Full >= fullTight), s.PoolUsed >= poolTight:
		return Tight
	}
	return Normal
}

func (p *Pressure) floor(s HostSample) units.Bytes {
	if p.limits.Floor > 0 {
		return p.limits.Floor
	}
	return max(floorLeast, s.Total/floorShare)
}

// Level returns the level of the last sample.
func (p *Pressure) Level() Level { return p.level }

// A Refusal says why a host takes no new sandbox.
type Refusal struct {
	Level                      Level
	Available, Reserve, Needed units.Bytes
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("memory is short (%s): %v available, %v kept for the calls to come, %v needed for one more",
		r.Level, r.Available, r.Reserve, r.Needed)
}

// Admit says whether another sandbox may start that needs so much until it is compressed,
// and its first call after that. What was admitted since the last sample counts: pass its sum
// in needed. The error is a *Refusal.
func (p *Pressure) Admit(needed units.Bytes) error {
	if p.last.At.IsZero() {
		return nil // nothing is known
	}
	if s := p.last; p.level == Full || s.Available-s.Reserve-needed < p.floor(s) {
		return &Refusal{Level: p.level, Available: s.Available, Reserve: s.Reserve, Needed: needed}
	}
	return nil
}

// A Need estimates how much memory a sandbox's next call brings back: the most that one did,
// of which older ones count less. The zero value has seen no call.
type Need struct {
	most units.Bytes
	seen bool
}

// needDecay is what is left of an old maximum after each call: after ten calls a third.
const needDecay = 0.9

// FirstNeed is what a call brings back as long as none was seen: the largest of the main job
// touches 7,600 pages.
const FirstNeed = 32 * units.MiB

// Note adds what one call brought back.
func (n *Need) Note(b units.Bytes) {
	n.most = max(b, units.Bytes(needDecay*float64(n.most)))
	n.seen = true
}

// Bytes returns the estimate.
func (n *Need) Bytes() units.Bytes {
	if !n.seen {
		return FirstNeed
	}
	return n.most
}
