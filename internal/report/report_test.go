package report

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

// sample is a report with something in every part of the text.
func sample() *Report {
	const mib = 1 << 20
	return &Report{
		Schema: Schema, Tool: "agentzip test", Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), WallS: 201,
		Machine:  Machine{OS: "Debian GNU/Linux 12 (bookworm)", Kernel: "6.18.1", CPU: "Some CPU", Cores: 2, MemoryMB: 24576, QEMU: "7.2.0", Accel: "tcg"},
		Template: Template{Name: "tornado", Digest: "sha256:0123456789abcdef0123456789abcdef", MemoryMB: 512},
		Plan:     Plan{Source: "built-in", Seed: 1, GapScale: 1, Order: "off,on", Repeat: 1, Trajectories: make([]Trajectory, 2)},
		Summary: Summary{
			Calls: 25, PrivateOff: 200 * mib, PrivateOn: 17.6 * mib, Saved: 0.912, SavedKnown: true, LatencyRatio: 1.031, NativeRatio: 1.084, NativeCalls: 24, NativeP50MS: 160,
			Stall:     Quantiles{Count: 25, Total: 60 * time.Millisecond, P50: 1200 * time.Microsecond, P95: 3900 * time.Microsecond, P99: 4200 * time.Microsecond, Max: 4200 * time.Microsecond},
			Blocking:  Quantiles{Count: 900, Total: 58 * time.Millisecond, P50: 48 * time.Microsecond, P95: 120 * time.Microsecond, P99: 310 * time.Microsecond, Max: 2 * time.Millisecond},
			VMMHeapOn: 61 * mib, Intact: true,
		},
		Sandboxes: []Sandbox{
			{Name: "s1", Calls: 13, PrivateOff: 100 * mib, PrivateOn: 8 * mib, Saved: 0.92, LatencyRatio: 1.02, Stall: Quantiles{P50: time.Millisecond, P99: 4 * time.Millisecond}, HeapOn: 30 * mib},
			{Name: "s2", Calls: 12, PrivateOff: 100 * mib, PrivateOn: 9.6 * mib, Saved: 0.904, LatencyRatio: 1.04, Stall: Quantiles{P50: time.Millisecond, P99: 4 * time.Millisecond}, HeapOn: 31 * mib},
		},
		Activity: Activity{
			Faults: map[string]uint64{"minor": 900, "missing": 40, "wp": 120}, Evicted: 5000, CleanDrops: 700, Incompressible: 12, Cancelled: 33, CancelledPasses: 4,
			Encoders: map[string]Encoder{"delta": {Pages: 2000, Bytes: 300000}, "zstd+dict": {Pages: 1000, Bytes: 500000}, "zero": {Pages: 1000}},
		},
		Differences: []Difference{}, IntegrityFailures: []string{}, NotCompared: []string{}, Notes: []string{"a note"},
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (-want +got; -update accepts):\n%s", name, d)
	}
}

func TestTextOfAReport(t *testing.T) {
	t.Parallel()
	failed := sample()
	failed.Summary.Intact = false
	failed.Summary.NativeRatio, failed.Summary.NativeMissing = 0, "open loop control: no such file or directory"
	failed.IntegrityFailures = []string{"s1 page 0x1234 zstd: checksum"}
	failed.NotCompared = []string{"s2 call 3: timed out without compression"}
	for range shownProblems + 2 {
		failed.Differences = append(failed.Differences, Difference{Run: 2, Sandbox: "s1", Call: 3, Command: "git diff\ngit status", Field: "stdout", Diff: "line 2 (off: 3 lines, on: 3 lines)\n  same\n- a\n+ b\n"})
	}
	failed.Differences[1] = Difference{Run: 2, Sandbox: "s2", Command: "git status", Field: "stdout", Diff: "line 1\n- a\n+ \x1b[2Jb\n"}
	for name, r := range map[string]*Report{"ok.txt": sample(), "failed.txt": failed, "empty.txt": {}} {
		var b bytes.Buffer
		if err := r.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		golden(t, name, b.Bytes())
		lines := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
		if last := lines[len(lines)-1]; last != r.LastLine() {
			t.Errorf("%s: the last line is %q, want %q", name, last, r.LastLine())
		}
	}
}

func TestTheLastLineHasTheFormThatScriptsRelyOn(t *testing.T) {
	t.Parallel()
	ok := sample()
	failed := sample()
	failed.Summary = Summary{}
	for _, c := range []struct {
		r    *Report
		want string
	}{
		{ok, "demo saved=91.2% latency=1.03x native=1.08x stall_p99_ms=4.2 block_p50_us=48 block_p99_us=310 integrity=ok"},
		{failed, "demo saved=n/a latency=n/a native=n/a stall_p99_ms=0.0 block_p50_us=0 block_p99_us=0 integrity=FAILED"},
	} {
		if got := c.r.LastLine(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
	form := regexp.MustCompile(`^demo saved=(-?\d+\.\d%|n/a) latency=(\d+\.\d\dx|n/a) native=(\d+\.\d\dx|n/a) stall_p99_ms=\d+\.\d block_p50_us=\d+ block_p99_us=\d+ integrity=(ok|FAILED)$`)
	worse := sample()
	worse.Summary.Saved = -0.031
	if !form.MatchString(worse.LastLine()) {
		t.Errorf("a negative saving: %s", worse.LastLine())
	}
}

func TestTheJSONReportReadsBackAndKeepsItsNames(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := sample().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", b.Bytes())
	var back Report
	if err := json.Unmarshal(b.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(sample(), &back); d != "" {
		t.Errorf("read back (-want +got):\n%s", d)
	}
}

func TestThisMachineIsDescribed(t *testing.T) {
	t.Parallel()
	m := ThisMachine()
	if m.Kernel == "" || m.Cores < 1 || m.MemoryMB < 1 {
		t.Errorf("got %+v", m)
	}
}
