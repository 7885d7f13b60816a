package restores

import (
	"bytes"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/agentzip/agentzip/internal/report"
)

// WriteText writes the report for people. The last line is LastLine.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	if err := r.Main.WriteBody(&b); err != nil {
		return err
	}
	r.tails(&b)
	r.Where.write(&b)
	r.prefetchers(&b)
	r.ablation(&b)
	r.Storm.write(&b)
	r.Idle.write(&b)
	b.WriteString("\n" + r.LastLine() + "\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// grid starts a table whose columns are aligned to the right.
func grid(b *bytes.Buffer) *tabwriter.Writer {
	return tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
}

// write prints where the stall is.
func (w *Where) write(b *bytes.Buffer) {
	if w.Calls == 0 {
		return
	}
	calls := float64(w.Calls)
	share := func(x float64) string { return report.Percent(x/max(w.StallMS, 1e-9), w.StallMS > 0) }
	fmt.Fprintf(b, "\nwhere the stall is: %.0f ms in %d calls\n", w.StallMS, w.Calls)
	t := grid(b)
	fmt.Fprint(t, "faults\tcount\tper call\tmean\tms per call\tof the stall\t\n")
	row := func(indent string, k KindRow) {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.0f us\t%.2f\t%s\t\n", indent+k.Kind, k.Faults, float64(k.Faults)/calls, 1e3*k.MS/float64(max(1, k.Faults)), k.MS/calls, share(k.MS))
	}
	for _, k := range w.Kinds {
		row("", k)
		if k.Kind == report.KindEvicted {
			for _, x := range w.Ways {
				row("kept as ", x)
			}
		}
	}
	_ = t.Flush() // a buffer does not fail
	b.WriteString("\n")
	t = grid(b)
	fmt.Fprint(t, "part of the call\tcalls\tspent\tstall\tof the stall\t\n")
	for _, p := range w.Position {
		if p.Calls == 0 {
			continue
		}
		name := fmt.Sprintf("from %.0f ms", p.FromMS)
		if p.ToMS > 0 {
			name = fmt.Sprintf("%.0f to %.0f ms", p.FromMS, p.ToMS)
		}
		fmt.Fprintf(t, "%s\t%d\t%.1f s\t%.1f ms\t%s\t\n", name, p.Calls, p.SpentMS/1e3, p.StallMS, share(p.StallMS))
	}
	_ = t.Flush() // a buffer does not fail
	b.WriteString("\n")
	t = grid(b)
	fmt.Fprint(t, "kind of call\tcalls\tlasts\tfaults\tahead\tstall p50\tp99\tof the stall\t\n")
	for _, c := range w.Classes {
		n := float64(c.Calls)
		fmt.Fprintf(t, "%s\t%d\t%.0f ms\t%.0f\t%.0f\t%.1f ms\t%.1f ms\t%s\t\n", c.Class, c.Calls, c.MS/n, float64(c.Faults)/n, float64(c.Ahead)/n,
			millis(c.Stall.P50), millis(c.Stall.P99), share(millis(c.Stall.Total)))
	}
	_ = t.Flush() // a buffer does not fail
}

// Bounds that the tails are counted beyond: the targets of a blocking restore, and of its maximum.
const (
	target    = time.Millisecond
	targetMax = 10 * time.Millisecond
)

// tails prints what the main table has no room for.
func (r *Report) tails(b *bytes.Buffer) {
	m := r.Main
	if m.Plan.Signals {
		b.WriteString("signals: each call was announced when the model had named its tool, with the lead that was recorded or drawn for its kind\n")
	}
	if s, ok := m.Summary.SavedWithVMM(); ok {
		fmt.Fprintf(b, "saved with the VMMs' own memory counted in: %s\n", report.Percent(s, true))
	}
	b.WriteString("\ndistributions over the whole run\n")
	t := grid(b)
	fmt.Fprint(t, "from fault read to install\tcount\tp50\tp95\tp99\tmax\tover 1 ms\tover 10 ms\t\n")
	for _, x := range []struct{ name, key string }{
		{"blocking restore", report.KindEvicted},
		{"write to a protected page", report.KindProtected},
		{"zero page", report.KindZero},
		{"template page", report.KindTemplate},
		{"restored ahead, until installed", report.KindPrefetched},
		{"restored ahead, per page", report.KindPage},
		{"lock held by a batch", report.KindHeld},
		{"call arrived, compression stopped", report.KindCancel},
	} {
		h := m.Latencies[x.key]
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%d\t%d\t\n", x.name, h.Count(), us(h.Quantile(0.5)), us(h.Quantile(0.95)), us(h.Quantile(0.99)), us(h.Max), h.Above(target), h.Above(targetMax))
	}
	_ = t.Flush() // a buffer does not fail
}

// us prints a duration in microseconds, with a digit after the point where that says more.
func us(d time.Duration) string {
	if d < 10*time.Microsecond {
		return fmt.Sprintf("%.1f us", float64(d)/float64(time.Microsecond))
	}
	return fmt.Sprintf("%d us", d.Microseconds())
}

// prefetchers prints what the sources of guesses are worth.
func (r *Report) prefetchers(b *bytes.Buffer) {
	if len(r.Main.Prefetchers) == 0 {
		return
	}
	b.WriteString("\nprefetchers: accuracy is the share of pages left out on purpose that were then touched\n")
	t := grid(b)
	fmt.Fprint(t, "source\trestored\tleft out\tof them touched\taccuracy\tcoverage\t\n")
	for _, p := range r.Main.Prefetchers {
		a, aok := p.Accuracy()
		c, cok := p.Coverage()
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%s\t\n", p.Name, p.Restored, p.HeldOut, p.Missed, report.Percent(a, aok), report.Percent(c, cok))
	}
	_ = t.Flush() // a buffer does not fail
}

// ablation prints the variants of the short job.
func (r *Report) ablation(b *bytes.Buffer) {
	if len(r.Ablation) == 0 {
		return
	}
	fmt.Fprintf(b, "\nablation: a short job in each variant, %d calls; latency against one run of it without compression\n", r.Ablation[0].Calls)
	t := grid(b)
	fmt.Fprint(t, "variant\tfaults/call\tevicted\tprotected\tahead/call\tblocked\tstall p50\tp99\tlatency\tcoverage\taccuracy\t\n")
	for _, x := range r.Ablation {
		per := map[string]float64{}
		for _, k := range x.Kinds {
			per[k.Kind] = float64(k.Faults) / float64(max(1, x.Calls))
		}
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t%.0f\t%s\t%.1f ms\t%.1f ms\t%s\t%s\t%s\t\n", x.Name, x.FaultsPerCall(), per[report.KindEvicted], per[report.KindProtected],
			float64(x.Ahead)/float64(max(1, x.Calls)), report.Percent(x.BlockedShare(), true), millis(x.Stall.P50), millis(x.Stall.P99),
			times(x.Latency), wholePercent(x.Coverage, x.Coverage > 0), wholePercent(x.Accuracy, x.Accuracy > 0))
	}
	_ = t.Flush() // a buffer does not fail
	b.WriteString("blocked: of the pages brought back for calls, the share that a fault waited for.\n")
}

// write prints each sandbox of the storm.
func (s *StormResult) write(b *bytes.Buffer) {
	if s == nil {
		return
	}
	fmt.Fprintf(b, "\nstorm: %d compressed sandboxes get the same command at the same instant, %d times\n", len(s.Rows), s.Rounds)
	t := grid(b)
	fmt.Fprint(t, "sandbox\tcall\tfaults\tstall\tfault p50\tp99\tmax\t\n")
	for _, r := range s.Rows {
		fmt.Fprintf(t, "%s\t%.0f ms\t%.0f\t%.1f ms\t%s\t%s\t%s\t\n", r.Name, r.MS, float64(r.Faults.Count())/float64(max(1, s.Rounds)), r.Stall,
			us(r.Faults.Quantile(0.5)), us(r.Faults.Quantile(0.99)), us(r.Faults.Max))
	}
	_ = t.Flush() // a buffer does not fail
	if median, worst := s.Spread(); median > 0 {
		fmt.Fprintf(b, "p99 of a fault: %s in the median sandbox, %s in the worst: %.1f times that\n", us(median), us(worst), float64(worst)/float64(median))
	}
}

// write prints the accounts beside each other.
func (r *IdleResult) write(b *bytes.Buffer) {
	if r == nil {
		return
	}
	fmt.Fprintf(b, "\nidle: memory of the host for each of %d sandboxes that nobody uses, MB of 10^6 bytes\n", r.Sandboxes)
	t := grid(b)
	line := func(name string, f func(*IdleState) float64) {
		fmt.Fprintf(t, "%s\t", name)
		for i := range r.States {
			fmt.Fprintf(t, "%.2f\t", f(&r.States[i])/mega)
		}
		fmt.Fprint(t, "\n")
	}
	fmt.Fprint(t, "part\t")
	for _, s := range r.States {
		fmt.Fprintf(t, "%s\t", s.Name)
	}
	fmt.Fprint(t, "\n")
	for i, p := range r.States[0].Parts {
		line(p.Name, func(s *IdleState) float64 { return s.Parts[i].Bytes })
	}
	line("sum of the parts", (*IdleState).Sum)
	line("difference of MemAvailable", func(s *IdleState) float64 { return s.Available })
	line("not told apart", func(s *IdleState) float64 { return s.Available - s.Sum() })
	line("without what belongs to TCG", (*IdleState).WithoutTCG)
	_ = t.Flush() // a buffer does not fail
	fmt.Fprintf(b, "when all were gone again the host missed %.2f MB for each: what other programs took or gave back meanwhile\n", r.Drift/mega)
	if r.NotParked != "" {
		fmt.Fprintf(b, "not parked: %s\n", r.NotParked)
	}
}
