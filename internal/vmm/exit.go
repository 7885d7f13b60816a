package vmm

import (
	"errors"
	"fmt"
)

// A Cause says why a machine ended.
type Cause uint8

const (
	Alive         Cause = iota // it has not ended
	GuestPowerOff              // the guest switched itself off
	GuestReboot                // the guest rebooted, which ends a machine (-no-reboot)
	GuestPanic                 // the guest's kernel panicked
	Killed                     // Kill was called, or the Host was closed
	Crashed                    // the VMM died of a signal or with an error status
	OutOfMemory                // the host's OOM killer or the cgroup's limit ended the VMM
	HostGone                   // the shim left because this process's end of its socket closed
)

var causeNames = [...]string{
	"alive", "guest powered off", "guest rebooted", "guest panicked", "killed",
	"VMM crashed", "VMM killed by the host's OOM killer", "VMM lost its host process",
}

// String returns the cause in words.
func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return fmt.Sprintf("cause %d", uint8(c))
}

// ErrExited is wrapped by every error that a dead machine causes. Nothing was
// done, and nothing of the machine is left.
var ErrExited = errors.New("machine has ended")

// An Exit is how a machine ended.
type Exit struct {
	Cause  Cause
	Code   int    // exit status of the VMM; -1 if a signal ended it
	Signal string // the signal's name, if one ended it
	Detail string // the last line that explains it: of QMP, the VMM's log or the console
}

// Err returns nil for a machine that is alive and an error wrapping ErrExited
// for any other.
func (e Exit) Err() error {
	if e.Cause == Alive {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrExited, e)
}

// String returns the cause and, where known, the signal, status and detail.
func (e Exit) String() string {
	s := e.Cause.String()
	switch {
	case e.Signal != "":
		s += ", signal " + e.Signal
	case e.Code != 0:
		s += fmt.Sprintf(", exit status %d", e.Code)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}
