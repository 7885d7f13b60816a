package report

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheCallsThatWaitedLongestAreNamedWithTheirReasons(t *testing.T) {
	t.Parallel()
	r := &Report{
		Plan: Plan{Trajectories: []Trajectory{{Sandbox: "s1", Commands: []string{"ls", "pytest -x\nmore", "cat"}}}},
		Runs: []Run{
			{Mode: "off", Calls: []Call{{Sandbox: "s1", N: 1, StallMS: 900, Faults: 1}}},
			{Mode: "on", Calls: []Call{
				{Sandbox: "s1", N: 1, MS: 120, StallMS: 0.8, Faults: 12},
				{
					Sandbox: "s1", N: 2, MS: 3000, StallMS: 43.2, Faults: 30, Ahead: 700, Wasted: 12,
					Kinds: map[string]FaultCost{"protected": {Count: 10}, "evicted": {Count: 20}, "zero": {}},
					Ways:  map[string]FaultCost{"delta": {Count: 20}},
				},
				{Sandbox: "s1", N: 3, MS: 5},
			}},
		},
	}
	var b bytes.Buffer
	r.waits(&b)
	want := []string{
		"", "the calls that waited longest for memory:",
		"  s1 call 2 waited 43 ms of 3.0 s: 30 faults (evicted 20, protected 10; kept as delta 20), 700 pages brought ahead, 12 before without a sign of use  $ pytest -x ...",
		"  s1 call 1 waited 800 µs of 120 ms: 12 faults  $ ls", "",
	}
	if diff := cmp.Diff(want, strings.Split(b.String(), "\n")); diff != "" {
		t.Errorf("waits (-want +got):\n%s", diff)
	}
}

func TestNobodyIsNamedWhenNobodyWaited(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	(&Report{Runs: []Run{{Mode: "on", Calls: []Call{{Sandbox: "s1", N: 1}}}}}).waits(&b)
	if b.Len() > 0 {
		t.Errorf("got %q, want nothing", b.String())
	}
}
