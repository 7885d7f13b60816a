package restores

import (
	"fmt"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/report"
)

// A progress is a Display that also says how much time is left. Each Stage begins the next
// part of the schedule. How long parts take is estimated, and corrected by how long the
// replays have taken.
type progress struct {
	next report.Display   // immutable
	now  func() time.Time // immutable

	mu     sync.Mutex
	before string    // guarded by mu; put before the text of a stage
	parts  []part    // guarded by mu; of the schedule, not begun
	part   part      // guarded by mu; under way
	begun  time.Time // guarded by mu; when it began
	done   float64   // guarded by mu; share of it that is done; 0 = not known
	factor float64   // guarded by mu; how much longer than estimated replays take
	said   time.Time // guarded by mu; when the time left was last told
}

// A part is one stage of the schedule.
type part struct {
	estimate time.Duration
	replay   bool // its estimate is corrected
}

// sayEvery is how often the time left is told. Longer looks like a hang in a part without calls.
const sayEvery = time.Minute

func newProgress(next report.Display, parts []part) *progress {
	if next == nil {
		next = silent{}
	}
	return &progress{next: next, now: time.Now, parts: parts, factor: 1}
}

// prefix sets what is put before the text of stages.
func (p *progress) prefix(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = s
}

// Stage begins the next part.
func (p *progress) Stage(text string) {
	p.mu.Lock()
	now := p.now()
	if p.part.replay && p.part.estimate > 0 {
		p.factor = float64(now.Sub(p.begun)) / float64(p.part.estimate)
	}
	p.part = part{}
	if len(p.parts) > 0 {
		p.part, p.parts = p.parts[0], p.parts[1:]
	}
	p.begun, p.done, p.said = now, 0, now
	text = p.before + text + ", " + p.left(now)
	p.mu.Unlock()
	p.next.Stage(text)
}

// Event passes an event on.
func (p *progress) Event(line string) {
	p.next.Event(line)
	p.tell()
}

// Rows notes how far a replay is.
func (p *progress) Rows(rows []report.Row) {
	p.mu.Lock()
	ended, all := 0, 0
	for _, r := range rows {
		all += r.Calls
		if r.Phase == "done" || r.Phase == bench.Dead.String() {
			ended += r.Calls
		} else {
			ended += max(0, r.Call-1)
		}
	}
	if all > 0 {
		p.done = float64(ended) / float64(all)
	}
	p.mu.Unlock()
	p.next.Rows(rows)
	p.tell()
}

// Close ends the display.
func (p *progress) Close() { p.next.Close() }

// tell says what is left if that was not said for a while.
func (p *progress) tell() {
	p.mu.Lock()
	now := p.now()
	if now.Sub(p.said) < sayEvery {
		p.mu.Unlock()
		return
	}
	p.said = now
	text := p.left(now)
	p.mu.Unlock()
	p.next.Event(text)
}

// left says how much time is left. Caller holds mu.
func (p *progress) left(now time.Time) string {
	// Of a part under way its own pace says more than an estimate, once there is one.
	const trusted = 0.1
	spent := now.Sub(p.begun)
	rest := max(0, p.corrected(p.part)-spent)
	if p.done >= trusted {
		rest = time.Duration(float64(spent) * (1 - p.done) / p.done)
	}
	for _, x := range p.parts {
		rest += p.corrected(x)
	}
	if rest < time.Minute {
		return fmt.Sprintf("about %.0f s left in all", rest.Seconds())
	}
	return fmt.Sprintf("about %.0f min left in all", rest.Minutes())
}

// corrected is the estimate after what replays took. Caller holds mu.
func (p *progress) corrected(x part) time.Duration {
	if x.replay {
		return time.Duration(float64(x.estimate) * p.factor)
	}
	return x.estimate
}

// Costs that the schedule starts from, on 2 cores under TCG; on hardware all is faster, and
// the first run corrects those of replays.
const (
	perCall   = 1500 * time.Millisecond // of one core: mean of the built-in scenario
	perNative = 100 * time.Millisecond
	perClone  = 1200 * time.Millisecond // of one core
)

// schedule lists the stages in order, with estimates.
func (c *Config) schedule() []part {
	var parts []part
	calls := 0
	for _, p := range c.Main.Sandboxes {
		calls += len(p.Trajectory.Steps)
	}
	if c.Main.NativeReplay != nil {
		parts = append(parts, part{estimate: time.Duration(calls) * perNative})
	}
	runs := 2 * max(1, c.Main.Repeat)
	if c.Main.Alone {
		runs /= 2
	}
	for range runs {
		parts = append(parts, part{c.replayTime(c.Main.Sandboxes, c.Main.GapScale), true})
	}
	if n := len(c.Ablation.Variants); n > 0 {
		for range n + 1 {
			parts = append(parts, part{c.replayTime(c.Ablation.Plans, c.Ablation.GapScale), true})
		}
	}
	if n := c.Storm.Sandboxes; n > 0 {
		wake := time.Duration(n) * perCall / time.Duration(c.cores())
		parts = append(parts, part{estimate: time.Duration(n)*perClone/time.Duration(c.cores()) + wake + time.Duration(c.Storm.Rounds)*(stormGap+wake)})
	}
	if n := c.Idle.Sandboxes; n > 0 {
		parts = append(parts, part{estimate: time.Duration(n)*(perClone+perCall)/time.Duration(c.cores()) + 3*idleSettle})
	}
	return parts
}

func (c *Config) cores() int { return max(1, c.Cores) }

// replayTime is how long a replay takes at least: its longest trajectory, or all calls on all cores.
func (c *Config) replayTime(plans []bench.Plan, gapScale float64) time.Duration {
	longest, calls := time.Duration(0), 0
	for _, p := range plans {
		d := p.Shift
		for _, s := range p.Trajectory.Steps {
			think := s.Think
			if c.Main.MaxGap > 0 {
				think = min(think, c.Main.MaxGap)
			}
			d += think
		}
		n := len(p.Trajectory.Steps)
		longest = max(longest, time.Duration(float64(d)*gapScale)+time.Duration(n)*perCall)
		calls += n
	}
	return max(longest, time.Duration(calls)*perCall/time.Duration(c.cores())) + time.Duration(len(plans))*perClone/time.Duration(c.cores())
}

// silent is the Display of callers that want none.
type silent struct{}

func (silent) Stage(string)      {}
func (silent) Rows([]report.Row) {}
func (silent) Event(string)      {}
func (silent) Close()            {}
