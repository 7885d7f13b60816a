package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/report"
	"github.com/agentzip/agentzip/internal/traj"
)

// finalCommand shows the state a trajectory left its work tree in, so that a
// file damaged without a call noticing is noticed too. It is not a tool call:
// it runs after the last one and outside the measured window.
const finalCommand = "git status --porcelain=v1 -uall 2>/dev/null && git diff HEAD | sha256sum"

// A callRecord is one call of one run.
type callRecord struct {
	start time.Duration // from the run's start
	end   time.Duration
	res   CallResult
	err   error // the sandbox or its link failed; the trajectory ends here
}

// A lane is one sandbox in one run. It is owned by its replaying goroutine
// until the run is over; progress is what others may see meanwhile.
type lane struct {
	plan  Plan
	calls []callRecord
	final *callRecord // nil if the trajectory did not get that far

	mu       sync.Mutex
	progress progress // guarded by mu
}

type progress struct {
	box     Box // nil before the start and after the end
	call    int // that runs or ran last, from 1; 0 before the first
	command string
	first   time.Duration // start of the first call; valid when call > 0
	done    bool
	err     error
}

func (l *lane) look() progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.progress
}

func (l *lane) change(f func(*progress)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(&l.progress)
}

// window returns the start of the first and the end of the last call.
func (l *lane) window() (from, to time.Duration, ok bool) {
	if len(l.calls) == 0 {
		return 0, 0, false
	}
	return l.calls[0].start, l.calls[len(l.calls)-1].end, true
}

// A run is one replay of all trajectories.
type run struct {
	cfg      *Config
	mode     Mode
	number   int       // from 1
	begin    time.Time // zero of all offsets
	lanes    []*lane
	startup  time.Duration
	wall     time.Duration
	samples  []sample // owned by the sampler until it has ended
	failures int      // samples that failed
	failure  error    // the first of them
	counters Counters
	baseline *run // the last run without compression, for the display; nil before

	stop  context.CancelCauseFunc // ends the replay; its cause becomes the run's error
	turns chan struct{}           // holds one element for each call that runs; nil: any number may
}

// replay makes a fleet, replays everything and closes the fleet. An error means
// that there is no run; a sandbox that died is in its lane.
func (c *Config) replay(ctx context.Context, mode Mode, number int, baseline *run) (r *run, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r = &run{cfg: c, mode: mode, number: number, begin: time.Now(), baseline: baseline, stop: cancel}
	if c.Parallel > 0 {
		r.turns = make(chan struct{}, c.Parallel)
	}
	for _, p := range c.Sandboxes {
		r.lanes = append(r.lanes, &lane{plan: p})
	}
	fleet, err := c.Fleet(ctx, mode)
	if err != nil {
		return nil, fmt.Errorf("make fleet with compression %s: %w", mode, err)
	}
	defer func() {
		if cerr := fleet.Close(); cerr != nil && err == nil {
			err = fmt.Errorf("close fleet: %w", cerr)
		}
	}()
	if err := r.start(ctx, fleet); err != nil {
		return nil, err
	}
	stop := make(chan struct{})
	var sampler, replayers sync.WaitGroup
	sampler.Go(func() { r.sampleUntil(stop, fleet) })
	for i, l := range r.lanes {
		replayers.Go(func() { r.drive(ctx, i, l) })
	}
	replayers.Wait()
	close(stop)
	sampler.Wait()
	r.wall = time.Since(r.begin)
	r.counters = fleet.Counters()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("replay with compression %s: %w", mode, context.Cause(ctx))
	}
	// Averages over what was not measured would look like results.
	if total := r.failures + len(r.samples); r.failures*failedShare >= total {
		return nil, fmt.Errorf("measure memory with compression %s: %d of %d samples failed: %w", mode, r.failures, total, r.failure)
	}
	return r, nil
}

// failedShare: a run in which one in so many memory samples failed has no
// figures.
const failedShare = 10

// start clones all sandboxes at once.
func (r *run) start(ctx context.Context, fleet Fleet) error {
	errs := make([]error, len(r.lanes))
	var all sync.WaitGroup
	for i, l := range r.lanes {
		all.Go(func() {
			box, err := fleet.Start(ctx, l.plan.Name)
			if err != nil {
				errs[i] = fmt.Errorf("start sandbox %s: %w", l.plan.Name, err)
				return
			}
			if _, ok := box.(Announcer); r.cfg.Signals && !ok {
				errs[i] = errors.Join(fmt.Errorf("start sandbox %s: %w", l.plan.Name, ErrNoSignals), box.Close())
				return
			}
			l.change(func(p *progress) { p.box = box })
		})
	}
	all.Wait()
	r.startup = time.Since(r.begin)
	if ctx.Err() != nil { // one reason, not one for each sandbox
		return fmt.Errorf("start sandboxes: %w", context.Cause(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	r.cfg.Display.Event(fmt.Sprintf("%d sandboxes ready after %.1f s", len(r.lanes), r.startup.Seconds()))
	return nil
}

// drive replays one trajectory and then closes its sandbox, as an orchestrator
// does when an agent is done: what the others still do is not diluted by it.
func (r *run) drive(ctx context.Context, index int, l *lane) {
	box := l.look().box
	defer func() {
		l.change(func(p *progress) { p.box, p.done = nil, true })
		if err := box.Close(); err != nil {
			r.cfg.Display.Event(fmt.Sprintf("%s: close: %v", l.plan.Name, err))
		}
	}()
	if !Sleep(ctx, r.cfg.scaled(l.plan.Shift)) {
		return
	}
	looked := time.Duration(0) // how much of the thinking time OnCallEnd took
	for i, step := range l.plan.Trajectory.Steps {
		if !r.think(ctx, l, i, box, looked) || !r.takeTurn(ctx) {
			return
		}
		l.change(func(p *progress) {
			p.call, p.command = i+1, step.Shell
			if i == 0 {
				p.first = time.Since(r.begin)
			}
		})
		rec := r.call(ctx, box, r.spec(step))
		r.endTurn()
		if ctx.Err() != nil {
			return
		}
		l.calls = append(l.calls, rec)
		r.cfg.Display.Event(r.describe(l, i, rec))
		if rec.err != nil {
			l.change(func(p *progress) { p.err = rec.err })
			return
		}
		if r.cfg.OnCallEnd != nil {
			e := CallEnd{Sandbox: index, Call: i + 1, Step: step, Begin: r.begin, Start: rec.start, End: rec.end, Box: box}
			if err := r.cfg.OnCallEnd(ctx, e); err != nil {
				r.stop(fmt.Errorf("sandbox %s after call %d: %w", l.plan.Name, i+1, err))
				return
			}
			looked = time.Since(r.begin) - rec.end
		}
	}
	rec := r.call(ctx, box, r.spec(traj.Step{Shell: finalCommand}))
	if ctx.Err() == nil {
		l.final = &rec
	}
}

// think waits until step i of a lane comes, of which the time looked has passed already, and
// announces it where that was asked for; false means the context ended.
func (r *run) think(ctx context.Context, l *lane, i int, box Box, looked time.Duration) bool {
	gap := r.cfg.gap(l.plan.Trajectory.Steps[i]) - looked
	hearer, ok := box.(Announcer)
	if !ok || !r.cfg.Signals {
		return Sleep(ctx, gap)
	}
	lead := max(0, min(gap, r.cfg.lead(l.plan.Trajectory, i)))
	if !Sleep(ctx, gap-lead) {
		return false
	}
	hearer.Announce(l.plan.Trajectory.Steps[i].Tool)
	return Sleep(ctx, lead)
}

// takeTurn waits until a call may run; false means the context ended.
func (r *run) takeTurn(ctx context.Context) bool {
	if r.turns == nil {
		return true
	}
	select {
	case r.turns <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// endTurn lets the next call run.
func (r *run) endTurn() {
	if r.turns != nil {
		<-r.turns
	}
}

func (r *run) spec(s traj.Step) CallSpec {
	timeout := r.cfg.CallTimeout
	if s.Timeout > 0 {
		timeout = min(timeout, s.Timeout)
	}
	return CallSpec{Shell: s.Shell, Cwd: traj.WorkTree, User: r.cfg.User, Env: traj.Environment(), Timeout: timeout}
}

// linkGrace is how long after a call's own timeout its answer may take before
// the sandbox counts as hung.
const linkGrace = time.Minute

func (r *run) call(ctx context.Context, box Box, spec CallSpec) callRecord {
	ctx, cancel := context.WithTimeoutCause(ctx, spec.Timeout+linkGrace, errors.New("no answer, not even to the call's timeout"))
	defer cancel()
	rec := callRecord{start: time.Since(r.begin)}
	rec.res, rec.err = box.Run(ctx, spec)
	rec.end = time.Since(r.begin)
	if rec.err != nil && ctx.Err() != nil {
		rec.err = fmt.Errorf("%w (%w)", rec.err, context.Cause(ctx))
	}
	if rec.res.Duration <= 0 {
		rec.res.Duration = rec.end - rec.start
	}
	return rec
}

func (r *run) describe(l *lane, i int, rec callRecord) string {
	how := fmt.Sprintf("exit %d", rec.res.Exit)
	switch {
	case rec.err != nil:
		how = "sandbox failed: " + rec.err.Error()
	case rec.res.TimedOut:
		how = "timed out"
	case rec.res.Signal != "":
		how = rec.res.Signal
	}
	command, _, _ := strings.Cut(l.plan.Trajectory.Steps[i].Shell, "\n")
	if len(command) > 60 {
		command = command[:60]
	}
	s := fmt.Sprintf("%s call %d/%d  %.2f s  %s", l.plan.Name, i+1, len(l.plan.Trajectory.Steps), rec.res.Duration.Seconds(), how)
	if r.mode == On {
		s += fmt.Sprintf("  stall %.1f ms in %d faults", float64(rec.res.Stall)/1e6, rec.res.Faults)
	}
	return s + "  $ " + strings.ToValidUTF8(command, "")
}

// Sleep waits; false means the context ended.
func Sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// rows tells the display where every lane is.
func (r *run) rows(now time.Duration, last sample) []report.Row {
	rows := make([]report.Row, len(r.lanes))
	for i, l := range r.lanes {
		p := l.look()
		row := report.Row{Name: l.plan.Name, Call: p.call, Calls: len(l.plan.Trajectory.Steps), Command: p.command, Phase: Booting.String()}
		switch {
		case p.err != nil:
			row.Phase = Dead.String()
		case p.done:
			row.Phase = "done"
		case p.box != nil:
			row.Phase = p.box.State().Phase.String()
		}
		if u := last.boxes[i]; u != nil {
			row.Resident, row.Pooled = u.ResidentPrivate, u.Encoded
		}
		row.Saved, row.SavedKnown = r.savedSoFar(i, p, now)
		rows[i] = row
	}
	return rows
}

// savedSoFar compares a lane with the same calls of the run without compression.
func (r *run) savedSoFar(i int, p progress, now time.Duration) (float64, bool) {
	if r.mode != On || r.baseline == nil || p.call == 0 {
		return 0, false
	}
	base := r.baseline.lanes[i]
	if len(base.calls) == 0 {
		return 0, false
	}
	upTo := base.calls[min(p.call, len(base.calls))-1].end
	off, ok := timeAverage(lanePoints(r.baseline.samples, i), base.calls[0].start, upTo)
	on, ok2 := timeAverage(lanePoints(r.samples, i), p.first, now)
	if !ok || !ok2 || off <= 0 {
		return 0, false
	}
	return 1 - on/off, true
}
