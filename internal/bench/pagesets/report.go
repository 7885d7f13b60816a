package pagesets

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/units"
)

// A Report is what one benchmark measured.
type Report struct {
	Schema  int             `json:"schema"`
	Tool    string          `json:"tool"`
	Started time.Time       `json:"started"`
	Capture CaptureSummary  `json:"capture"`
	Machine capture.Machine `json:"capture_machine"`
	Results []*Result       `json:"results"`
	Recall  *Recall         `json:"recall,omitempty"`
}

// CaptureSummary names the page set.
type CaptureSummary struct {
	Template string    `json:"template"`
	Digest   string    `json:"digest"`
	Source   string    `json:"source"`
	Created  time.Time `json:"created"`
	Siblings int       `json:"siblings"`
	Gaps     int       `json:"gaps"`
	Private  int64     `json:"private"` // pages, over all gaps
	Changed  int64     `json:"changed"`
}

// NewReport returns a report without results.
func (s *Set) NewReport(tool string) *Report {
	info := s.Info()
	private, changed, _ := info.Totals()
	return &Report{
		Schema: 1, Tool: tool, Started: time.Now().UTC(), Machine: info.Machine,
		Capture: CaptureSummary{
			Template: info.Template.Name, Digest: info.Template.Digest, Source: info.Source, Created: info.Created,
			Siblings: len(info.Siblings), Gaps: len(info.Gaps), Private: private, Changed: changed,
		},
	}
}

// result returns the result of a row for so many siblings, nil if it was not measured.
func (r *Report) result(row string, siblings int) *Result {
	for _, x := range r.Results {
		if x.Row == row && x.Siblings == siblings {
			return x
		}
	}
	return nil
}

// most is the largest number of siblings that was measured.
func (r *Report) most() int {
	n := 0
	for _, x := range r.Results {
		n = max(n, x.Siblings)
	}
	return n
}

// Wrong adds up the pages that came back wrong.
func (r *Report) Wrong() (wrong int) {
	for _, x := range r.Results {
		wrong += x.Wrong
	}
	return wrong
}

// WriteJSON writes the report with all figures.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// LastLine is the line for scripts; its form stays. Figures that were not measured are "n/a".
func (r *Report) LastLine() string {
	most := r.most()
	main := r.result(RowAll, most)
	var b strings.Builder
	fmt.Fprintf(&b, "codec saved%d=%s saved4=%s paper3=%s", most, saved(main), saved(r.result(RowAll, 4)), saved(r.result(RowPaper, most)))
	if main == nil {
		fmt.Fprintf(&b, " meta=n/a enc_hit_pages_s=n/a enc_pages_s=n/a dec_p50_us=n/a dec_zstd_p50_us=n/a")
	} else {
		fmt.Fprintf(&b, " meta=%.1f%% enc_hit_pages_s=%.0f enc_pages_s=%.0f dec_p50_us=%.1f dec_zstd_p50_us=%.1f",
			100*main.MetaPart, main.StoreRate(cheap...), main.StoreRate(),
			micros(main.LoadQuantile(0.5, light...)), micros(main.LoadQuantile(0.5, heavy...)))
	}
	fmt.Fprintf(&b, " wrong=%d", r.Wrong())
	return b.String()
}

// Ways that figures are given for together.
var (
	cheap = []string{"public", "shared", "rle"}        // a reference or run lengths hit
	light = []string{"rle", "delta", "public"}         // no Zstandard block of their own
	heavy = []string{"zstd", "zstd-dict", "zstd-base"} // one
)

func saved(r *Result) string {
	if r == nil {
		return "n/a"
	}
	return fmt.Sprintf("%.1f%%", 100*r.Saved)
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// WriteText writes the report for people. The last line is LastLine.
func (r *Report) WriteText(w io.Writer) error {
	var b bytes.Buffer
	c := r.Capture
	fmt.Fprintf(&b, "page set   %d siblings of template %s (%.12s), %d gaps, %d private pages, %d stored; %s\n", c.Siblings, c.Template, c.Digest, c.Gaps, c.Private, c.Changed, c.Source)
	fmt.Fprintf(&b, "captured   %s on %s, %d cores, %s, kernel %s, QEMU %s (%s)\n\n", c.Created.Format(time.DateTime), r.Machine.CPU, r.Machine.Cores, r.Machine.OS, r.Machine.Kernel, r.Machine.QEMU, r.Machine.Accel)
	r.rows(&b)
	if main := r.result(RowAll, r.most()); main != nil {
		b.WriteString("\n")
		main.parts(&b)
		b.WriteString("\n")
		main.outcomes(&b)
	}
	if r.Recall != nil {
		b.WriteString("\n")
		r.Recall.write(&b)
	}
	b.WriteString("\n" + r.LastLine() + "\n")
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func (r *Report) rows(b *bytes.Buffer) {
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "row\tsiblings\tprivate\tkept\tsaved\tmeta\tstored/s\thits/s\tload p50\tp99\thot mean\twrong\t \n")
	notes := map[string]string{}
	for _, x := range Rows() {
		notes[x.Name] = x.Note
	}
	for _, x := range r.Results {
		meta, hits, p50, p99, hot := "-", "-", "-", "-", "-"
		if x.Loads > 0 {
			meta = fmt.Sprintf("%.1f%%", 100*x.MetaPart)
			p50 = fmt.Sprintf("%.1f us", micros(x.LoadQuantile(0.5, x.wayNames()...)))
			p99 = fmt.Sprintf("%.1f us", micros(x.LoadQuantile(0.99, x.wayNames()...)))
			hot = fmt.Sprintf("%.1f us", micros(x.Hot.Total)/float64(max(1, x.Hot.Pages)))
		}
		if rate := x.StoreRate(cheap...); rate > 0 {
			hits = fmt.Sprintf("%.0f", rate)
		}
		fmt.Fprintf(t, "%s\t%d\t%v\t%v\t%.2f%%\t%s\t%.0f\t%s\t%s\t%s\t%s\t%d\t  %s\n", x.Row, x.Siblings,
			units.Bytes(x.Private), units.Bytes(x.Kept.Net()), 100*x.Saved, meta, x.StoreRate(), hits, p50, p99, hot, x.Wrong, notes[x.Row])
	}
	_ = t.Flush() // a buffer does not fail
}

func (r *Result) wayNames() []string {
	var names []string
	for _, o := range r.Loading {
		names = append(names, o.Name)
	}
	return names
}

// parts prints where the bytes of a result are.
func (r *Result) parts(b *bytes.Buffer) {
	k := r.Kept
	fmt.Fprintf(b, "what %s keeps, averaged over %d gaps of %d siblings (%v private)\n", r.Row, r.Gaps, r.Siblings, units.Bytes(r.Private))
	for _, p := range []struct {
		name  string
		bytes float64
	}{
		{"encoded pages", k.Encoded},
		{"slack of the pool", k.Slack},
		{"headers and handles", k.PoolMeta},
		{"indexes", k.Index},
		{"dictionaries", k.Dictionaries},
		{"page tables", k.PageTables},
		{"library (per host)", k.Library},
		{"pages of full size", k.Full},
	} {
		fmt.Fprintf(b, "  %-20s %10v  %6.3f%% of private\n", p.name, units.Bytes(p.bytes), 100*p.bytes/max(1, r.Private))
	}
}

// outcomes prints what became of the pages, and how long that took and takes back.
func (r *Result) outcomes(b *bytes.Buffer) {
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "page becomes\tstored\tshare\tbytes each\tstore p50\tp99\tcores\tat the end\tload p50\tp99\t\n")
	for _, o := range r.Stores {
		fmt.Fprintf(t, "%s\t%d\t%.1f%%\t%d\t%.1f us\t%.1f us\t%.1f s\t", o.Name, o.Pages, 100*float64(o.Pages)/float64(max(1, r.Pages)), o.Bytes/int64(max(1, o.Pages)), micros(o.P50), micros(o.P99), o.Total.Seconds())
		i := slices.IndexFunc(r.Loading, func(l Outcome) bool { return l.Name == o.Name })
		if i < 0 {
			fmt.Fprint(t, "-\t-\t-\t\n")
			continue
		}
		l := r.Loading[i]
		fmt.Fprintf(t, "%d\t%.1f us\t%.1f us\t\n", l.Pages, micros(l.P50), micros(l.P99))
	}
	_ = t.Flush() // a buffer does not fail
	fmt.Fprintf(b, "a page that is stored costs %.1f us of one core on average; compaction took %.1f s\n", micros(r.Encoding)/float64(max(1, r.Pages)), r.Compacting.Seconds())
}

func (r *Recall) write(b *bytes.Buffer) {
	per := func(n, of int) int { return n / max(1, of) }
	fmt.Fprintf(b, "sketch index, on %d pages of a sibling that the cohort had not seen, %d bases\n", r.Pages, r.Bases)
	fmt.Fprintf(b, "  bytes each: %d without similar bases, %d with the one the index finds, %d with the best of the pool: %.0f%% of what can be had\n",
		per(r.None, r.Pages), per(r.Index, r.Pages), per(r.Brute, r.Pages), 100*r.Gain())
	fmt.Fprintf(b, "  of %d pages that a base makes a tenth smaller, it finds the best (or within a tenth) for %d\n", r.Better, r.BrutePool)
	if r.PublicOf > 0 {
		fmt.Fprintf(b, "  with template and root image as bases too, over %d pages: %d instead of %d\n", r.PublicOf, per(r.PublicToo, r.PublicOf), per(r.IndexFirst, r.PublicOf))
	}
}

// WriteBench writes the results in the form that benchstat reads: a line for each row and
// outcome, the mean in ns/page.
func (r *Report) WriteBench(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "pkg: github.com/agentzip/agentzip/internal/bench/pagesets\n")
	for _, x := range r.Results {
		at := fmt.Sprintf("row=%s/siblings=%d", x.Row, x.Siblings)
		fmt.Fprintf(&b, "BenchmarkSaved/%s 1 %.4f %%saved %.4f %%meta\n", at, 100*x.Saved, 100*x.MetaPart)
		for verb, list := range map[string][]Outcome{"Store": x.Stores, "Load": x.Loading} {
			for _, o := range list {
				name := strings.ReplaceAll(o.Name, " ", "-")
				fmt.Fprintf(&b, "Benchmark%s/%s/way=%s %d %.1f ns/page %d p50-ns %d p99-ns\n", verb, at, name, o.Pages,
					float64(o.Total.Nanoseconds())/float64(max(1, o.Pages)), o.P50.Nanoseconds(), o.P99.Nanoseconds())
			}
		}
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write benchmark lines: %w", err)
	}
	return nil
}
