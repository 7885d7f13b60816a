package restores

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/report"
)

// Where says where the stall of the calls comes from. Each table adds up to the whole.
type Where struct {
	Calls    int           `json:"calls"`
	StallMS  float64       `json:"stall_ms"` // of all calls
	Kinds    []KindRow     `json:"kinds"`
	Ways     []KindRow     `json:"ways"` // the evicted ones by how the page was kept
	Position []PositionRow `json:"position"`
	Classes  []ClassRow    `json:"classes"`
}

// KindRow is one kind of fault.
type KindRow struct {
	Kind   string  `json:"kind"`
	Faults uint64  `json:"faults"`
	MS     float64 `json:"ms"`
}

// PositionRow is one stretch of the calls' time.
type PositionRow struct {
	FromMS  float64 `json:"from_ms"`
	ToMS    float64 `json:"to_ms"` // 0 = to the end
	Calls   int     `json:"calls"` // that lasted into it
	SpentMS float64 `json:"spent_ms"`
	StallMS float64 `json:"stall_ms"`
}

// ClassRow is one class of commands.
type ClassRow struct {
	Class  string           `json:"class"`
	Calls  int              `json:"calls"`
	Faults uint64           `json:"faults"`
	Ahead  uint64           `json:"ahead"`
	MS     float64          `json:"ms"` // of the calls
	Stall  report.Quantiles `json:"stall"`
}

// stretches bound the rows by position, in ms after the dispatch.
var stretches = []float64{0, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000}

// whereOf looks at the calls of all runs with compression on.
func whereOf(runs []report.Run) Where {
	var w Where
	kinds, ways := map[string]*KindRow{}, map[string]*KindRow{}
	classes := map[string]*ClassRow{}
	stalls := map[string][]time.Duration{}
	w.Position = make([]PositionRow, len(stretches))
	for i, from := range stretches {
		w.Position[i].FromMS = from
		if i+1 < len(stretches) {
			w.Position[i].ToMS = stretches[i+1]
		}
	}
	for _, r := range runs {
		if r.Mode != "on" {
			continue
		}
		for _, c := range r.Calls {
			w.Calls++
			w.StallMS += c.StallMS
			addCosts(kinds, c.Kinds)
			addCosts(ways, c.Ways)
			class := cmp.Or(c.Class, "other")
			row := entry(classes, class)
			row.Class, row.Calls, row.Faults, row.Ahead, row.MS = class, row.Calls+1, row.Faults+c.Faults, row.Ahead+c.Ahead, row.MS+c.MS
			stalls[class] = append(stalls[class], duration(c.StallMS))
			spread(w.Position, c)
		}
	}
	w.Kinds, w.Ways = ordered(kinds), ordered(ways)
	for _, k := range slices.Sorted(maps.Keys(classes)) {
		classes[k].Stall = report.QuantilesOf(stalls[k])
		w.Classes = append(w.Classes, *classes[k])
	}
	slices.SortStableFunc(w.Classes, func(a, b ClassRow) int { return cmp.Compare(b.Stall.Total, a.Stall.Total) })
	return w
}

func addCosts(rows map[string]*KindRow, costs map[string]report.FaultCost) {
	for k, cost := range costs {
		row := entry(rows, k)
		row.Kind, row.Faults, row.MS = k, row.Faults+cost.Count, row.MS+cost.MS
	}
}

// ordered returns rows, those that cost most first.
func ordered(rows map[string]*KindRow) (out []KindRow) {
	for _, k := range slices.Sorted(maps.Keys(rows)) {
		out = append(out, *rows[k])
	}
	slices.SortStableFunc(out, func(a, b KindRow) int { return cmp.Compare(b.MS, a.MS) })
	return out
}

// entry returns the row of a key, a new one at its first use.
func entry[R any](rows map[string]*R, key string) *R {
	r := rows[key]
	if r == nil {
		r = new(R)
		rows[key] = r
	}
	return r
}

// spread adds a call to the rows by position. Between two readings its stall counts as
// having grown evenly.
func spread(rows []PositionRow, c report.Call) {
	var last report.StallAt
	for _, p := range c.Progress {
		if p.MS <= last.MS {
			continue
		}
		for i := range rows {
			row := &rows[i]
			from, to := max(row.FromMS, last.MS), p.MS
			if row.ToMS > 0 {
				to = min(to, row.ToMS)
			}
			if to <= from {
				continue
			}
			row.StallMS += (p.StallMS - last.StallMS) * (to - from) / (p.MS - last.MS)
			row.SpentMS += to - from
		}
		last = p
	}
	for i := range rows {
		if last.MS > rows[i].FromMS {
			rows[i].Calls++
		}
	}
}

func duration(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
