package restores

import (
	"context"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/report"
)

// Ablation says which variants are compared, on which (short) job.
type Ablation struct {
	Variants []Variant // the first is what the others are held against; none = no ablation
	Plans    []bench.Plan
	GapScale float64
}

// AblationRow is the short job in one variant.
type AblationRow struct {
	Name     string           `json:"name"`
	Calls    int              `json:"calls"`
	Kinds    []KindRow        `json:"kinds"`    // faults during calls
	Ahead    uint64           `json:"ahead"`    // pages restored ahead during calls
	Stall    report.Quantiles `json:"stall"`    // per call
	Blocking report.Quantiles `json:"blocking"` // restores
	Latency  float64          `json:"latency"`  // of the same calls without compression; 0 = unknown
	Coverage float64          `json:"coverage"` // of all prefetchers; 0 = unknown
	Accuracy float64          `json:"accuracy"`
}

// FaultsPerCall returns the mean number of faults of a call.
func (r *AblationRow) FaultsPerCall() float64 {
	var n uint64
	for _, k := range r.Kinds {
		n += k.Faults
	}
	return float64(n) / float64(max(1, r.Calls))
}

// BlockedShare is the share of the pages brought back during calls that a fault waited for.
func (r *AblationRow) BlockedShare() float64 {
	var evicted uint64
	for _, k := range r.Kinds {
		if k.Kind == report.KindEvicted {
			evicted = k.Faults
		}
	}
	return float64(evicted) / float64(max(1, evicted+r.Ahead))
}

// ablate runs the short job without compression and in every variant.
func (c *Config) ablate(ctx context.Context, show *progress) ([]AblationRow, error) {
	short := c.Main
	short.Sandboxes, short.GapScale = c.Ablation.Plans, c.Ablation.GapScale
	short.NativeReplay, short.Repeat, short.Alone = nil, 1, true
	short.First, short.Signals = bench.Off, false
	show.prefix("ablation, no compression: ")
	defer show.prefix("")
	off, err := bench.Measure(ctx, short)
	if err != nil {
		return nil, fmt.Errorf("run without compression: %w", err)
	}
	var rows []AblationRow
	short.First = bench.On
	for _, v := range c.Ablation.Variants {
		show.prefix("ablation, " + v.Name + ": ")
		short.Fleet, short.Signals = c.Fleet(v), v.Signals
		on, err := bench.Measure(ctx, short)
		if err != nil {
			return nil, fmt.Errorf("variant %s: %w", v.Name, err)
		}
		rows = append(rows, ablationRow(v.Name, off, on))
	}
	return rows, nil
}

// ablationRow holds a run against the one without compression.
func ablationRow(name string, off, on *report.Report) AblationRow {
	w := whereOf(on.Runs)
	row := AblationRow{
		Name: name, Calls: w.Calls, Kinds: w.Kinds, Stall: on.Summary.Stall, Blocking: on.Summary.Blocking,
		Latency: latency(off.Runs[0].Calls, on.Runs[0].Calls),
	}
	for _, cl := range w.Classes {
		row.Ahead += cl.Ahead
	}
	all := together(on.Prefetchers)
	row.Coverage, _ = all.Coverage()
	row.Accuracy, _ = all.Accuracy()
	return row
}

// latency is the ratio of the durations of the calls that neither run lost or timed out.
func latency(off, on []report.Call) float64 {
	type id struct {
		sandbox string
		n       int
	}
	base := map[id]report.Call{}
	for _, c := range off {
		base[id{c.Sandbox, c.N}] = c
	}
	var a, b time.Duration
	for _, c := range on {
		x, ok := base[id{c.Sandbox, c.N}]
		if !ok || x.TimedOut || c.TimedOut {
			continue
		}
		a, b = a+duration(x.MS), b+duration(c.MS)
	}
	if a <= 0 {
		return 0
	}
	return float64(b) / float64(a)
}

// together returns the row of all prefetchers.
func together(ps []report.Prefetcher) report.Prefetcher {
	for _, p := range ps {
		if p.Name == report.AllPrefetchers {
			return p
		}
	}
	return report.Prefetcher{Name: report.AllPrefetchers}
}
