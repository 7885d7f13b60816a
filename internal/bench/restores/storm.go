package restores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
)

// Storm says how many sandboxes wake at the same instant, and how often.
type Storm struct {
	Sandboxes int // 0 = no storm
	Rounds    int
	Step      traj.Step // what each of them does
}

// stormGap is how long the sandboxes rest before each round: the first passes over their
// memory are 50 ms and 1 s after a call. Half as long, the second would meet the storm.
const stormGap = 3 * time.Second

// StormResult is what a storm did to each sandbox.
type StormResult struct {
	Rounds  int        `json:"rounds"`
	Command string     `json:"command"`
	Rows    []StormRow `json:"rows"` // in the order of the sandboxes
}

// StormRow is one sandbox in all rounds.
type StormRow struct {
	Name   string           `json:"name"`
	MS     float64          `json:"ms"` // mean duration of its call
	Stall  float64          `json:"stall_ms"`
	Faults report.Histogram `json:"faults"`
}

// Spread returns the median and the worst of the sandboxes' p99 of a fault. Without a fault there is none.
func (s *StormResult) Spread() (median, worst time.Duration) {
	var p99 []time.Duration
	for _, r := range s.Rows {
		if r.Faults.Count() > 0 {
			p99 = append(p99, r.Faults.Quantile(0.99))
		}
	}
	q := report.QuantilesOf(p99)
	return q.P50, q.Max
}

// storm runs all rounds.
func (c *Config) storm(ctx context.Context, show *progress) (res *StormResult, err error) {
	show.Stage(fmt.Sprintf("storm: %d sandboxes woken at once, %d times", c.Storm.Sandboxes, c.Storm.Rounds))
	colony, err := c.Colony(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, colony.Close()) }()
	boxes, err := settle(ctx, colony, c.Storm.Sandboxes, c.spec(c.Storm.Step), show)
	if err != nil {
		return nil, err
	}
	res = &StormResult{Rounds: c.Storm.Rounds, Command: c.Storm.Step.Shell, Rows: make([]StormRow, len(boxes))}
	for i := range boxes {
		res.Rows[i].Name = boxName(i)
	}
	for round := range c.Storm.Rounds {
		if err := sleepAll(ctx, boxes); err != nil {
			return nil, err
		}
		if err := c.gust(ctx, boxes, res.Rows); err != nil {
			return nil, err
		}
		median, worst := res.Spread()
		show.Event(fmt.Sprintf("round %d of %d: p99 of a fault %.2f ms in the median sandbox, %.2f ms in the worst", round+1, c.Storm.Rounds, millis(median), millis(worst)))
	}
	return res, nil
}

// gust wakes all sandboxes at the same instant and adds what they waited for to their rows.
func (c *Config) gust(ctx context.Context, boxes []Sleeper, rows []StormRow) error {
	spec := c.spec(c.Storm.Step)
	start := make(chan struct{})
	errs := make([]error, len(boxes))
	var all sync.WaitGroup
	for i, b := range boxes {
		before := b.Faults()
		all.Go(func() {
			<-start
			res, err := b.Run(ctx, spec)
			if err != nil {
				errs[i] = fmt.Errorf("call in sandbox %s: %w", boxName(i), err)
				return
			}
			row := &rows[i]
			row.MS += millis(res.Duration) / float64(c.Storm.Rounds)
			row.Stall += millis(res.Stall) / float64(c.Storm.Rounds)
			row.Faults.Merge(b.Faults().Since(before))
		})
	}
	close(start)
	all.Wait()
	return errors.Join(errs...)
}

func boxName(i int) string { return fmt.Sprintf("i%d", i+1) }

// startersAtOnce bounds the clones that start at once: two a core of the smallest host.
// Many more only wait for each other, and the last of them could time out.
const startersAtOnce = 4

// settle starts n sandboxes and runs one call in each, so that all of them have been used.
func settle(ctx context.Context, colony Colony, n int, spec bench.CallSpec, show *progress) ([]Sleeper, error) {
	boxes, errs := make([]Sleeper, n), make([]error, n)
	turns := make(chan struct{}, startersAtOnce)
	var all sync.WaitGroup
	var ready atomic.Int64
	for i := range n {
		all.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			if ctx.Err() != nil {
				errs[i] = ctx.Err()
				return
			}
			b, err := colony.Start(ctx, boxName(i))
			if err == nil {
				_, err = b.Run(ctx, spec)
			}
			if err != nil {
				errs[i] = fmt.Errorf("sandbox %s: %w", boxName(i), err)
				return
			}
			boxes[i] = b
			if k := ready.Add(1); k%8 == 0 || k == int64(n) {
				show.Event(fmt.Sprintf("%d of %d sandboxes have done a call each", k, n))
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("start: %w", cmp.Or(context.Cause(ctx), err))
	}
	return boxes, nil
}

// sleepAll lets the sandboxes rest and compresses what they have left.
func sleepAll(ctx context.Context, boxes []Sleeper) error {
	if !bench.Sleep(ctx, stormGap) {
		return context.Cause(ctx)
	}
	for i, b := range boxes {
		if err := b.Compress(ctx); err != nil {
			return fmt.Errorf("compress sandbox %s: %w", boxName(i), err)
		}
	}
	return nil
}

// PickStep returns the first step of one of the kinds, in the order they are named, else the
// first at all: what storm and idle do comes from the job too.
func PickStep(plans []bench.Plan, kinds ...traj.Kind) traj.Step {
	for _, k := range kinds {
		for _, p := range plans {
			if i := slices.IndexFunc(p.Trajectory.Steps, func(s traj.Step) bool { return s.Kind == k }); i >= 0 {
				return p.Trajectory.Steps[i]
			}
		}
	}
	return plans[0].Trajectory.Steps[0]
}
