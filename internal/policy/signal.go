package policy

import (
	"fmt"
	"time"
)

// A SignalKind is what somebody outside knows of a sandbox's calls.
type SignalKind uint8

// Kinds of signals, in the order in which one turn of an agent sends them.
const (
	SignalRequest   SignalKind = iota // the agent has asked its model: no call comes for a while
	SignalToolName                    // the model has named the tool of its next call
	SignalArguments                   // the model writes the call's arguments
	SignalDispatch                    // the call is on its way
	SignalResult                      // the agent has its result: no call follows before the next request
	SignalHumanGap                    // the agent waits for a person
	numSignals
)

// signalNames are the names that clients use.
var signalNames = [numSignals]string{"request", "tool_name", "arguments", "dispatch", "result", "human_gap"}

// String is the name that clients use.
func (k SignalKind) String() string {
	if k < numSignals {
		return signalNames[k]
	}
	return "unknown"
}

// ParseSignal returns the kind of a name.
func ParseSignal(name string) (SignalKind, error) {
	for k, n := range signalNames {
		if n == name {
			return SignalKind(k), nil //nolint:gosec // G115: below numSignals
		}
	}
	return 0, fmt.Errorf("parse signal %q: unknown kind", name)
}

// announces reports whether the signal says that a call comes.
func (k SignalKind) announces() bool {
	return k == SignalToolName || k == SignalArguments || k == SignalDispatch
}

// A Signal is one message from outside. It can be wrong, late, missing or repeated: it costs
// time then, never more.
type Signal struct {
	Kind SignalKind
	Tool string // kind of the call that comes, "" if not known
	// Lead is how soon the call comes at the earliest, as far as is known: restoring waits
	// until then. 0: it may come at once.
	Lead time.Duration
}
