package lifecycle_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/gateway/gatewaytest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a fleet over a fake backend.
type rig struct {
	t       *testing.T
	dir     string
	backend *gatewaytest.Backend
	store   *store.Store
	fleet   *lifecycle.Fleet
}

func newRig(t *testing.T, l lifecycle.Limits) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), backend: gatewaytest.New()}
	r.open(l)
	return r
}

func (r *rig) open(l lifecycle.Limits) {
	r.t.Helper()
	var err error
	if r.store, err = store.Open(r.dir, slog.New(slog.DiscardHandler)); err != nil {
		r.t.Fatal(err)
	}
	if r.fleet, err = lifecycle.Open(lifecycle.Options{Backend: r.backend, Store: r.store, Limits: l}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) close(pause bool) {
	r.t.Helper()
	if err := r.fleet.Close(pause); err != nil {
		r.t.Error(err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) create(rec store.Sandbox) *lifecycle.Box {
	r.t.Helper()
	if rec.Team == "" {
		rec.Team = "red"
	}
	if rec.Timeout == 0 {
		rec.Timeout = time.Hour
	}
	rec.Template = "base"
	v, err := r.fleet.Create(context.Background(), rec)
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := r.fleet.Get(rec.Team, v.ID)
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

func TestTheTimeToLive(t *testing.T) {
	for name, c := range map[string]struct {
		rec  store.Sandbox
		do   func(t *testing.T, r *rig, b *lifecycle.Box)
		want map[time.Duration]string // visible state after that time
	}{
		"kills at its end": {
			rec:  store.Sandbox{Timeout: 3 * time.Second},
			want: map[time.Duration]string{2900 * time.Millisecond: "running", 3100 * time.Millisecond: ""},
		},
		"pauses at its end if it is to": {
			rec:  store.Sandbox{Timeout: 3 * time.Second, AutoPause: true, AutoMemory: true},
			want: map[time.Duration]string{2900 * time.Millisecond: "running", 3100 * time.Millisecond: "paused", time.Hour: "paused"},
		},
		"may be shortened": {
			rec: store.Sandbox{Timeout: time.Hour},
			do: func(t *testing.T, _ *rig, b *lifecycle.Box) {
				if err := b.SetTimeout(time.Second, false); err != nil {
					t.Error(err)
				}
			},
			want: map[time.Duration]string{900 * time.Millisecond: "running", 1100 * time.Millisecond: ""},
		},
		"is only extended by a refresh and a connect": {
			rec: store.Sandbox{Timeout: 10 * time.Second},
			do: func(t *testing.T, _ *rig, b *lifecycle.Box) {
				if err := b.SetTimeout(time.Second, true); err != nil {
					t.Error(err)
				}
				if _, err := b.Connect(context.Background(), lifecycle.Wake{Timeout: 2 * time.Second}); err != nil {
					t.Error(err)
				}
			},
			want: map[time.Duration]string{9 * time.Second: "running", 11 * time.Second: ""},
		},
		"stands still while paused": {
			rec: store.Sandbox{Timeout: 10 * time.Second},
			do: func(t *testing.T, _ *rig, b *lifecycle.Box) {
				if err := b.Pause(context.Background(), true); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Hour)
				if _, err := b.Connect(context.Background(), lifecycle.Wake{Timeout: 20 * time.Second}); err != nil {
					t.Error(err)
				}
			},
			want: map[time.Duration]string{time.Hour + 19*time.Second: "running", time.Hour + 21*time.Second: ""},
		},
		"is over at once if it is zero": {
			rec: store.Sandbox{Timeout: time.Hour},
			do: func(t *testing.T, _ *rig, b *lifecycle.Box) {
				if err := b.SetTimeout(-time.Second, false); err != nil {
					t.Error(err)
				}
			},
			want: map[time.Duration]string{time.Millisecond: ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, lifecycle.Limits{})
				defer r.close(false)
				b := r.create(c.rec)
				begin := time.Now()
				if c.do != nil {
					c.do(t, r, b)
				}
				got := map[time.Duration]string{}
				for _, at := range sorted(c.want) {
					time.Sleep(at - time.Since(begin))
					synctest.Wait()
					got[at] = b.View().Visible()
				}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func sorted(m map[time.Duration]string) []time.Duration {
	var list []time.Duration
	for d := range m {
		list = append(list, d)
	}
	for i := range list {
		for j := i; j > 0 && list[j] < list[j-1]; j-- {
			list[j], list[j-1] = list[j-1], list[j]
		}
	}
	return list
}

func TestThePausePolicySurvivesAResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, lifecycle.Limits{})
		defer r.close(false)
		b := r.create(store.Sandbox{Timeout: time.Second, AutoPause: true, AutoMemory: true})
		for range 3 {
			time.Sleep(1100 * time.Millisecond)
			synctest.Wait()
			if s := b.View().State; s != lifecycle.Paused {
				t.Fatalf("state %v, want paused", s)
			}
			c, err := b.Connect(context.Background(), lifecycle.Wake{Timeout: time.Second})
			if err != nil || !c.Resumed {
				t.Fatalf("connect = %+v, %v, want resumed", c, err)
			}
		}
	})
}

func TestAnAutomaticPauseThatFailsIsTriedAgainAndNothingIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, lifecycle.Limits{})
		defer r.close(false)
		var full atomic.Bool
		full.Store(true)
		r.backend.Hook = func(op, _ string) error {
			if op == "pause" && full.Load() {
				return errors.New("no space left on device")
			}
			return nil
		}
		b := r.create(store.Sandbox{Timeout: time.Second, AutoPause: true, AutoMemory: true})
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if s := b.View().State; s != lifecycle.Running {
			t.Fatalf("state %v while the disk is full, want running", s)
		}
		full.Store(false)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if s := b.View().State; s != lifecycle.Paused {
			t.Fatalf("state %v when there is room again, want paused", s)
		}
	})
}

func TestAfterARestartThePausedAreThereAndTheOthersAreLost(t *testing.T) {
	r := newRig(t, lifecycle.Limits{})
	meta := map[string]string{"a": "b"}
	paused := r.create(store.Sandbox{Metadata: meta, AutoPause: true, AutoMemory: true, AutoResume: true})
	if err := paused.Pause(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	want := paused.View()
	running := r.create(store.Sandbox{})
	lost := running.View().Sandbox
	r.backend.Lose()
	r.close(false)
	// As after kill -9: the record of the running one is still there.
	st, err := store.Open(r.dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(st.Put(store.Sandboxes, lost.ID, lost), st.Close()); err != nil {
		t.Fatal(err)
	}
	r.open(lifecycle.Limits{})
	got, err := r.fleet.Get("red", paused.ID())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.Sandbox, got.View().Sandbox, cmp.Comparer(time.Time.Equal)); diff != "" {
		t.Errorf("record after the restart (-want +got):\n%s", diff)
	}
	if _, err := got.Connect(context.Background(), lifecycle.Wake{Timeout: time.Hour}); err != nil {
		t.Errorf("resume after a restart: %v", err)
	}
	if _, err := r.fleet.Get("red", running.ID()); !errors.Is(err, lifecycle.ErrNotFound) {
		t.Errorf("get of one that ran = %v, want not found", err)
	}
	if v, err := r.fleet.Explain("red", running.ID()); err != nil || v.Cause != lifecycle.CauseLost {
		t.Errorf("cause of death of one that ran = %q, %v, want lost", v.Cause, err)
	}
	r.close(false)
}

func TestADaemonThatDiedBetweenImageAndRecordLosesNothing(t *testing.T) {
	r := newRig(t, lifecycle.Limits{})
	b := r.create(store.Sandbox{})
	rec := b.View().Sandbox
	if err := b.Pause(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	rec.Paused, rec.MemoryKept = false, false
	if err := r.store.Put(store.Sandboxes, b.ID(), rec); err != nil { // the record of a moment before
		t.Fatal(err)
	}
	orphan := r.create(store.Sandbox{})
	if err := orphan.Pause(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	if err := r.store.Delete(store.Sandboxes, orphan.ID()); err != nil {
		t.Fatal(err)
	}
	r.close(true)
	r.open(lifecycle.Limits{})
	defer r.close(false)
	got, err := r.fleet.Get("red", b.ID())
	if err != nil || got.View().Visible() != "paused" || !got.View().MemoryKept {
		t.Errorf("the one whose image was written: %v, %v; want paused with its memory", got, err)
	}
	if _, kept := r.backend.Count(); kept != 1 {
		t.Errorf("%d images kept, want 1: the other has no record", kept)
	}
}

func TestTheCauseOfDeathIsKept(t *testing.T) {
	r := newRig(t, lifecycle.Limits{})
	defer r.close(false)
	crashed, killed := r.create(store.Sandbox{}), r.create(store.Sandbox{})
	r.backend.Live(crashed.ID()).Die(lifecycle.CauseGuestOOM, "Out of memory: Killed process 1")
	for crashed.View().State != lifecycle.Gone {
		time.Sleep(time.Millisecond)
	}
	if err := killed.Kill(lifecycle.CauseKilled); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]lifecycle.Cause{crashed.ID(): lifecycle.CauseGuestOOM, killed.ID(): lifecycle.CauseKilled} {
		v, err := r.fleet.Explain("red", id)
		if err != nil || v.Cause != want {
			t.Errorf("cause of death of %s = %q, %v, want %q", id, v.Cause, err, want)
		}
		if _, err := r.fleet.Explain("blue", id); !errors.Is(err, lifecycle.ErrNotFound) {
			t.Errorf("another team is told: %v", err)
		}
	}
}

func TestLimits(t *testing.T) {
	r := newRig(t, lifecycle.Limits{Total: 4, PerTeam: func(string) int { return 3 }})
	defer r.close(false)
	first := r.create(store.Sandbox{})
	r.create(store.Sandbox{})
	forks, err := first.Fork(context.Background(), 2, time.Hour)
	if !errors.Is(err, lifecycle.ErrLimit) {
		t.Errorf("fork over the team's limit = %v, %v", forks, err)
	}
	r.create(store.Sandbox{})
	if _, err := r.fleet.Create(context.Background(), store.Sandbox{Team: "red", Template: "base"}); !errors.Is(err, lifecycle.ErrLimit) {
		t.Errorf("create over the team's limit = %v", err)
	}
	r.create(store.Sandbox{Team: "blue"})
	if _, err := r.fleet.Create(context.Background(), store.Sandbox{Team: "blue", Template: "base"}); !errors.Is(err, lifecycle.ErrBusy) {
		t.Errorf("create over the host's limit = %v", err)
	}
	// A paused one gives its place up, and needs one to come back.
	if err := first.Pause(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	r.create(store.Sandbox{})
	if _, err := first.Connect(context.Background(), lifecycle.Wake{}); !errors.Is(err, lifecycle.ErrLimit) {
		t.Errorf("resume over the limit = %v", err)
	}
	if s := first.View().State; s != lifecycle.Paused {
		t.Errorf("state after a refused resume = %v, want paused", s)
	}
}

func TestEveryStateIsReachableAndGoneIsFinal(t *testing.T) {
	seen := map[lifecycle.State]bool{lifecycle.Absent: true}
	queue := []lifecycle.State{lifecycle.Absent}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		killable := false
		for e := lifecycle.Create; e <= lifecycle.Died; e++ {
			to, ok := lifecycle.Next(s, e)
			killable = killable || (ok && e == lifecycle.Kill)
			if ok && !seen[to] {
				seen[to] = true
				queue = append(queue, to)
			}
		}
		if want := s != lifecycle.Absent && s != lifecycle.Killing && s != lifecycle.Gone; killable != want {
			t.Errorf("%v: kill allowed = %v, want %v", s, killable, want)
		}
	}
	if len(seen) != int(lifecycle.Gone)+1 {
		t.Errorf("%d states are reachable, want all %d", len(seen), lifecycle.Gone+1)
	}
}
