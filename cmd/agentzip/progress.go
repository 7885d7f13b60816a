package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/agentzip/agentzip/internal/template"
)

// plainInterval is how often a step that goes on is repeated where no terminal
// can rewrite its line. Shorter fills CI logs, longer looks like a hang.
const plainInterval = 15 * time.Second

// progress shows the events of long work. On a terminal the present step is one
// line that is rewritten; elsewhere each step is a line when it begins, when it
// ends, and now and then between.
type progress struct {
	out   io.Writer
	width int // columns of the terminal; 0: not a terminal
	now   func() time.Time

	mu    sync.Mutex
	step  string    // guarded by mu; the step shown last
	shown time.Time // guarded by mu; when
	open  bool      // guarded by mu; the last line has no newline yet
}

func newProgress(out io.Writer) *progress {
	p := &progress{out: out, now: time.Now}
	if f, ok := out.(*os.File); ok && isTerminal(out) {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil {
			p.width = w
		}
	}
	return p
}

// event shows one event; it is a template.Progress. Any goroutine may call it.
func (p *progress) event(e template.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line := fmt.Sprintf("%-12s %s", e.Step, oneLine(e.Message))
	if e.Total > 0 {
		line = fmt.Sprintf("%-12s %3d%% %s", e.Step, 100*e.Done/e.Total, oneLine(e.Message))
	}
	if p.width > 0 {
		p.draw(line, e.Finished)
		return
	}
	if e.Finished || e.Step != p.step || p.now().Sub(p.shown) >= plainInterval {
		fmt.Fprintln(p.out, line)
		p.step, p.shown = e.Step, p.now()
	}
	if e.Finished {
		p.step = ""
	}
}

// draw rewrites the terminal's last line. Called with mu held.
func (p *progress) draw(line string, finished bool) {
	if r := []rune(line); len(r) >= p.width {
		line = string(r[:max(p.width-1, 0)]) // a line that wraps could not be rewritten
	}
	fmt.Fprint(p.out, "\r\x1b[K", line)
	p.open = !finished
	if finished {
		fmt.Fprintln(p.out)
	}
}

// close ends a line that was still being rewritten.
func (p *progress) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprintln(p.out)
		p.open = false
	}
}
