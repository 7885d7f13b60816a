// Package report holds the results of a measurement in a stable form and writes
// them: a table for people, JSON for machines, and one last line for scripts.
// It also shows a running measurement (live.go, plain.go).
//
// A Report is plain data. Package bench fills it; nothing here measures or
// decides. Its JSON form is versioned: fields may be added under the same
// Schema, and a change of meaning or a removal raises it.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// Schema is the version of the JSON form.
const Schema = 1

// A Report is the result of one measurement: paired runs of the same
// trajectories with compression off and on.
type Report struct {
	Schema    int       `json:"schema"`
	Tool      string    `json:"tool"` // name and version of the program
	Started   time.Time `json:"started"`
	WallS     float64   `json:"wall_s"` // of the whole measurement
	Machine   Machine   `json:"machine"`
	Template  Template  `json:"template"`
	Plan      Plan      `json:"plan"`
	Summary   Summary   `json:"summary"`
	Sandboxes []Sandbox `json:"sandboxes"` // in the order of the plan
	Activity  Activity  `json:"activity"`  // of the runs with compression on, summed

	// Differences are calls whose outcome with compression differs from the one
	// without. Any of them, or any IntegrityFailures, makes Summary.Intact false.
	Differences       []Difference `json:"differences"`
	IntegrityFailures []string     `json:"integrity_failures"` // as the pager reports them: page, encoder
	NotCompared       []string     `json:"not_compared"`       // calls that timed out without compression
	Notes             []string     `json:"notes"`
	Runs              []Run        `json:"runs"` // raw

	// Latencies are the distributions of all runs with compression on, by name (KindEvicted, ...).
	Latencies   map[string]Histogram `json:"latencies,omitempty"`
	Prefetchers []Prefetcher         `json:"prefetchers,omitempty"` // what restored ahead; the whole first
}

// Machine is where the measurement ran.
type Machine struct {
	OS       string `json:"os"`
	Kernel   string `json:"kernel"`
	CPU      string `json:"cpu"`
	Cores    int    `json:"cores"`
	MemoryMB int64  `json:"memory_mb"`
	QEMU     string `json:"qemu"`
	Accel    string `json:"accel"` // "tcg" or "kvm"
}

// Template is what the sandboxes were cloned from.
type Template struct {
	Name     string `json:"name"`
	Digest   string `json:"digest"`
	MemoryMB int64  `json:"memory_mb"` // of a guest
}

// Plan is what was replayed and how.
type Plan struct {
	Source       string       `json:"source"` // "built-in" or the path of recorded trajectories
	ThinkSource  string       `json:"think_source"`
	Seed         uint64       `json:"seed"`
	GapScale     float64      `json:"gap_scale"`
	MaxGapS      float64      `json:"max_gap_s"` // think times were cut at it, before scaling; 0 = not
	Order        string       `json:"order"`     // "off,on" or "on,off"
	Repeat       int          `json:"repeat"`
	Signals      bool         `json:"signals,omitempty"` // calls were announced when their tool was known
	Trajectories []Trajectory `json:"trajectories"`
}

// Trajectory is what one sandbox replayed.
type Trajectory struct {
	Sandbox  string    `json:"sandbox"`
	ID       string    `json:"id"`
	Task     string    `json:"task"`
	Commands []string  `json:"commands"`
	GapsS    []float64 `json:"gaps_s"`  // before each call, as replayed
	Dropped  int       `json:"dropped"` // recorded calls that could not be mapped or were cut
	StandIns int       `json:"stand_ins"`
	Drawn    int       `json:"drawn"` // think times drawn
}

// Summary is the result in a few figures. Docs of the terms: design, section 5.
type Summary struct {
	Calls         int       `json:"calls"`          // of one run
	PrivateOff    float64   `json:"private_off"`    // bytes, time average over the fleet's window, mean of the runs
	PrivateOn     float64   `json:"private_on"`     // bytes
	Saved         float64   `json:"saved"`          // 1 - PrivateOn/PrivateOff; NaN is never stored: see SavedKnown
	SavedKnown    bool      `json:"saved_known"`    // PrivateOff was measured and is above zero
	LatencyRatio  float64   `json:"latency_ratio"`  // sum of call durations, on over off; 0 = unknown
	NativeRatio   float64   `json:"native_ratio"`   // (native + stall) / native; 0 = unknown
	NativeMissing string    `json:"native_missing"` // why NativeRatio is unknown
	NativeCalls   int       `json:"native_calls"`   // calls it rests on
	NativeP50MS   float64   `json:"native_p50_ms"`  // duration of a call without a VM
	Stall         Quantiles `json:"stall"`          // per call, with compression on
	Blocking      Quantiles `json:"blocking"`       // restores a fault waited for
	Prefetched    Quantiles `json:"prefetched"`     // restores ahead of use
	VMMHeapOff    float64   `json:"vmm_heap_off"`   // bytes, time average, outside the private memory
	VMMHeapOn     float64   `json:"vmm_heap_on"`
	Intact        bool      `json:"intact"`
}

// SavedWithVMM is Saved with the VMMs' own memory on both sides; ok is false if nothing was
// measured without compression.
func (s Summary) SavedWithVMM() (saved float64, ok bool) {
	if !s.SavedKnown {
		return 0, false
	}
	return 1 - (s.PrivateOn+s.VMMHeapOn)/(s.PrivateOff+s.VMMHeapOff), true
}

// Quantiles of a distribution of durations.
type Quantiles struct {
	Count uint64        `json:"count"`
	Total time.Duration `json:"total_ns"`
	P50   time.Duration `json:"p50_ns"`
	P95   time.Duration `json:"p95_ns"`
	P99   time.Duration `json:"p99_ns"`
	Max   time.Duration `json:"max_ns"`
}

// Sandbox is one row of the table.
type Sandbox struct {
	Name         string    `json:"name"`
	Calls        int       `json:"calls"`
	PrivateOff   float64   `json:"private_off"` // bytes, time average over its own trajectory
	PrivateOn    float64   `json:"private_on"`
	Saved        float64   `json:"saved"` // 0 when PrivateOff is 0
	LatencyRatio float64   `json:"latency_ratio"`
	Stall        Quantiles `json:"stall"`
	HeapOn       float64   `json:"vmm_heap_on"`
}

// Activity is what the pagers did.
type Activity struct {
	Faults          map[string]uint64  `json:"faults"`
	Encoders        map[string]Encoder `json:"encoders"`
	Evicted         uint64             `json:"evicted"`
	CleanDrops      uint64             `json:"clean_drops"`
	Incompressible  uint64             `json:"incompressible"`
	Cancelled       uint64             `json:"cancelled"`
	CancelledPasses uint64             `json:"cancelled_passes"`
	Passes          uint64             `json:"passes,omitempty"`
	EvictingS       float64            `json:"evicting_s,omitempty"` // all passes together
	PoolFull        uint64             `json:"pool_full"`
	Ahead           Ahead              `json:"ahead,omitzero"`
}

// Ahead counts pages that were there before the guest asked for them.
type Ahead struct {
	Restored   uint64 `json:"restored"`    // evicted, brought back
	Private    uint64 `json:"private"`     // template and zero pages, installed to be written
	Shared     uint64 `json:"shared"`      // template and zero pages, mapped
	Neighbours uint64 `json:"neighbours"`  // evicted, brought beside one that the guest waited for
	MappedBack uint64 `json:"mapped_back"` // template and zero pages, mapped by the pass that had dropped them

	// Signs of use: a page that was only read gives none, so wasted is an upper bound.
	Used             uint64 `json:"used"` // of Restored and Private
	Wasted           uint64 `json:"wasted"`
	NeighboursUsed   uint64 `json:"neighbours_used"`
	NeighboursWasted uint64 `json:"neighbours_wasted"`
}

// Add adds o to a.
func (a *Ahead) Add(o Ahead) {
	a.Restored, a.Private, a.Shared = a.Restored+o.Restored, a.Private+o.Private, a.Shared+o.Shared
	a.Neighbours, a.MappedBack = a.Neighbours+o.Neighbours, a.MappedBack+o.MappedBack
	a.Used, a.Wasted = a.Used+o.Used, a.Wasted+o.Wasted
	a.NeighboursUsed, a.NeighboursWasted = a.NeighboursUsed+o.NeighboursUsed, a.NeighboursWasted+o.NeighboursWasted
}

// Encoder is what one encoder did.
type Encoder struct {
	Pages uint64 `json:"pages"`
	Bytes int64  `json:"bytes"`
}

// Difference is one call that ended differently.
type Difference struct {
	Run     int    `json:"run"` // index into Runs of the run that differs
	Sandbox string `json:"sandbox"`
	Call    int    `json:"call"` // from 1; 0 = the final state of the work tree
	Command string `json:"command"`
	Field   string `json:"field"` // stdout, stderr, exit, ...
	Diff    string `json:"diff"`
}

// Run is one run, raw.
type Run struct {
	Mode     string   `json:"mode"`
	StartupS float64  `json:"startup_s"` // until the last sandbox accepted commands
	WallS    float64  `json:"wall_s"`
	FromS    float64  `json:"from_s"` // start of the first call, from the run's start
	ToS      float64  `json:"to_s"`   // end of the last call
	Calls    []Call   `json:"calls"`
	Samples  []Sample `json:"samples"`
}

// Call is one call of one run.
type Call struct {
	Sandbox  string  `json:"sandbox"`
	N        int     `json:"n"` // from 1
	StartS   float64 `json:"start_s"`
	MS       float64 `json:"ms"`
	StallMS  float64 `json:"stall_ms"`
	NativeMS float64 `json:"native_ms,omitempty"`
	Faults   uint64  `json:"faults"`
	Exit     int     `json:"exit"`
	Signal   string  `json:"signal,omitempty"`
	TimedOut bool    `json:"timed_out,omitempty"`
	OutBytes int     `json:"out_bytes"`

	Class    string               `json:"class,omitempty"`    // kind of command, as the trajectory has it
	Kinds    map[string]FaultCost `json:"kinds,omitempty"`    // the faults by kind; without the stale ones
	Ways     map[string]FaultCost `json:"ways,omitempty"`     // faults on evicted pages, by how the page was kept
	Ahead    uint64               `json:"ahead,omitempty"`    // pages restored ahead since the call before
	Wasted   uint64               `json:"wasted,omitempty"`   // pages brought ahead before that went without a sign of use since the last call: an upper bound
	Progress []StallAt            `json:"progress,omitempty"` // how the stall grew; from the dispatch on
}

// FaultCost is how many faults there were, and how long the guest waited for them.
type FaultCost struct {
	Count uint64  `json:"count"`
	MS    float64 `json:"ms"`
}

// StallAt is the stall of a call so far, at a time after its dispatch.
type StallAt struct {
	MS      float64 `json:"ms"`
	StallMS float64 `json:"stall_ms"`
}

// AllPrefetchers is the name of the row that has all sources together.
const AllPrefetchers = "all"

// Prefetcher is what one source of guesses did, or all of them together (AllPrefetchers).
//
// Pages restored ahead that are only read leave no trace. So each source leaves out a random
// share of what it would restore: of those held out, the share that then faulted is what
// its restores are worth.
type Prefetcher struct {
	Name     string `json:"name"`
	Restored uint64 `json:"restored"` // pages brought back
	HeldOut  uint64 `json:"held_out"` // pages left out to learn what they are worth
	Missed   uint64 `json:"missed"`   // of them faulted
	Faults   uint64 `json:"faults"`   // on all pages that were not there when touched; the same for every source
}

// Accuracy is the share of held-out pages that were touched; ok is false if too few were
// held out to say.
func (p Prefetcher) Accuracy() (a float64, ok bool) {
	if p.HeldOut < minHeldOut {
		return 0, false
	}
	return float64(p.Missed) / float64(p.HeldOut), true
}

// minHeldOut is how many held-out pages an accuracy needs: with 30 its error is 9 points.
const minHeldOut = 30

// Coverage is the share of touched pages that were there when they were touched, because
// this source had restored them: useful restores over useful restores and faults.
func (p Prefetcher) Coverage() (c float64, ok bool) {
	a, ok := p.Accuracy()
	useful := a * float64(p.Restored)
	if !ok || useful+float64(p.Faults) == 0 {
		return 0, false
	}
	return useful / (useful + float64(p.Faults)), true
}

// Sample is the fleet's memory at one moment, bytes.
type Sample struct {
	S            float64 `json:"s"` // from the run's start
	Resident     int64   `json:"resident"`
	Pool         int64   `json:"pool"`
	PageTables   int64   `json:"page_tables"`
	Dictionaries int64   `json:"dictionaries"`
	Index        int64   `json:"index"`
	VMMHeap      int64   `json:"vmm_heap"`
	Pooled       int64   `json:"pooled_pages"`
	Sandboxes    []int64 `json:"sandboxes"` // private memory of each, shared parts divided; -1 = not running
}

// WriteJSON writes r, indented.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write JSON report: %w", err)
	}
	return nil
}

// LastLine is the one line that scripts read. Its form is stable: a field is
// never renamed, removed or reordered. An unknown value is "n/a".
func (r *Report) LastLine() string {
	s := r.Summary
	saved, integrity := "n/a", "FAILED"
	if s.SavedKnown {
		saved = fmt.Sprintf("%.1f%%", 100*s.Saved)
	}
	if s.Intact {
		integrity = "ok"
	}
	return fmt.Sprintf("demo saved=%s latency=%s native=%s stall_p99_ms=%.1f block_p50_us=%d block_p99_us=%d integrity=%s",
		saved, times(s.LatencyRatio), times(s.NativeRatio), millis(s.Stall.P99),
		s.Blocking.P50.Microseconds(), s.Blocking.P99.Microseconds(), integrity)
}

func times(ratio float64) string {
	if ratio == 0 {
		return "n/a"
	}
	return fmt.Sprintf("%.2fx", ratio)
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
