package lifecycle

import (
	"fmt"
	"sync"
)

// quota counts places: a box holds one from before its VM is made until after it
// has ended. Its lock is a leaf: it may be taken with any other held.
type quota struct {
	limits Limits // immutable

	mu      sync.Mutex
	closed  bool           // guarded by mu
	perTeam map[string]int // guarded by mu
	total   int            // guarded by mu
}

// admit takes n places, or says which limit is reached.
func (q *quota) admit(team string, n int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return fmt.Errorf("%w: the daemon is stopping", ErrBusy)
	}
	own := q.perTeam[team]
	if q.limits.PerTeam != nil {
		if limit := q.limits.PerTeam(team); limit > 0 && own+n > limit {
			return fmt.Errorf("%w: the team has %d of %d concurrent sandboxes", ErrLimit, own, limit)
		}
	}
	if q.limits.Total > 0 && q.total+n > q.limits.Total {
		return fmt.Errorf("%w: %d of %d concurrent sandboxes", ErrBusy, q.total, q.limits.Total)
	}
	q.perTeam[team] += n
	q.total += n
	return nil
}

// release gives one place back.
func (q *quota) release(team string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total--
	if q.perTeam[team]--; q.perTeam[team] == 0 {
		delete(q.perTeam, team)
	}
}

// close admits nobody any more.
func (q *quota) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
}
