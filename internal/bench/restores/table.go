package restores

import (
	"bytes"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/agentzip/agentzip/internal/report"
)

// WriteText writes the report for people. The last line is LastLine.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	if err := r.Main.WriteBody(&b); err != nil {
		return err
	}
	r.Where.write(&b)
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
	for _, k := range w.Kinds {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.0f us\t%.2f\t%s\t\n", k.Kind, k.Faults, float64(k.Faults)/calls, 1e3*k.MS/float64(max(1, k.Faults)), k.MS/calls, share(k.MS))
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
