package bench

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/agentzip/agentzip/internal/report"
)

// compare holds every call of b against the same call of a, the run without
// compression. notCompared names calls whose outcome says nothing because the
// run without compression timed out in them.
func compare(a, b *run) (diffs []report.Difference, notCompared []string) {
	for i, la := range a.lanes {
		lb := b.lanes[i]
		steps := la.plan.Trajectory.Steps
		for n, step := range steps {
			add := func(field, diff string) {
				diffs = append(diffs, report.Difference{Run: b.number, Sandbox: la.plan.Name, Call: n + 1, Command: step.Shell, Field: field, Diff: diff})
			}
			if n >= len(la.calls) || la.calls[n].err != nil {
				break // the baseline's sandbox died; Measure has said so
			}
			if n >= len(lb.calls) {
				add("missing", "the sandbox had ended before this call")
				break
			}
			if err := lb.calls[n].err; err != nil {
				add("sandbox", err.Error())
				break
			}
			if la.calls[n].res.TimedOut && !lb.calls[n].res.TimedOut {
				notCompared = append(notCompared, fmt.Sprintf("%s call %d: timed out without compression", la.plan.Name, n+1))
				continue
			}
			compareCall(la.calls[n].res, lb.calls[n].res, add)
		}
		if la.final != nil && lb.final != nil && la.final.err == nil && lb.final.err == nil {
			compareCall(la.final.res, lb.final.res, func(field, diff string) {
				diffs = append(diffs, report.Difference{Run: b.number, Sandbox: la.plan.Name, Command: finalCommand, Field: field, Diff: diff})
			})
		} else if la.final != nil && la.final.err == nil && lb.final != nil {
			diffs = append(diffs, report.Difference{Run: b.number, Sandbox: la.plan.Name, Command: finalCommand, Field: "sandbox", Diff: lb.final.err.Error()})
		}
	}
	return diffs, notCompared
}

// compareCall reports each field in which two outcomes differ. Where both timed
// out, how far they got is a matter of time and says nothing.
func compareCall(a, b CallResult, add func(field, diff string)) {
	if a.TimedOut && b.TimedOut {
		return
	}
	if b.TimedOut {
		add("timeout", "timed out with compression only")
		return
	}
	if a.Exit != b.Exit {
		add("exit", fmt.Sprintf("exit %d without compression, %d with", a.Exit, b.Exit))
	}
	if a.Signal != b.Signal {
		add("signal", fmt.Sprintf("signal %q without compression, %q with", a.Signal, b.Signal))
	}
	for _, o := range []struct {
		name string
		a, b []byte
	}{{"stdout", a.Stdout, b.Stdout}, {"stderr", a.Stderr, b.Stderr}} {
		if x, y := normalise(o.a), normalise(o.b); !bytes.Equal(x, y) {
			add(o.name, lineDiff(string(x), string(y)))
		}
	}
}

// Bounds of a printed difference.
const (
	diffContext = 2   // equal lines before the first that differs
	diffLines   = 6   // differing lines shown of each side
	diffWidth   = 200 // characters of a line
)

// lineDiff shows where two texts part: the line number, what comes before, and
// the first lines of both sides from there.
func lineDiff(a, b string) string {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	i := 0
	for i < len(la) && i < len(lb) && la[i] == lb[i] {
		i++
	}
	var out strings.Builder
	fmt.Fprintf(&out, "line %d (off: %d lines, on: %d lines)\n", i+1, len(la), len(lb))
	show := func(prefix string, lines []string) {
		for _, l := range lines {
			if len(l) > diffWidth {
				l = l[:diffWidth] + "..."
			}
			fmt.Fprintf(&out, "%s%s\n", prefix, strings.ToValidUTF8(l, "?"))
		}
	}
	show("  ", la[max(0, i-diffContext):i])
	show("- ", la[i:min(len(la), i+diffLines)])
	show("+ ", lb[i:min(len(lb), i+diffLines)])
	return out.String()
}
