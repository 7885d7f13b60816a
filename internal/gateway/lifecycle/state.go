package lifecycle

import "fmt"

// A State is where a sandbox is in its life.
type State uint8

// States. What a client sees of each is in the package doc.
const (
	Absent   State = iota // not known yet, or no longer
	Creating              // a VM is being cloned
	Running               // accepts requests
	Copying               // as Running; a snapshot or forks are being taken
	Pausing               // its memory is being put away
	Paused                // no VM; what it was is kept
	Resuming              // a VM is being made from what was kept
	Killing               // its end was ordered and is certain
	Gone                  // nothing of it is left
)

var stateNames = [...]string{"absent", "creating", "running", "copying", "pausing", "paused", "resuming", "killing", "gone"}

// String names the state in one word.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// An Event is what moves a sandbox from one state to another. A verb orders
// something, a participle says how what was ordered ended.
type Event uint8

// Events.
const (
	Create Event = iota
	Created
	CreateFailed
	Pause
	PauseDone
	PauseFailed // nothing was changed
	Resume
	ResumeDone
	ResumeFailed // what was kept is still kept
	Copy
	CopyDone // also when the copy failed: the source is as it was
	Kill
	Killed
	Died // the VM ended by itself
)

var eventNames = [...]string{
	"create", "created", "create failed", "pause", "pause done", "pause failed", "resume", "resume done", "resume failed",
	"copy", "copy done", "kill", "killed", "died",
}

// String names the event in one or two words.
func (e Event) String() string {
	if int(e) < len(eventNames) {
		return eventNames[e]
	}
	return fmt.Sprintf("event %d", uint8(e))
}

// transitions is the whole machine: what is not in it cannot happen.
var transitions = map[State]map[Event]State{
	Absent:   {Create: Creating},
	Creating: {Created: Running, CreateFailed: Gone, Kill: Killing},
	Running:  {Pause: Pausing, Copy: Copying, Kill: Killing, Died: Gone},
	Copying:  {CopyDone: Running, Kill: Killing, Died: Gone},
	Pausing:  {PauseDone: Paused, PauseFailed: Running, Kill: Killing, Died: Gone},
	Paused:   {Resume: Resuming, Kill: Killing},
	Resuming: {ResumeDone: Running, ResumeFailed: Paused, Kill: Killing},
	Killing:  {Killed: Gone},
	Gone:     {},
}

// Next returns the state after e, or false if e is not allowed in s.
func Next(s State, e Event) (State, bool) {
	to, ok := transitions[s][e]
	return to, ok
}
