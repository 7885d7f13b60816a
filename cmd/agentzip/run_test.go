package main

import (
	"testing"

	"github.com/agentzip/agentzip/internal/guestlink"
)

func TestRunExitsAsAShellWouldWhateverEndedTheCommand(t *testing.T) {
	tests := []struct {
		exit guestlink.Exit
		want int
	}{
		{guestlink.Exit{}, 0},
		{guestlink.Exit{Code: 255}, 255},
		{guestlink.Exit{Code: -1, Signal: "killed"}, 137},
		{guestlink.Exit{Code: -1, Signal: "segmentation fault"}, 139},
		{guestlink.Exit{Code: -1, Signal: "aborted (core dumped)"}, 134},
		{guestlink.Exit{Code: -1, Signal: "user defined signal 1"}, 138},
		{guestlink.Exit{Code: -1, Signal: "signal 64"}, 192},
		{guestlink.Exit{Code: -1, Signal: "nonsense"}, runFailed},
		{guestlink.Exit{Code: -1, Signal: "killed", TimedOut: true}, timedOut},
	}
	for _, tt := range tests {
		if got := commandCode(tt.exit); got != tt.want {
			t.Errorf("commandCode(%+v) = %d, want %d", tt.exit, got, tt.want)
		}
	}
}
