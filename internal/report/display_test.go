package report

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/units"
)

func TestTheLiveFrame(t *testing.T) {
	t.Parallel()
	rows := []Row{
		{Name: "s1", Phase: "running", Call: 3, Calls: 13, Command: "python3 - <<'EOF'\nprint(1)\nEOF", Resident: 60 * units.MiB, Pooled: 3 * units.MiB, Saved: 0.81, SavedKnown: true},
		{Name: "s2", Phase: "booting", Calls: 12},
		{Name: "s3", Phase: "gap", Call: 12, Calls: 12, Command: "printf '\x1b[2J\x07' \u009b31m " + strings.Repeat("x", 200)},
	}
	got := frame("run 2 of 2: compression on", rows, []string{"s1 call 2/13  0.81 s  exit 0"}, 100)
	golden(t, "frame.txt", []byte(got))
	if strings.ContainsAny(got, "\x1b\x07\u009b") {
		t.Error("a command's control characters reach the terminal")
	}
	for l := range strings.SplitSeq(got, "\n") {
		if n := len([]rune(l)); n > 100 {
			t.Errorf("a line is %d wide, the terminal 100: %s", n, l)
		}
	}
}

// safeBuffer is a bytes.Buffer for several goroutines.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestDisplaysTakeCallsFromAnyGoroutineAndAfterClose(t *testing.T) {
	for name, start := range map[string]func(*safeBuffer) Display{
		"plain": func(b *safeBuffer) Display { return NewPlain(b) },
		"live":  func(b *safeBuffer) Display { return newLive(context.Background(), b, tea.WithWindowSize(100, 30)) },
	} {
		t.Run(name, func(t *testing.T) {
			var out safeBuffer
			d := start(&out)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					d.Stage("the stage")
					d.Event("an event")
					d.Rows([]Row{{Name: "s1", Phase: "gap"}})
				})
			}
			wg.Wait()
			for deadline := time.Now().Add(5 * time.Second); !strings.Contains(out.String(), "the stage") && time.Now().Before(deadline); {
				time.Sleep(10 * time.Millisecond) // the live display draws ten times a second
			}
			d.Close()
			d.Event("too late to matter")
			d.Close()
			if !strings.Contains(out.String(), "the stage") {
				t.Errorf("the stage is not shown: %q", out.String())
			}
		})
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
