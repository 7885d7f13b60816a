package restores

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/report"
)

// Schema is the version of the JSON form: fields may be added under it.
const Schema = 1

// A Report is the result of one measurement. Parts that were not asked for are nil.
type Report struct {
	Schema int            `json:"schema"`
	Main   *report.Report `json:"main"` // the paired run; machine, template and plan are in it
	Where  Where          `json:"where"`
	Notes  []string       `json:"notes"`
}

// WriteJSON writes the report with all raw figures, on one line: it is for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write JSON report: %w", err)
	}
	return nil
}

// WriteGzip writes the JSON compressed.
func (r *Report) WriteGzip(w io.Writer) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return fmt.Errorf("compress JSON report: %w", err)
	}
	if err := r.WriteJSON(z); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return fmt.Errorf("compress JSON report: %w", err)
	}
	return nil
}

// LastLine is the one line that scripts read. Its form is stable: a field is never renamed,
// removed or reordered. An unknown value is "n/a".
func (r *Report) LastLine() string {
	s := r.Main.Summary
	saved := "n/a"
	if s.SavedKnown {
		saved = fmt.Sprintf("%.1f%%", 100*s.Saved)
	}
	var coverage, accuracy string
	all := r.all()
	c, ok := all.Coverage()
	coverage = part(c, ok)
	a, ok := all.Accuracy()
	accuracy = part(a, ok)
	fields := []string{
		"restore",
		"block_p50_us=" + micros(s.Blocking, s.Blocking.P50),
		"block_p99_us=" + micros(s.Blocking, s.Blocking.P99),
		"block_max_us=" + micros(s.Blocking, s.Blocking.Max),
		"prefetch_page_p50_us=" + micros(s.Prefetched, s.Prefetched.P50),
		fmt.Sprintf("stall_p50_ms=%.1f", millis(s.Stall.P50)),
		fmt.Sprintf("stall_p99_ms=%.0f", millis(s.Stall.P99)),
		"latency=" + times(s.LatencyRatio),
		"native=" + times(s.NativeRatio),
		"saved=" + saved,
		"coverage=" + coverage,
		"accuracy=" + accuracy,
		"cancel_p99_us=" + micros(r.cancel(), r.cancel().P99),
		"idle_mb=" + r.idle(),
		"idle_kvm_mb=" + r.idleKVM(),
	}
	return strings.Join(fields, " ")
}

// all returns what the prefetchers did together.
func (r *Report) all() report.Prefetcher {
	for _, p := range r.Main.Prefetchers {
		if p.Name == report.AllPrefetchers {
			return p
		}
	}
	return report.Prefetcher{}
}

// cancel returns how long calls waited for a pass to stop.
func (r *Report) cancel() report.Quantiles { return r.Main.Latencies[report.KindCancel].Quantiles() }

func (r *Report) idle() string    { return "n/a" }
func (r *Report) idleKVM() string { return "n/a" }

func micros(q report.Quantiles, d time.Duration) string {
	if q.Count == 0 {
		return "n/a"
	}
	return fmt.Sprintf("%d", d.Microseconds())
}

func part(x float64, known bool) string {
	if !known {
		return "n/a"
	}
	return fmt.Sprintf("%.0f%%", 100*x)
}

func times(ratio float64) string {
	if ratio == 0 {
		return "n/a"
	}
	return fmt.Sprintf("%.2fx", ratio)
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
