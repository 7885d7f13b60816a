package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// An operation of a history: what a client asked, what it was told, and when.
// Times are ticks of one counter.
type operation struct {
	client     int
	name       string // pause, connect, kill, get, snapshot
	result     string
	begin, end int64
}

func (o operation) String() string {
	return fmt.Sprintf("client %d: %s -> %s [%d, %d]", o.client, o.name, o.result, o.begin, o.end)
}

// step is the sequential model of one sandbox: what an operation may answer in a
// state, and the state after it.
func step(state, name, result string) (string, bool) {
	allowed := map[string]map[string]map[string]string{ // state, operation, result: next state
		"running": {
			"pause":    {"ok": "paused"},
			"connect":  {"running": "running"},
			"kill":     {"ok": "gone"},
			"get":      {"running": "running"},
			"snapshot": {"ok": "running"},
		},
		"paused": {
			"pause":    {"conflict": "paused"},
			"connect":  {"resumed": "running"},
			"kill":     {"ok": "gone"},
			"get":      {"paused": "paused"},
			"snapshot": {"conflict": "paused"},
		},
		"gone": {
			"pause":    {"not found": "gone"},
			"connect":  {"not found": "gone"},
			"kill":     {"not found": "gone"},
			"get":      {"not found": "gone"},
			"snapshot": {"not found": "gone"},
		},
	}
	next, ok := allowed[state][name][result]
	return next, ok
}

// linearizable looks for an order of the operations that the model allows and
// that respects real time (Wing and Gong), remembering what it has tried.
func linearizable(history []operation) bool {
	tried := map[string]bool{}
	done := make([]bool, len(history))
	var search func(state string, left int) bool
	search = func(state string, left int) bool {
		if left == 0 {
			return true
		}
		key := fmt.Sprint(state, done)
		if tried[key] {
			return false
		}
		tried[key] = true
		// Only what began before everything that is left has ended may come next.
		first := int64(1 << 62)
		for i, o := range history {
			if !done[i] {
				first = min(first, o.end)
			}
		}
		for i, o := range history {
			if done[i] || o.begin > first {
				continue
			}
			if next, ok := step(state, o.name, o.result); ok {
				done[i] = true
				if search(next, left-1) {
					return true
				}
				done[i] = false
			}
		}
		return false
	}
	return search("running", len(history))
}

func TestTheCheckerOfHistoriesFindsWhatCannotBe(t *testing.T) {
	op := func(name, result string, begin, end int64) operation {
		return operation{name: name, result: result, begin: begin, end: end}
	}
	for name, c := range map[string]struct {
		history []operation
		want    bool
	}{
		"one after the other":                      {[]operation{op("pause", "ok", 1, 2), op("get", "paused", 3, 4)}, true},
		"a read that lags":                         {[]operation{op("pause", "ok", 1, 2), op("get", "running", 3, 4)}, false},
		"a read beside the pause, before its end":  {[]operation{op("pause", "ok", 1, 4), op("get", "paused", 2, 3)}, true},
		"two pauses that both worked":              {[]operation{op("pause", "ok", 1, 4), op("pause", "ok", 2, 3)}, false},
		"a sandbox that comes back from the dead":  {[]operation{op("kill", "ok", 1, 2), op("connect", "resumed", 3, 4)}, false},
		"a kill and a connect at the same time":    {[]operation{op("kill", "ok", 1, 4), op("connect", "not found", 2, 3)}, true},
		"a connect that did not see an older kill": {[]operation{op("kill", "ok", 1, 2), op("connect", "running", 3, 4)}, false},
	} {
		if got := linearizable(c.history); got != c.want {
			t.Errorf("%s: linearizable = %v, want %v", name, got, c.want)
		}
	}
}

// ask does one operation and says what a client would be told.
func ask(r *rig, id, name string) string {
	ctx := context.Background()
	b, err := r.fleet.Get("red", id)
	if err == nil {
		switch name {
		case "pause":
			err = b.Pause(ctx, true)
		case "kill":
			err = b.Kill(lifecycle.CauseKilled)
		case "snapshot":
			_, err = b.Snapshot(ctx, "s"+lifecycle.NewID())
		case "connect":
			var c lifecycle.Connected
			if c, err = b.Connect(ctx, lifecycle.Wake{Timeout: time.Hour}); err == nil {
				if c.Resumed {
					return "resumed"
				}
				return "running"
			}
		case "get":
			if v := b.View().Visible(); v != "" {
				return v
			}
			return "not found"
		}
	}
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, lifecycle.ErrNotFound), errors.Is(err, lifecycle.ErrKilling):
		return "not found"
	case errors.Is(err, lifecycle.ErrPaused):
		return "conflict"
	}
	return err.Error()
}

func TestHistoriesOfConcurrentOperationsAreLinearizable(t *testing.T) {
	r := newRig(t, lifecycle.Limits{})
	defer r.close(false)
	var pause atomic.Int64 // microseconds that the backend takes
	r.backend.Hook = func(string, string) error {
		time.Sleep(time.Duration(pause.Load()) * time.Microsecond)
		return nil
	}
	rapid.Check(t, func(rt *rapid.T) {
		pause.Store(rapid.Int64Range(0, 300).Draw(rt, "backend's time"))
		plans := rapid.SliceOfN(rapid.SliceOfN(rapid.SampledFrom(
			[]string{"pause", "pause", "connect", "connect", "get", "get", "snapshot", "kill"}), 1, 5), 2, 4).Draw(rt, "plans")
		b := r.create(store.Sandbox{})
		var clock atomic.Int64
		var mu sync.Mutex
		var history []operation
		var wg sync.WaitGroup
		for client, plan := range plans {
			wg.Go(func() {
				for _, name := range plan {
					o := operation{client: client, name: name, begin: clock.Add(1)}
					o.result = ask(r, b.ID(), name)
					o.end = clock.Add(1)
					mu.Lock()
					history = append(history, o)
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if !linearizable(history) {
			slices.SortFunc(history, func(x, y operation) int { return int(x.begin - y.begin) })
			lines := make([]string, len(history))
			for i, o := range history {
				lines[i] = o.String()
			}
			rt.Fatalf("no sequential order explains:\n%s", strings.Join(lines, "\n"))
		}
		if ask(r, b.ID(), "kill"); b.View().State != lifecycle.Gone {
			rt.Fatalf("state after a kill = %v", b.View().State)
		}
		if live := r.backend.Live(b.ID()); live != nil {
			rt.Fatal("a killed sandbox runs on")
		}
	})
	live, _ := r.backend.Count()
	if live != 0 {
		t.Errorf("%d sandboxes are left", live)
	}
}
