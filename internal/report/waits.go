package report

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// shownWaits is how many of the calls that waited longest are named.
const shownWaits = 5

// A wait is one call that waited for memory.
type wait struct {
	Call
	command string
}

// waits names the calls that waited longest for memory, and what for.
func (r *Report) waits(b *bytes.Buffer) {
	var all []wait
	for _, run := range r.Runs {
		if run.Mode != "on" {
			continue
		}
		for _, c := range run.Calls {
			if c.Faults > 0 {
				all = append(all, wait{c, r.command(c)})
			}
		}
	}
	if len(all) == 0 {
		return
	}
	slices.SortStableFunc(all, func(x, y wait) int { return cmp.Compare(y.StallMS, x.StallMS) })
	b.WriteString("\nthe calls that waited longest for memory:\n")
	for _, w := range all[:min(len(all), shownWaits)] {
		b.WriteString("  " + w.String() + "\n")
	}
}

// command is what a call ran; "" if the plan does not have it.
func (r *Report) command(c Call) string {
	for _, t := range r.Plan.Trajectories {
		if t.Sandbox == c.Sandbox && c.N >= 1 && c.N <= len(t.Commands) {
			return t.Commands[c.N-1]
		}
	}
	return ""
}

// String says it in one line.
func (w wait) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s call %d waited %s of %s: %d faults", w.Sandbox, w.N,
		short(time.Duration(w.StallMS*float64(time.Millisecond))), short(time.Duration(w.MS*float64(time.Millisecond))), w.Faults)
	if kinds := costs(w.Kinds); kinds != "" {
		b.WriteString(" (" + kinds)
		if ways := costs(w.Ways); ways != "" {
			b.WriteString("; kept as " + ways)
		}
		b.WriteString(")")
	}
	if w.Ahead > 0 || w.Wasted > 0 {
		fmt.Fprintf(&b, ", %d pages brought ahead", w.Ahead)
	}
	if w.Wasted > 0 {
		fmt.Fprintf(&b, ", %d before without a sign of use", w.Wasted)
	}
	if w.command != "" {
		line := []rune(printable(firstLine(w.command)))
		b.WriteString("  $ " + string(line[:min(len(line), 60)]))
	}
	return b.String()
}

// costs lists what there was, the most frequent first.
func costs(m map[string]FaultCost) string {
	names := slices.Sorted(maps.Keys(m))
	slices.SortStableFunc(names, func(x, y string) int { return cmp.Compare(m[y].Count, m[x].Count) })
	var parts []string
	for _, n := range names {
		if m[n].Count > 0 {
			parts = append(parts, fmt.Sprintf("%s %d", n, m[n].Count))
		}
	}
	return strings.Join(parts, ", ")
}
