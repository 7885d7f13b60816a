package step

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestASilentStepIsRepeatedWithItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var got []string // guarded by mu: the beats come from a goroutine of the Pulse
		f := Func(func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, e.Message)
		})
		p := f.Heartbeat(t.Context(), "boot", "waiting")
		time.Sleep(2100 * time.Millisecond)
		p.Set(1, 3, "first command")
		time.Sleep(time.Second)
		p.Set(2, 3, "second command") // no beat between these two: one came a second ago
		time.Sleep(2100 * time.Millisecond)
		p.Stop()
		time.Sleep(time.Minute)
		want := []string{"waiting (2 s)", "first command", "second command", "second command (5 s)"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("messages (-want +got):\n%s", diff)
		}
	})
}

func TestNobodyListening(t *testing.T) {
	var f Func
	p := f.Heartbeat(t.Context(), "x", "y")
	p.Set(0, 0, "z")
	f.Say("x", "y")
	p.Stop()
	got := ""
	Func(func(e Event) { got = e.Step + e.Message }).Done("a", "%s", strings.Repeat("b", 2))
	if got != "abb" {
		t.Errorf("got %q, want abb", got)
	}
}
