package guestagent

import (
	"errors"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"

	pb "github.com/agentzip/agentzip/api/gen/process"
)

const (
	// keepEnded is how long a Connect still finds a process that ended. Shorter
	// loses results for clients that reconnect after a broken stream.
	keepEnded = 30 * time.Second
	// keepEndedCount bounds how many are kept: they are forgotten when the next
	// one ends, not by a timer, because an idle guest must not wake up.
	keepEndedCount = 256
)

// processes are the commands started through the agent.
type processes struct {
	// shielded says that the agent itself is hidden from the OOM killer, which
	// its commands must not be. Immutable.
	shielded bool
	// busy is called with true before the first command runs and with false
	// after the last one ended. Immutable, may be nil.
	busy func(bool)

	startMu sync.Mutex // orders starts; held across a fork, never taken under mu

	mu      sync.Mutex
	byPID   map[uint32]*process // guarded by mu; running, and ended not long ago
	ended   []*process          // guarded by mu; those of byPID that ended, oldest first
	running int                 // guarded by mu
}

// fork runs start, which forks. The child inherits the agent's score against
// the OOM killer, and setting it afterwards would be too late for what the
// child forks itself: so the agent drops its own shield for this moment.
func (ps *processes) fork(start func() error) error {
	ps.startMu.Lock()
	defer ps.startMu.Unlock()
	if ps.shielded {
		if err := os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0); err != nil {
			return err
		}
		defer os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0) //nolint:errcheck // was possible a moment ago
	}
	return start()
}

// start starts l and registers the process. The caller must call run.
func (ps *processes) start(l launch) (*process, error) {
	ps.count(+1)
	l.wrap = ps.fork
	p, err := l.start()
	if err != nil {
		ps.count(-1)
		return nil, err
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.byPID[p.pid] = p
	return p, nil
}

// count keeps the number of running commands. busy is called under mu, so that
// a start and an end cannot swap.
func (ps *processes) count(delta int) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	before := ps.running
	ps.running += delta
	if ps.busy != nil && (before == 0) != (ps.running == 0) {
		ps.busy(ps.running > 0)
	}
}

// end is called when p has ended.
func (ps *processes) end(p *process) {
	ps.count(-1)
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.ended = append(ps.ended, p)
	ps.forgetLocked()
}

// forgetLocked drops processes that ended too long ago. Preconditions: mu is held.
func (ps *processes) forgetLocked() {
	for len(ps.ended) > 0 {
		p := ps.ended[0]
		p.mu.Lock()
		old := time.Since(p.endedAt) > keepEnded
		p.mu.Unlock()
		if !old && len(ps.ended) <= keepEndedCount {
			return
		}
		ps.ended[0] = nil
		ps.ended = ps.ended[1:]
		if ps.byPID[p.pid] == p { // the pid may be in use again
			delete(ps.byPID, p.pid)
		}
	}
}

var errNoProcess = errors.New("process not found")

// find returns the process a selector names, running or ended not long ago.
func (ps *processes) find(sel *pb.ProcessSelector) (*process, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.forgetLocked()
	switch s := sel.GetSelector().(type) {
	case *pb.ProcessSelector_Pid:
		if p := ps.byPID[s.Pid]; p != nil {
			return p, nil
		}
	case *pb.ProcessSelector_Tag:
		var last *process // a tag may be used again; a running process comes before an ended one
		for _, p := range ps.byPID {
			if p.tag == nil || *p.tag != s.Tag {
				continue
			}
			if !p.over() {
				return p, nil
			}
			last = p
		}
		if last != nil {
			return last, nil
		}
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("a pid or a tag is required"))
	}
	return nil, connect.NewError(connect.CodeNotFound, errNoProcess)
}

// over says that p has ended.
func (p *process) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended != nil
}

// findRunning is find without the ended ones.
func (ps *processes) findRunning(sel *pb.ProcessSelector) (*process, error) {
	p, err := ps.find(sel)
	if err != nil {
		return nil, err
	}
	if p.over() {
		return nil, connect.NewError(connect.CodeNotFound, errNoProcess)
	}
	return p, nil
}

// list returns the running processes.
func (ps *processes) list() []*pb.ProcessInfo {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var infos []*pb.ProcessInfo
	for _, p := range ps.byPID {
		if !p.over() {
			infos = append(infos, &pb.ProcessInfo{Config: p.config, Pid: p.pid, Tag: p.tag})
		}
	}
	return infos
}

func (ps *processes) runningCount() int {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.running
}
