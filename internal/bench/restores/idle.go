package restores

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/bench"
	"github.com/agentzip/agentzip/internal/traj"
	"github.com/agentzip/agentzip/internal/units"
)

// Idle says how many sandboxes sleep while the host's memory is read.
type Idle struct {
	Sandboxes int       // 0 = not measured
	Step      traj.Step // what each of them did before
}

// idleSettle is how long a state lasts before it is read: passes come 1, 4 and 16 s after a
// call, and what is freed late (a process that ends, the kernel's per-CPU lists) is freed then.
// Half as long, the third pass is not over.
const idleSettle = 20 * time.Second

// IdleResult is what one idle sandbox occupies, all in bytes.
type IdleResult struct {
	Sandboxes int         `json:"sandboxes"`
	States    []IdleState `json:"states"`
	NotParked string      `json:"not_parked,omitempty"` // why there is no such state
	Drift     float64     `json:"drift"`                // what the host misses when all are gone again, over their number: not theirs
}

// IdleState is the account of one way to be idle, per sandbox.
type IdleState struct {
	Name      string     `json:"name"`
	Available float64    `json:"available"` // MemAvailable before minus then, over their number
	Parts     []IdlePart `json:"parts"`     // what of it can be told
}

// IdlePart is one part of an account.
type IdlePart struct {
	Name  string  `json:"name"`
	Bytes float64 `json:"bytes"`
	TCG   bool    `json:"tcg,omitempty"` // would not be there with hardware virtualisation
}

// Names of the states.
const (
	stateResting = "compressed"
	stateParked  = "parked"
)

// Sum adds up the parts.
func (s *IdleState) Sum() (sum float64) {
	for _, p := range s.Parts {
		sum += p.Bytes
	}
	return sum
}

// WithoutTCG is what the host misses, less what belongs to TCG.
func (s *IdleState) WithoutTCG() float64 {
	n := s.Available
	for _, p := range s.Parts {
		if p.TCG {
			n -= p.Bytes
		}
	}
	return n
}

// state returns a state by name.
func (r *IdleResult) state(name string) *IdleState {
	if r == nil {
		return nil
	}
	i := slices.IndexFunc(r.States, func(s IdleState) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &r.States[i]
}

// Best is the state that counts: parked, or where nothing can be parked, resting.
func (r *IdleResult) Best() *IdleState {
	if s := r.state(stateParked); s != nil {
		return s
	}
	return r.state(stateResting)
}

// idle makes the sandboxes, lets them rest, and parks them.
func (c *Config) idle(ctx context.Context, show *progress) (res *IdleResult, err error) {
	n := c.Idle.Sandboxes
	show.Stage(fmt.Sprintf("idle: %d compressed sandboxes", n))
	colony, err := c.Colony(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, colony.Close()) }()
	// One comes and goes first: what the host and this process need once is not theirs.
	spec := c.spec(c.Idle.Step)
	first, err := settle(ctx, colony, 1, spec, show)
	if err != nil {
		return nil, err
	}
	if err := first[0].Close(); err != nil {
		return nil, fmt.Errorf("close the first sandbox: %w", err)
	}
	if !bench.Sleep(ctx, time.Second) {
		return nil, context.Cause(ctx)
	}
	before, err := account(colony, nil)
	if err != nil {
		return nil, err
	}
	boxes, err := settle(ctx, colony, n, spec, show)
	if err != nil {
		return nil, err
	}
	res = &IdleResult{Sandboxes: n}
	read := func(name string) error {
		if !bench.Sleep(ctx, idleSettle) {
			return context.Cause(ctx)
		}
		after, err := account(colony, boxes)
		if err != nil {
			return err
		}
		s := after.since(before, name, n)
		show.Event(fmt.Sprintf("%s: %.1f MB of the host each, %.1f MB can be told apart", name, s.Available/mega, s.Sum()/mega))
		res.States = append(res.States, s)
		return nil
	}
	if err := sleepAll(ctx, boxes); err != nil {
		return nil, err
	}
	if err := read(stateResting); err != nil {
		return nil, err
	}
	if res.NotParked, err = park(ctx, boxes); err != nil {
		return nil, err
	}
	if res.NotParked == "" {
		if err := read(stateParked); err != nil {
			return nil, err
		}
	}
	for i, b := range boxes {
		if err := b.Close(); err != nil {
			return nil, fmt.Errorf("close sandbox %s: %w", boxName(i), err)
		}
	}
	if !bench.Sleep(ctx, time.Second) {
		return nil, context.Cause(ctx)
	}
	end, err := account(colony, nil)
	res.Drift = float64(before.available-end.available) / float64(n)
	return res, err
}

// park parks all sandboxes, or says why none can be.
func park(ctx context.Context, boxes []Sleeper) (why string, err error) {
	for i, b := range boxes {
		err := b.Park(ctx)
		if i == 0 && errors.Is(err, errors.ErrUnsupported) {
			return "sandboxes cannot be parked in this version", nil
		}
		if err != nil {
			return "", fmt.Errorf("park sandbox %s: %w", boxName(i), err)
		}
	}
	return "", nil
}

// An accounting is what the host has left and who has what, in total.
type accounting struct {
	available units.Bytes
	vmm       vmmParts
	tables    units.Bytes // page tables of the VMMs
	kernel    units.Bytes // other kernel memory charged to them
	fleet     bench.FleetUsage
	daemon    units.Bytes // anonymous memory of this process
}

// account reads everything at one moment.
func account(colony Colony, boxes []Sleeper) (a accounting, err error) {
	for i, b := range boxes {
		p, err := b.Process()
		if err != nil {
			return a, fmt.Errorf("find process of sandbox %s: %w", boxName(i), err)
		}
		if p.PID == 0 {
			continue
		}
		v, err := processParts(p.PID)
		if err != nil {
			return a, fmt.Errorf("account for sandbox %s: %w", boxName(i), err)
		}
		pte, err := kibField(fmt.Sprintf("/proc/%d/status", p.PID), "VmPTE")
		if err != nil {
			return a, fmt.Errorf("account for sandbox %s: %w", boxName(i), err)
		}
		a.vmm.Guest, a.vmm.Code, a.vmm.Tables, a.vmm.Rest = a.vmm.Guest+v.Guest, a.vmm.Code+v.Code, a.vmm.Tables+v.Tables, a.vmm.Rest+v.Rest
		a.tables += pte
		a.kernel += max(0, p.Kernel-pte)
	}
	if a.fleet, err = colony.Usage(); err != nil {
		return a, fmt.Errorf("account for the cohort: %w", err)
	}
	debug.FreeOSMemory() // garbage of starting them is not what they occupy
	if a.daemon, err = kibField("/proc/self/status", "RssAnon"); err != nil {
		return a, err
	}
	a.available, err = available()
	return a, err
}

// available is the median of a few readings: other programs come and go.
func available() (units.Bytes, error) {
	var all []units.Bytes
	for range 9 {
		n, err := kibField("/proc/meminfo", "MemAvailable")
		if err != nil {
			return 0, err
		}
		all = append(all, n)
		time.Sleep(100 * time.Millisecond)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// since makes the account of what came since an earlier one, per sandbox.
func (a accounting) since(before accounting, name string, n int) IdleState {
	per := func(b units.Bytes) float64 { return float64(b) / float64(n) }
	pool := func(u bench.FleetUsage) units.Bytes { return u.PoolShare() - u.PageTables }
	return IdleState{
		Name: name, Available: per(before.available - a.available),
		Parts: []IdlePart{
			{"private guest pages", per(a.vmm.Guest), false},
			{"VMM: heap, stacks, relocated data", per(a.vmm.Rest), false},
			{"VMM: translated code (TCG)", per(a.vmm.Code), true},
			{"VMM: tables of translations (TCG)", per(a.vmm.Tables), true},
			{"kernel: page tables of the VMM", per(a.tables), false},
			{"kernel: other memory of its cgroup", per(a.kernel), false},
			{"pool, indexes, dictionaries", per(pool(a.fleet) - pool(before.fleet)), false},
			{"page tables of the pager", per(a.fleet.PageTables - before.fleet.PageTables), false},
			{"this process (heap and stacks)", per(a.daemon - before.daemon), false},
		},
	}
}

// mega is the MB of published figures: ten to the sixth, the larger number for the same memory.
const mega = 1e6
