package restores

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/units"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden is a report with all parts.
func golden() *Report {
	ms := time.Millisecond
	calls := []report.Call{
		{
			Sandbox: "s1", N: 1, MS: 60, StallMS: 6, Faults: 50, Ahead: 70, Class: "read",
			Kinds:    map[string]report.FaultCost{report.KindEvicted: {Count: 30, MS: 4}, report.KindZero: {Count: 20, MS: 2}},
			Ways:     map[string]report.FaultCost{"delta": {Count: 25, MS: 1}, "zstd": {Count: 5, MS: 3}},
			Progress: []report.StallAt{{MS: 10, StallMS: 4}, {MS: 60, StallMS: 6}},
		},
		{
			Sandbox: "s1", N: 2, MS: 5, StallMS: 1, Faults: 10, Ahead: 30, Class: "test",
			Kinds:    map[string]report.FaultCost{report.KindEvicted: {Count: 10, MS: 1}},
			Progress: []report.StallAt{{MS: 5, StallMS: 1}},
		},
	}
	blocking := report.Histogram{Total: 3 * ms, Max: 4 * ms, Buckets: []report.Bucket{{LE: 45 * time.Microsecond, Count: 60}, {LE: 600 * time.Microsecond, Count: 39}, {LE: 5 * ms, Count: 1}}}
	page := uniform(100, 4*time.Microsecond)
	return &Report{
		Schema: Schema,
		Main: &report.Report{
			Machine: report.Machine{OS: "Debian", Kernel: "6.18", CPU: "EPYC", Cores: 2, MemoryMB: 24576, QEMU: "7.2", Accel: "tcg"},
			Plan:    report.Plan{Source: "built-in", GapScale: 10, Order: "off,on", Repeat: 1, Trajectories: make([]report.Trajectory, 1)},
			Summary: report.Summary{
				Calls: 2, PrivateOff: 100e6, PrivateOn: 4.9e6, Saved: 0.951, SavedKnown: true, LatencyRatio: 1.02, NativeRatio: 1.06, NativeCalls: 2,
				Stall: report.Quantiles{Count: 2, P50: 400 * time.Microsecond, P99: 12 * ms}, Blocking: blocking.Quantiles(), VMMHeapOff: 50e6, VMMHeapOn: 50e6, Intact: true,
			},
			Runs: []report.Run{{Mode: "off", Calls: calls[:1]}, {Mode: "on", Calls: calls}},
			Latencies: map[string]report.Histogram{
				report.KindEvicted: blocking, report.KindPage: page, report.KindPrefetched: uniform(100, 300*time.Microsecond), report.KindCancel: uniform(9, 400*time.Microsecond),
			},
			Prefetchers: []report.Prefetcher{
				{Name: report.AllPrefetchers, Restored: 1329, HeldOut: 100, Missed: 78, Faults: 78},
				{Name: "stride", Restored: 10, HeldOut: 3, Missed: 1, Faults: 78},
			},
		},
		Where: whereOf([]report.Run{{Mode: "on", Calls: calls}}),
		Ablation: []AblationRow{
			{Name: "all", Calls: 2, Kinds: []KindRow{{Kind: report.KindEvicted, Faults: 20}}, Ahead: 60, Stall: report.Quantiles{P50: ms, P99: 2 * ms}, Latency: 1.03, Coverage: 0.93, Accuracy: 0.78},
			{Name: "nothing ahead", Calls: 2, Kinds: []KindRow{{Kind: report.KindEvicted, Faults: 100}}, Stall: report.Quantiles{P50: 9 * ms, P99: 20 * ms}, Latency: 1.5},
		},
		Storm: &StormResult{Rounds: 2, Command: "python3", Rows: []StormRow{
			{Name: "i1", MS: 1000, Stall: 2, Faults: uniform(20, 100*time.Microsecond)},
			{Name: "i2", MS: 1100, Stall: 2, Faults: uniform(20, 150*time.Microsecond)},
			{Name: "i3", MS: 1000, Stall: 4, Faults: uniform(20, 300*time.Microsecond)},
		}},
		Idle: &IdleResult{Sandboxes: 64, States: []IdleState{
			{Name: stateResting, Available: 56e6, Parts: []IdlePart{{"VMM: heap", 18e6, false}, {"VMM: translated code (TCG)", 33e6, true}}},
			{Name: stateParked, Available: 11.5e6, Parts: []IdlePart{{"VMM: heap", 4e6, false}, {"VMM: translated code (TCG)", 6.3e6, true}}},
		}},
	}
}

func TestTheTextIsAsItWas(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := golden().WriteText(&b); err != nil {
		t.Fatal(err)
	}
	const file = "testdata/report.txt"
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("text (-want +got):\n%s", diff)
	}
}

func TestTheLastLineHasTheFormThatScriptsRead(t *testing.T) {
	t.Parallel()
	const want = "restore block_p50_us=45 block_p99_us=600 block_max_us=4000 prefetch_page_p50_us=4 stall_p50_ms=0.4 stall_p99_ms=12 " +
		"latency=1.02x native=1.06x saved=95.1% coverage=93% accuracy=78% cancel_p99_us=400 idle_mb=11.5 idle_kvm_mb=5.2"
	if got := golden().LastLine(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	empty := &Report{Main: &report.Report{}}
	const unknown = "restore block_p50_us=n/a block_p99_us=n/a block_max_us=n/a prefetch_page_p50_us=n/a stall_p50_ms=n/a stall_p99_ms=n/a " +
		"latency=n/a native=n/a saved=n/a coverage=n/a accuracy=n/a cancel_p99_us=n/a idle_mb=n/a idle_kvm_mb=n/a"
	if got := empty.LastLine(); got != unknown {
		t.Errorf("nothing measured: got\n%s\nwant\n%s", got, unknown)
	}
}

func TestTheCompressedJSONReadsBackAsItWas(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := golden().WriteGzip(&b); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.NewDecoder(z).Decode(&back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(golden(), &back); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

func TestThePlotIsWellFormedAlsoWithoutMeasurements(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]*Report{"with all": golden(), "with nothing": {Main: &report.Report{}}} {
		var b bytes.Buffer
		if err := r.WritePlot(&b); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if hasCurve := strings.Contains(b.String(), ">blocking restore<"); hasCurve != (name == "with all") {
			t.Errorf("%s: the curve of blocking restores is drawn: %v", name, hasCurve)
		}
		d := xml.NewDecoder(&b)
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
}

func TestTheTablesOfTheStallAddUp(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var calls []report.Call
		for range rapid.IntRange(1, 5).Draw(t, "calls") {
			var c report.Call
			var at report.StallAt
			for range rapid.IntRange(1, 12).Draw(t, "looks") {
				at.MS += rapid.Float64Range(0.1, 2000).Draw(t, "ms")
				at.StallMS += rapid.Float64Range(0, 50).Draw(t, "stall")
				c.Progress = append(c.Progress, at)
			}
			c.MS, c.StallMS = at.MS, at.StallMS
			c.Kinds = map[string]report.FaultCost{report.KindEvicted: {Count: 1, MS: at.StallMS / 4}, report.KindZero: {Count: 2, MS: at.StallMS * 3 / 4}}
			c.Class = rapid.SampledFrom([]string{"read", "test", ""}).Draw(t, "class")
			calls = append(calls, c)
		}
		w := whereOf([]report.Run{{Mode: "on", Calls: calls}})
		var kinds, position, spent, classes, lasted float64
		for _, k := range w.Kinds {
			kinds += k.MS
		}
		for _, p := range w.Position {
			position, spent = position+p.StallMS, spent+p.SpentMS
		}
		for _, c := range w.Classes {
			classes += millis(c.Stall.Total)
		}
		for _, c := range calls {
			lasted += c.MS
		}
		for name, got := range map[string][2]float64{"kinds": {kinds, w.StallMS}, "position": {position, w.StallMS}, "classes": {classes, w.StallMS}, "time": {spent, lasted}} {
			if d := got[0] - got[1]; d > 1e-3 || d < -1e-3 {
				t.Fatalf("%s add up to %g, the whole is %g", name, got[0], got[1])
			}
		}
	})
}

func TestSmapsAreSortedByWhatTheyAreFor(t *testing.T) {
	t.Parallel()
	f, err := os.Open("testdata/smaps.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := readSmaps(f)
	if err != nil {
		t.Fatal(err)
	}
	want := vmmParts{Guest: 5204 * units.KiB, Code: 32764 * units.KiB, Tables: 2048 * units.KiB, Rest: (9444 + 700 + 1212) * units.KiB}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := readSmaps(strings.NewReader("Anonymous: many kB\n")); err == nil {
		t.Error("a damaged smaps was read")
	}
}

func TestTheTimeLeftFollowsTheFirstRun(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	var said []string
	p := newProgress(noting{&said}, []part{{10 * time.Minute, true}, {10 * time.Minute, true}, {estimate: 2 * time.Minute}})
	p.now = func() time.Time { return now }
	p.Stage("off")
	now = now.Add(5 * time.Minute)
	p.Rows([]report.Row{{Call: 3, Calls: 4}, {Call: 1, Calls: 4, Phase: "running"}}) // two of eight calls have ended
	now = now.Add(15 * time.Minute)
	p.Stage("on") // the run took twice as long as estimated
	want := []string{
		"off, about 22 min left in all",
		"about 27 min left in all", // 15 of this run at its pace, 12 as estimated
		"on, about 22 min left in all",
	}
	if diff := cmp.Diff(want, said); diff != "" {
		t.Errorf("said (-want +got):\n%s", diff)
	}
}

// noting keeps what a display is told.
type noting struct{ said *[]string }

func (n noting) Stage(s string)  { *n.said = append(*n.said, s) }
func (n noting) Event(s string)  { *n.said = append(*n.said, s) }
func (noting) Rows([]report.Row) {}
func (noting) Close()            {}
