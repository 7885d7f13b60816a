// Package policy decides when a sandbox may be compressed, restored and put away, and what
// the host can bear.
//
// It is pure: a caller feeds it events and the time, and does what it answers.
// It starts nothing, locks nothing and never reads a clock, so hours of think
// time are tested in microseconds.
//
//	any      --CallStarts----------------------------------------> window     Stop
//	window   --CallEnds (the last one)---------------------------> settling
//	settling --Tick, settle time over; Signal request, result----> gap        Compress, again and again
//	gap      --Tick, human gap over; Signal human_gap------------> away       Park
//	away     --Signal request------------------------------------> gap        Wake
//	settling, gap, away --Signal tool_name, arguments, dispatch--> announced  Restore, at once or when it is time
//	announced --Tick, no call came; Signal request, result-------> gap        Withdraw, if Restore was answered
//
// A sandbox begins in settling: a fresh clone without a call is idle too. Signals during a
// tool window change nothing: the call that runs ends first.
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

// DefaultHumanGap is after how long without a call a person is taken to be away. Of recorded
// LLM gaps p99 is 30 s and none reaches 300 s; doubled, a sandbox whose user has left occupies
// a VMM ten minutes longer.
const DefaultHumanGap = 600 * time.Second

// DefaultPatience is how long an announced call may take to come. Models write commands
// within 1.6 s (p90) and files within 52 s, but the latter send SignalArguments meanwhile.
// Doubled, what a wrong signal brought back stays twice as long.
const DefaultPatience = 30 * time.Second

// An Action is what the owner of a Rhythm has to do now.
type Action uint8

// Actions.
const (
	None     Action = iota
	Compress        // start one pass of eviction
	Stop            // a call has arrived: end the pass under way
	Restore         // a call comes: end the pass under way, undo Park, bring back what the call will touch
	Withdraw        // it did not come: stop restoring. What was brought goes with the next pass
	Park            // nobody is there: put the sandbox away
	Wake            // somebody is: undo Park, restore nothing yet
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
	case Restore:
		return "restore"
	case Withdraw:
		return "withdraw"
	case Park:
		return "park"
	case Wake:
		return "wake"
	}
	return "unknown"
}

// A State is where a sandbox is in its rhythm.
type State uint8

// States.
const (
	Settling  State = iota // no call runs, for less than the settle time
	Gap                    // no call runs: the LLM gap
	Away                   // nobody is there: the human gap
	Announced              // no call runs, but one comes
	Window                 // a call runs
)

// String names the state as logs show it.
func (s State) String() string {
	switch s {
	case Settling:
		return "settling"
	case Gap:
		return "gap"
	case Away:
		return "away"
	case Announced:
		return "announced"
	case Window:
		return "window"
	}
	return "unknown"
}

// Times of a Rhythm. Zero means the default.
type Times struct {
	Settle, Repeat, Patience time.Duration
	HumanGap                 time.Duration // below zero: never
}

// A Rhythm follows the tool calls of one sandbox. It is not safe for concurrent
// use; its owner serialises the calls. Times must not go backwards.
type Rhythm struct {
	times Times // immutable

	state    State
	running  int           // calls that run now
	since    time.Time     // when the last call ended
	lastGap  time.Duration // from one call's end to the next one's start; 0 before the second call
	called   bool          // a call has run
	due      time.Time     // of the next pass
	wait     time.Duration // between the coming pass and the one after it
	parked   bool          // Park was answered in this gap
	at       time.Time     // Announced: when restoring begins
	until    time.Time     // Announced: how long the call may take to come
	tool     string        // Announced: kind of the call, "" if not known
	restored bool          // Announced: Restore was answered
}

// NewRhythm returns the rhythm of a sandbox that has been idle since now.
func NewRhythm(now time.Time, t Times) *Rhythm {
	for _, d := range []struct {
		field    *time.Duration
		standard time.Duration
	}{{&t.Settle, DefaultSettle}, {&t.Repeat, DefaultRepeat}, {&t.Patience, DefaultPatience}} {
		if *d.field <= 0 {
			*d.field = d.standard
		}
	}
	if t.HumanGap == 0 {
		t.HumanGap = DefaultHumanGap
	}
	return &Rhythm{times: t, since: now, due: now.Add(t.Settle), wait: t.Repeat}
}

// CallStarts notes that a tool call begins at now. It answers Stop to the first of several,
// whether or not a pass is under way: a parked sandbox is woken.
func (r *Rhythm) CallStarts(now time.Time) Action {
	r.running++
	if r.state == Window {
		return None
	}
	if r.called {
		r.lastGap = now.Sub(r.since)
	}
	r.state, r.parked, r.called = Window, false, true
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
		r.state, r.since = Settling, now
		r.due, r.wait = now.Add(r.times.Settle), r.times.Repeat
	}
}

// Signal notes what somebody outside has said at now.
func (r *Rhythm) Signal(now time.Time, s Signal) Action {
	switch {
	case r.state == Window:
		return None
	case s.Kind.announces():
		return r.announce(now, s)
	case s.Kind == SignalHumanGap:
		return r.leave()
	case s.Kind == SignalRequest && r.parked:
		r.state, r.parked = Gap, false
		r.since, r.due, r.wait = now, now.Add(r.times.Settle), r.times.Repeat
		return Wake
	case r.state == Announced:
		return r.withdraw(now)
	case r.state == Settling: // the model thinks: nothing to wait for
		r.state, r.due = Gap, now
	}
	return None
}

// announce notes that a call comes.
func (r *Rhythm) announce(now time.Time, s Signal) Action {
	begin := now.Add(max(0, s.Lead))
	if r.state != Announced {
		r.state, r.at, r.tool, r.restored, r.until = Announced, begin, "", false, now
	} else if s.Kind == SignalDispatch && begin.Before(r.at) {
		r.at = begin
	}
	if until := begin.Add(r.times.Patience); r.until.Before(until) {
		r.until = until
	}
	if s.Tool != "" && s.Tool != r.tool {
		r.tool, r.restored = s.Tool, false // what was brought for another kind of call stays
	}
	return r.bring(now)
}

// bring answers Restore once it is time.
func (r *Rhythm) bring(now time.Time) Action {
	if r.restored || now.Before(r.at) {
		return None
	}
	r.restored, r.parked = true, false
	return Restore
}

// withdraw goes back from Announced to the gap, which goes on.
func (r *Rhythm) withdraw(now time.Time) Action {
	r.state = Gap
	if r.parked {
		r.state = Away
	}
	if !r.restored {
		return None
	}
	r.due, r.wait = now, r.times.Repeat
	return Withdraw
}

// leave ends the LLM gap: nobody is there.
func (r *Rhythm) leave() Action {
	r.state = Away
	if r.parked {
		return None
	}
	r.parked = true
	return Park
}

// Deadline returns when Tick should next be called, and false while nothing is due: a tool
// call runs, or nobody is there.
func (r *Rhythm) Deadline() (time.Time, bool) {
	switch r.state {
	case Window, Away:
		return time.Time{}, false
	case Announced:
		switch {
		case r.restored:
			return r.until, true
		case r.parked:
			return r.at, true
		}
		return earliest(r.at, r.due), true
	case Settling, Gap:
	}
	if r.times.HumanGap < 0 {
		return r.due, true
	}
	return earliest(r.due, r.since.Add(r.times.HumanGap)), true
}

func earliest(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Tick answers what is due at now: one thing at a time, so call it until it answers None.
func (r *Rhythm) Tick(now time.Time) Action {
	switch r.state {
	case Window, Away:
		return None
	case Announced:
		if !now.Before(r.until) {
			return r.withdraw(now)
		}
		if a := r.bring(now); a != None || r.restored || r.parked {
			return a
		}
	case Settling, Gap:
		if r.times.HumanGap >= 0 && now.Sub(r.since) >= r.times.HumanGap {
			return r.leave()
		}
	}
	if now.Before(r.due) {
		return None
	}
	if r.state == Settling {
		r.state = Gap
	}
	r.due = now.Add(r.wait)
	r.wait *= repeatGrowth
	return Compress
}

// Hurry makes a pass due at now if no call runs or comes: the host is short of memory.
func (r *Rhythm) Hurry(now time.Time) {
	if (r.state == Settling || r.state == Gap) && now.Before(r.due) {
		r.due, r.wait = now, r.times.Repeat
	}
}

// State returns where the sandbox is.
func (r *Rhythm) State() State { return r.state }

// Tool returns the kind of the call that was announced, "" if it is not known.
func (r *Rhythm) Tool() string {
	if r.state != Announced {
		return ""
	}
	return r.tool
}

// Calls returns how many tool calls run now.
func (r *Rhythm) Calls() int { return r.running }

// LastGap returns how long no call had run before the last one began; false if there were
// not yet two.
func (r *Rhythm) LastGap() (time.Duration, bool) { return r.lastGap, r.lastGap > 0 }

// InGap returns for how long no call has run, 0 while one does.
func (r *Rhythm) InGap(now time.Time) time.Duration {
	if r.state == Window {
		return 0
	}
	return now.Sub(r.since)
}
