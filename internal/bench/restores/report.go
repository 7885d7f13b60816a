package restores

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
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

	Ablation []AblationRow `json:"ablation,omitempty"`
	Storm    *StormResult  `json:"storm,omitempty"`
	Idle     *IdleResult   `json:"idle,omitempty"`
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
	s, page := r.Main.Summary, r.Main.Latencies[report.KindPage].Quantiles()
	saved := "n/a"
	if s.SavedKnown {
		saved = fmt.Sprintf("%.1f%%", 100*s.Saved)
	}
	all := together(r.Main.Prefetchers)
	coverage, covered := all.Coverage()
	accuracy, judged := all.Accuracy()
	fields := []string{
		"restore",
		"block_p50_us=" + micros(s.Blocking, s.Blocking.P50),
		"block_p99_us=" + micros(s.Blocking, s.Blocking.P99),
		"block_max_us=" + micros(s.Blocking, s.Blocking.Max),
		"prefetch_page_p50_us=" + micros(page, page.P50),
		"stall_p50_ms=" + milliseconds(s.Stall, s.Stall.P50, 1),
		"stall_p99_ms=" + milliseconds(s.Stall, s.Stall.P99, 0),
		"latency=" + times(s.LatencyRatio),
		"native=" + times(s.NativeRatio),
		"saved=" + saved,
		"coverage=" + wholePercent(coverage, covered),
		"accuracy=" + wholePercent(accuracy, judged),
		"cancel_p99_us=" + micros(r.cancel(), r.cancel().P99),
		"idle_mb=" + megabytes(r.Idle.Best(), func(s *IdleState) float64 { return s.Available }),
		"idle_kvm_mb=" + megabytes(r.Idle.Best(), (*IdleState).WithoutTCG),
	}
	return strings.Join(fields, " ")
}

// cancel returns how long calls waited for a pass to stop.
func (r *Report) cancel() report.Quantiles { return r.Main.Latencies[report.KindCancel].Quantiles() }

func megabytes(s *IdleState, f func(*IdleState) float64) string {
	if s == nil {
		return "n/a"
	}
	return fmt.Sprintf("%.1f", f(s)/mega)
}

func micros(q report.Quantiles, d time.Duration) string {
	if q.Count == 0 {
		return "n/a"
	}
	return strconv.FormatInt(d.Round(time.Microsecond).Microseconds(), 10)
}

func milliseconds(q report.Quantiles, d time.Duration, digits int) string {
	if q.Count == 0 {
		return "n/a"
	}
	return strconv.FormatFloat(millis(d), 'f', digits, 64)
}

func wholePercent(x float64, known bool) string {
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
