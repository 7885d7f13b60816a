package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
	"github.com/agentzip/agentzip/internal/units"
)

// markerPage is page i of what sibling name writes, in round n. Nothing else in a guest
// looks like it.
func markerPage(name string, i, n int) (p units.Page) {
	line := fmt.Sprintf("marker of %s, page %02d, round %d; ", name, i, n)
	copy(p[:], strings.Repeat(line, units.PageSize/len(line)+1))
	return p
}

// writeMarkers writes 40 of these pages to a file, which stays in the guest's page cache, and
// in the second round changes every tenth.
const writeMarkers = `python3 -c '
import socket
name, n = socket.gethostname(), %d
def page(i): return (b"marker of %%s, page %%02d, round %%d; " %% (name.encode(), i, n) * 200)[:4096]
with open("/tmp/markers", "wb" if n == 1 else "r+b") as f:
    for i in range(0, 40, 1 if n == 1 else 10):
        f.seek(i * 4096); f.write(page(i))
'`

// events is a Display that remembers and tells of events.
type events struct {
	report.Display

	mu    sync.Mutex
	lines []string
	tell  func(line string)
}

func (e *events) Stage(string)      {}
func (e *events) Rows([]report.Row) {}
func (e *events) Close()            {}

func (e *events) Event(line string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lines = append(e.lines, line)
	if e.tell != nil {
		e.tell(line)
	}
}

func capturePlans() []bench.Plan {
	var plans []bench.Plan
	for _, name := range []string{"s1", "s2"} {
		t := traj.Trajectory{ID: "markers"}
		for n := 1; n <= 2; n++ {
			t.Steps = append(t.Steps, traj.Step{Shell: fmt.Sprintf(writeMarkers, n), Think: 200 * time.Millisecond})
		}
		plans = append(plans, bench.Plan{Name: name, Trajectory: t})
	}
	return plans
}

func TestACaptureHoldsWhatItsGuestsHeld(t *testing.T) {
	d := openDaemon(t, 0)
	dir := filepath.Join(t.TempDir(), "c")
	log := &events{}
	o := CaptureOptions{Dir: dir, Template: vmTemplate, Plans: capturePlans(), GapScale: 1, Tool: "test", Source: "test", Display: log}
	info, err := d.Capture(t.Context(), o)
	if err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(log.lines, "\n"))
	}
	if len(info.Gaps) != 4 || info.Template.Name != vmTemplate || info.Siblings[1].Name != "s2" || info.Machine.QEMU == "" {
		t.Errorf("described as %+v", info)
	}
	s, err := capture.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	tmpl, _, err := d.Template(t.Context(), vmTemplate)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Info(); got.Memory.Blocks != tmpl.Files["memory.img"].Blocks || got.Root.Blocks != tmpl.Files["root.ext4"].Blocks {
		t.Error("memory or root image have other digests than in the template's manifest")
	}
	root, err := s.Root()
	if err != nil {
		t.Fatal(err)
	}
	root.Close()

	whose := map[units.Page]string{}
	for _, p := range o.Plans {
		for n := 1; n <= 2; n++ {
			for i := range 40 {
				whose[markerPage(p.Name, i, n)] = fmt.Sprintf("%s round %d", p.Name, n)
			}
		}
	}
	err = s.Gaps(func(g capture.Gap) error {
		found := map[string]int{}
		for _, c := range g.Changed {
			if w := whose[*c.Page]; w != "" {
				found[w]++
			}
		}
		// 40 pages of the first round; of the second the four that it changed, and none of the others again.
		own := fmt.Sprintf("s%d round %d", g.Sibling+1, g.Call)
		want := 40
		if g.Call == 2 {
			want = 4
		}
		if found[own] < want || len(found) != 1 {
			t.Errorf("sibling %d after call %d: found %v, want %d of %q only", g.Sibling, g.Call, found, want, own)
		}
		if len(g.Frames) < 500 || len(g.Frames) > 50000 {
			t.Errorf("sibling %d after call %d: %d private pages", g.Sibling, g.Call, len(g.Frames))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}

	// The name is taken now; that is known before a sandbox is started.
	start := time.Now()
	if _, err := d.Capture(t.Context(), o); !errors.Is(err, capture.ErrExists) || time.Since(start) > 2*time.Second {
		t.Errorf("into the same folder: %v after %v", err, time.Since(start))
	}
}

func TestAnInterruptedCaptureLeavesNothing(t *testing.T) {
	d := openDaemon(t, 0)
	parent := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	interrupted := errors.New("interrupted")
	log := &events{tell: func(line string) {
		if strings.Contains(line, "gap 1:") {
			cancel(interrupted)
		}
	}}
	o := CaptureOptions{Dir: filepath.Join(parent, "c"), Template: vmTemplate, Plans: capturePlans()[:1], GapScale: 1, Display: log}
	if _, err := d.Capture(ctx, o); !errors.Is(err, interrupted) {
		t.Errorf("got %v\n%s", err, strings.Join(log.lines, "\n"))
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
		t.Errorf("left %v (%v)", left, err)
	}
}
