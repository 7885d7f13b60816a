// Package policy decides when a sandbox may be compressed.
//
// It is pure: a caller feeds it events and the time, and does what it answers.
// It starts nothing, locks nothing and never reads a clock, so hours of think
// time are tested in microseconds.
//
//	         CallStarts                    CallEnds (last one)
//	gap ------------------> tool window ----------------------> settling
//	 ^                           ^                                  |
//	 |                           +------------ CallStarts ----------+
//	 +-------------------------- Tick, settle time has passed ------+
//
// A sandbox begins in settling: a fresh clone without a call is idle too.
package policy

import "time"

// DefaultSettle is how long no tool call must have run before the gap opens.
// Agents that issue several calls in one reply leave 1-20 ms between them;
// doubled, every gap (median 4.8 s) loses another 50 ms of savings; halved, such
// bursts start a pass of compression that is cancelled at once.
const DefaultSettle = 50 * time.Millisecond

// DefaultRepeat is the wait before the second pass of a gap. An idle guest's
// timers bring some hundred pages back within a second; one more pass drops most
// of them for good. Each further pass waits four times longer, so that a guest
// left alone for an hour costs about ten passes, nearly all of clean pages.
const DefaultRepeat = time.Second

// repeatGrowth is by how much the wait grows from pass to pass.
const repeatGrowth = 4

// An Action is what the owner of a Rhythm has to do now.
type Action uint8

// Actions.
const (
	None     Action = iota
	Compress        // start one pass of eviction
	Stop            // stop compressing: a call has arrived
)

// String names the action as logs show it.
func (a Action) String() string {
	switch a {
	case None:
		return "none"
	case Compress:
		return "compress"
	case Stop:
		return "stop"
	}
	return "unknown"
}

// A Rhythm follows the tool calls of one sandbox. It is not safe for concurrent
// use; its owner serialises the calls. Times must not go backwards.
type Rhythm struct {
	settle time.Duration // immutable
	repeat time.Duration // immutable

	running int           // tool calls running now
	open    bool          // the gap is open: compression may run
	due     time.Time     // when Tick next has something to do, while running == 0
	wait    time.Duration // between the coming pass and the one after it
}

// NewRhythm returns the rhythm of a sandbox that has been idle since now.
// A settle or repeat of zero or less means the default.
func NewRhythm(now time.Time, settle, repeat time.Duration) *Rhythm {
	if settle <= 0 {
		settle = DefaultSettle
	}
	if repeat <= 0 {
		repeat = DefaultRepeat
	}
	return &Rhythm{settle: settle, repeat: repeat, due: now.Add(settle), wait: repeat}
}

// CallStarts notes that a tool call begins. It answers Stop if the gap was open,
// whether or not a pass is still under way.
func (r *Rhythm) CallStarts() Action {
	r.running++
	if !r.open {
		return None
	}
	r.open = false
	return Stop
}

// CallEnds notes that a tool call has ended, at now.
//
// Preconditions: a CallStarts that has not been ended.
func (r *Rhythm) CallEnds(now time.Time) {
	if r.running == 0 {
		panic("policy: a call ended that never started")
	}
	r.running--
	if r.running == 0 {
		r.due = now.Add(r.settle)
		r.wait = r.repeat
	}
}

// Deadline returns when Tick should next be called, and false while a tool call
// runs: then nothing is due.
func (r *Rhythm) Deadline() (time.Time, bool) {
	return r.due, r.running == 0
}

// Tick answers Compress when a pass is due at now. The first one opens the gap.
func (r *Rhythm) Tick(now time.Time) Action {
	if r.running > 0 || now.Before(r.due) {
		return None
	}
	r.open = true
	r.due = now.Add(r.wait)
	r.wait *= repeatGrowth
	return Compress
}

// Open reports whether the gap is open.
func (r *Rhythm) Open() bool { return r.open }

// Calls returns how many tool calls run now.
func (r *Rhythm) Calls() int { return r.running }
