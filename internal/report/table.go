package report

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// WriteText writes the report for people. The last line is LastLine.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	r.body(&b)
	b.WriteString("\n" + r.LastLine() + "\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// WriteBody writes what WriteText does without the last line, for reports of which this is a part.
func (r *Report) WriteBody(w io.Writer) error {
	var b bytes.Buffer
	r.body(&b)
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func (r *Report) body(b *bytes.Buffer) {
	r.head(b)
	b.WriteString("\n")
	r.sandboxes(b)
	b.WriteString("\n")
	r.restores(b)
	r.waits(b)
	r.activity(b)
	r.problems(b)
}

func (r *Report) head(b *bytes.Buffer) {
	m, p := r.Machine, r.Plan
	fmt.Fprintf(b, "machine    %s, %d cores, %.0f GB, %s, kernel %s, QEMU %s (%s)\n", m.CPU, m.Cores, float64(m.MemoryMB)/1024, m.OS, m.Kernel, m.QEMU, m.Accel)
	fmt.Fprintf(b, "template   %s, guests of %d MiB, digest %.12s\n", r.Template.Name, r.Template.MemoryMB, r.Template.Digest)
	fmt.Fprintf(b, "replayed   %d trajectories (%s), %d calls, gaps x %g, seed %d, order %s x %d, %.0f s in all\n",
		len(p.Trajectories), p.Source, r.Summary.Calls, p.GapScale, p.Seed, p.Order, p.Repeat, r.WallS)
	if p.ThinkSource != "" {
		fmt.Fprintf(b, "gaps       %s\n", p.ThinkSource)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "note       %s\n", n)
	}
}

// sandboxes prints the table. Memory is the time average of private memory;
// the VMM's own heap stands beside it and is not part of it.
func (r *Report) sandboxes(b *bytes.Buffer) {
	s := r.Summary
	rows := [][]string{{"sandbox", "calls", "private off", "private on", "saved", "latency", "stall p50", "stall p99", "VMM heap"}}
	for _, x := range r.Sandboxes {
		rows = append(rows, []string{
			x.Name, strconv.Itoa(x.Calls), size(x.PrivateOff), size(x.PrivateOn), Percent(x.Saved, x.PrivateOff > 0),
			times(x.LatencyRatio), short(x.Stall.P50), short(x.Stall.P99), size(x.HeapOn),
		})
	}
	rows = append(rows, []string{
		"total", strconv.Itoa(s.Calls), size(s.PrivateOff), size(s.PrivateOn), Percent(s.Saved, s.SavedKnown),
		times(s.LatencyRatio), short(s.Stall.P50), short(s.Stall.P99), size(s.VMMHeapOn),
	})
	table(b, rows)
	b.WriteString("Private memory is averaged over time from the first call's start to the last call's end: of each sandbox\n" +
		"over its own trajectory, in total over all of them, so the rows do not add up to the total.\n")
}

func (r *Report) restores(b *bytes.Buffer) {
	s := r.Summary
	rows := [][]string{{"", "count", "p50", "p95", "p99", "max", "sum"}}
	for _, x := range []struct {
		name string
		q    Quantiles
	}{{"blocking restore", s.Blocking}, {"prefetched restore", s.Prefetched}, {"stall per call", s.Stall}} {
		rows = append(rows, []string{x.name, strconv.FormatUint(x.q.Count, 10), short(x.q.P50), short(x.q.P95), short(x.q.P99), short(x.q.Max), short(x.q.Total)})
	}
	table(b, rows)
	if s.NativeRatio > 0 {
		fmt.Fprintf(b, "native: %s over %d calls run without a VM (p50 %.0f ms): what the stalls would cost on hardware.\n", times(s.NativeRatio), s.NativeCalls, s.NativeP50MS)
	} else {
		fmt.Fprintf(b, "native: not measured: %s\n", s.NativeMissing)
	}
}

func (r *Report) activity(b *bytes.Buffer) {
	a := r.Activity
	var total Encoder
	for _, e := range a.Encoders {
		total.Pages += e.Pages
		total.Bytes += e.Bytes
	}
	b.WriteString("\n")
	rows := [][]string{{"encoder", "pages", "share", "bytes/page"}}
	for _, name := range slices.Sorted(maps.Keys(a.Encoders)) {
		e := a.Encoders[name]
		rows = append(rows, []string{name, strconv.FormatUint(e.Pages, 10), Percent(float64(e.Pages)/float64(max(1, total.Pages)), true), strconv.FormatInt(e.Bytes/int64(max(1, e.Pages)), 10)})
	}
	table(b, rows)
	var faults []string
	for _, k := range slices.Sorted(maps.Keys(a.Faults)) {
		faults = append(faults, fmt.Sprintf("%s %d", k, a.Faults[k]))
	}
	fmt.Fprintf(b, "evicted %d pages (%d of them clean, without encoding), left %d that do not shrink, %d cancelled by a write, %d passes cut short by a call, pool full %d times\n",
		a.Evicted, a.CleanDrops, a.Incompressible, a.Cancelled, a.CancelledPasses, a.PoolFull)
	if a.Passes > 0 {
		fmt.Fprintf(b, "passes: %d, %s each\n", a.Passes, short(time.Duration(a.EvictingS/float64(a.Passes)*float64(time.Second))))
	}
	fmt.Fprintf(b, "faults: %s\n", strings.Join(faults, ", "))
	if x := a.Ahead; x != (Ahead{}) {
		fmt.Fprintf(b, "ahead of use: %d evicted pages, %d installed to be written; of them %d showed a sign of use, %d none until they were dropped (pages only read show none)\n",
			x.Restored, x.Private, x.Used, x.Wasted)
		fmt.Fprintf(b, "beside faults: %d evicted pages (%d used, %d without a sign); shared pages mapped by restores %d, by passes %d\n",
			x.Neighbours, x.NeighboursUsed, x.NeighboursWasted, x.Shared, x.MappedBack)
	}
}

// shownProblems bounds what the text prints; the JSON has all.
const shownProblems = 10

func (r *Report) problems(b *bytes.Buffer) {
	for i, f := range r.IntegrityFailures {
		if i == shownProblems {
			fmt.Fprintf(b, "... and %d more integrity failures\n", len(r.IntegrityFailures)-i)
			break
		}
		fmt.Fprintf(b, "INTEGRITY  %s\n", f)
	}
	for i, d := range r.Differences {
		if i == shownProblems {
			fmt.Fprintf(b, "... and %d more differing calls\n", len(r.Differences)-i)
			break
		}
		call := fmt.Sprintf("call %d", d.Call)
		if d.Call == 0 {
			call = "final state"
		}
		fmt.Fprintf(b, "DIFFERENCE %s %s, %s, in run %d:\n  $ %s\n%s\n", d.Sandbox, call, d.Field, d.Run, printable(firstLine(d.Command)), indent(d.Diff))
	}
	for _, n := range r.NotCompared {
		fmt.Fprintf(b, "not compared: %s\n", n)
	}
}

func firstLine(s string) string {
	line, rest, more := strings.Cut(s, "\n")
	if more && rest != "" {
		line += " ..."
	}
	return line
}

func indent(s string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\n  ")
}

func size(b float64) string { return units.Bytes(b).String() }

// Percent prints a share.
func Percent(x float64, known bool) string {
	if !known {
		return "n/a"
	}
	return fmt.Sprintf("%.1f%%", 100*x)
}

// short prints a duration with two or three digits that matter.
func short(d time.Duration) string {
	switch {
	case d == 0:
		return "0"
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", millis(d))
	case d < time.Second:
		return fmt.Sprintf("%.0f ms", millis(d))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// table prints rows aligned: the first column to the left, the rest to the
// right, a rule below the head.
func table(b *bytes.Buffer, rows [][]string) {
	width := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			width[i] = max(width[i], len([]rune(c)))
		}
	}
	line := func(r []string) {
		for i, c := range r {
			pad := strings.Repeat(" ", width[i]-len([]rune(c)))
			if i == 0 {
				b.WriteString(c + pad)
				continue
			}
			b.WriteString("  " + pad + c)
		}
		b.WriteString("\n")
	}
	line(rows[0])
	total := 0
	for _, w := range width {
		total += w + 2
	}
	b.WriteString(strings.Repeat("-", total-2) + "\n")
	for _, r := range rows[1:] {
		line(r)
	}
}
