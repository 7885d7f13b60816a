package daemon

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/units"
)

// A fakeTenant is a sandbox that needs memory.
type fakeTenant struct {
	need     units.Bytes
	squeezed int
	dead     error
}

func (f *fakeTenant) Need() units.Bytes { return f.need }
func (f *fakeTenant) Squeeze()          { f.squeezed++ }
func (f *fakeTenant) Cause() error      { return f.dead }

// fakeHost is a host of 16 GiB whose clock and memory a test sets.
type fakeHost struct {
	policy.HostSample
	pool float64
	err  error
}

func newFakeHost() (*fakeHost, *shortage) {
	h := &fakeHost{HostSample: policy.HostSample{At: time.Unix(1_700_000_000, 0), Total: 16 * units.GiB, Available: 8 * units.GiB, StallKnown: true}}
	w := newShortage(
		func() (policy.HostSample, error) { h.At = h.At.Add(time.Second); return h.HostSample, h.err },
		func() float64 { return h.pool }, slog.New(slog.DiscardHandler))
	return h, w
}

func refused(err error) bool {
	var r *policy.Refusal
	return errors.As(err, &r)
}

func TestAHostThatRunsShortSqueezesFirstAndThenRefuses(t *testing.T) {
	t.Parallel()
	h, w := newFakeHost()
	box := &fakeTenant{need: 10 * units.MiB}
	if err := w.admit(); err != nil {
		t.Fatal(err)
	}
	w.started(box)
	w.sample()
	if w.gauge.Level() != policy.Normal || box.squeezed != 0 {
		t.Errorf("with 8 GiB: %v, squeezed %d times", w.gauge.Level(), box.squeezed)
	}
	h.Available = 900 * units.MiB
	w.sample()
	w.sample()
	if w.gauge.Level() != policy.Tight || box.squeezed != 1 {
		t.Errorf("with 900 MiB: %v, squeezed %d times, want tight and once", w.gauge.Level(), box.squeezed)
	}
	if err := w.admit(); err != nil {
		t.Errorf("a tight host has room for one: %v", err)
	}
	w.started(nil)
	h.Available = 300 * units.MiB
	w.sample()
	if err := w.admit(); w.gauge.Level() != policy.Full || !refused(err) {
		t.Errorf("with 300 MiB: %v, %v, want full and a refusal", w.gauge.Level(), err)
	}
	h.Available = 8 * units.GiB
	for range 12 {
		w.sample()
	}
	if err := w.admit(); w.gauge.Level() != policy.Normal || err != nil {
		t.Errorf("12 s after it is over: %v, %v", w.gauge.Level(), err)
	}
}

func TestAFleetThatCouldNotWakeAtOnceGetsNoMoreMembers(t *testing.T) {
	t.Parallel()
	h, w := newFakeHost()
	h.Available = 2 * units.GiB
	n := 0
	for ; n < 1000; n++ {
		if err := w.admit(); err != nil {
			if !refused(err) {
				t.Fatal(err)
			}
			break
		}
		w.started(&fakeTenant{need: 16 * units.MiB}) // compressed: it occupies next to nothing, yet
		w.sample()
	}
	// 2 GiB less the floor of 512 MiB, less what one more needs, for 16 MiB each.
	if n < 80 || n > 95 {
		t.Errorf("%d sandboxes were admitted, want about 90", n)
	}
}

func TestSandboxesThatStartAtTheSameMomentCountTogether(t *testing.T) {
	t.Parallel()
	h, w := newFakeHost()
	h.Available = units.GiB
	w.sample()
	n := 0
	for w.admit() == nil {
		n++
	}
	if n != 6 { // 512 MiB above the floor for 80 MiB each
		t.Errorf("%d sandboxes start at once, want 6", n)
	}
	for range n {
		w.started(nil)
	}
	if err := w.admit(); err != nil {
		t.Errorf("after all of them failed: %v", err)
	}
}

func TestTheDeadNeedNothingAndABlindHostKeepsItsLevel(t *testing.T) {
	t.Parallel()
	h, w := newFakeHost()
	box := &fakeTenant{need: 8 * units.GiB}
	w.started(box)
	w.sample()
	if w.gauge.Level() != policy.Full {
		t.Errorf("what one needs is all there is: %v, want full", w.gauge.Level())
	}
	h.err = errors.New("no /proc")
	for range 20 {
		w.sample()
	}
	if w.gauge.Level() != policy.Full {
		t.Errorf("while nothing is known: %v, want full", w.gauge.Level())
	}
	h.err, box.dead = nil, errors.New("killed")
	for range 12 {
		w.sample()
	}
	if w.gauge.Level() != policy.Normal {
		t.Errorf("after its death: %v, want normal", w.gauge.Level())
	}
	h.pool = 0.95
	w.sample()
	if w.gauge.Level() != policy.Tight {
		t.Errorf("with a pool that is nearly full: %v, want tight", w.gauge.Level())
	}
}
