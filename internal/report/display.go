package report

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// A Row is what a display knows of one sandbox.
type Row struct {
	Name       string
	Phase      string // booting, running, gap, compressing, done, dead
	Call       int    // calls ended or running
	Calls      int    // of the whole trajectory
	Command    string // the call that runs, or ran last
	Resident   units.Bytes
	Pooled     units.Bytes // encoded bytes of its pages
	Saved      float64     // so far, against the same part of the run without compression
	SavedKnown bool
}

// A Display shows a running measurement. Its methods may be called from any
// goroutine and never fail: losing the display must not lose the measurement.
type Display interface {
	// Stage says what begins now: "compression off".
	Stage(text string)
	// Rows replaces what is known of the sandboxes. The display keeps rows.
	Rows(rows []Row)
	// Event says that something happened, one line.
	Event(line string)
	// Close ends the display and returns when the terminal is as it was.
	Close()
}

// Plain is a Display for logs and pipes: one line per stage and event.
type Plain struct {
	start time.Time // immutable

	mu sync.Mutex
	w  io.Writer // guarded by mu
}

// NewPlain returns a display that writes to w.
func NewPlain(w io.Writer) *Plain { return &Plain{start: time.Now(), w: w} }

// Stage implements Display.
func (p *Plain) Stage(text string) { p.line("== " + text) }

// Event implements Display.
func (p *Plain) Event(line string) { p.line(line) }

// Rows implements Display: a log has no use for five states a second.
func (p *Plain) Rows([]Row) {}

// Close implements Display.
func (p *Plain) Close() {}

func (p *Plain) line(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, "%6.1fs  %s\n", time.Since(p.start).Seconds(), printable(s)) // a broken pipe ends the program by signal
}

// frame draws the rows, for a terminal of the given width.
func frame(stage string, rows []Row, events []string, width int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", stage)
	fmt.Fprintf(&b, "%-4s %-11s %7s %12s %11s %7s  %s\n", "", "state", "call", "resident", "pooled", "saved", "command")
	for _, r := range rows {
		fmt.Fprintf(&b, "%-4s %-11s %3d/%-3d %12s %11s %7s  %s\n", r.Name, r.Phase, r.Call, r.Calls, r.Resident, r.Pooled,
			Percent(r.Saved, r.SavedKnown), firstLine(r.Command))
	}
	b.WriteString("\n")
	for _, e := range events {
		b.WriteString(e + "\n")
	}
	lines := strings.Split(b.String(), "\n")
	for i, l := range lines {
		lines[i] = cut(printable(l), width)
	}
	return strings.Join(lines, "\n")
}

// printable removes what could steer the terminal: commands are other people's
// text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

func cut(s string, width int) string {
	if r := []rune(s); width > 0 && len(r) > width {
		return string(r[:width-1]) + "…"
	}
	return s
}
