package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

var ignoreTook = cmpopts.IgnoreFields(RestoreResult{}, "Took")

// restore restores pages that are needed.
func (r *rig) restore(pages ...Touch) RestoreResult {
	r.t.Helper()
	res, err := r.pager.Restore(context.Background(), pages, Needed)
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func TestPagesThatWillBeWrittenTakeTheWriteWithoutAFaultWhateverTheyWere(t *testing.T) {
	r := newRig(t, 64, 1, func(o *Options) { o.FaultAround, o.LeaveUnmapped = 1, true }).serve()
	r.write(6, textPage(1)) // evicted
	r.write(7, zeroPage())  // zero
	r.write(8, randomPage(1))
	r.evict()
	r.read(11) // the template's page, mapped
	var pages []Touch
	for f := units.Frame(5); f < 13; f++ { // 5 and 10 are holes
		pages = append(pages, Touch{Frame: f, Write: true})
	}
	want := RestoreResult{Evicted: 1, Private: 5, Present: 2}
	if d := cmp.Diff(want, r.restore(pages...), ignoreTook); d != "" {
		t.Errorf("restore (-want +got):\n%s", d)
	}
	contents := map[units.Frame]*units.Page{6: textPage(1), 7: zeroPage(), 8: randomPage(1)}
	before := r.pager.Faults()
	for f := units.Frame(5); f < 13; f++ {
		if contents[f] == nil {
			contents[f] = guestmemtest.Base(f)
		}
		if *r.read(f) != *contents[f] {
			t.Errorf("frame %d has another content", f)
		}
		r.poke(f, uint64(f))
		binary.NativeEndian.PutUint64(contents[f][64:], uint64(f))
	}
	if n := r.pager.Faults() - before; n != 0 {
		t.Errorf("%d faults, want none", n)
	}
	for f, p := range contents {
		checkThroughEviction(t, r, f, p)
	}
}

func TestPagesThatWillBeReadAreSharedWhereTheyCanBe(t *testing.T) {
	r := newRig(t, 64, 1, func(o *Options) { o.FaultAround, o.LeaveUnmapped = 1, true }).serve()
	r.write(6, textPage(1))
	r.write(7, zeroPage())
	r.evict()
	want := RestoreResult{Evicted: 1, Shared: 4, Present: 3}
	if d := cmp.Diff(want, r.restore(reads(6, 7, 8, 9, 10, 10, 64, 1000)...), ignoreTook); d != "" {
		t.Errorf("restore (-want +got):\n%s", d)
	}
	if u, err := r.pager.Usage(); err != nil || u.Resident != units.PageSize {
		t.Errorf("usage %+v, %v: want the evicted page alone private", u, err)
	}
}

func TestFaultsAreToldInTheirOrderAndTheReaderIsNotified(t *testing.T) {
	r := newRig(t, 256, 1, protectRestored, func(o *Options) { o.FaultAround, o.LeaveUnmapped = 1, true }).serve()
	r.write(96, textPage(1))
	r.write(6, zeroPage())
	r.evict()
	r.pager.DrainTouched(nil)
	select {
	case <-r.pager.Notify():
	default:
		t.Error("nobody was notified of the first faults")
	}
	r.read(96)
	r.read(11)
	r.read(10)
	r.read(6)
	r.poke(96, 1)
	r.read(96) // there: no fault
	want := []Touch{{96, false, KindEvicted}, {11, false, KindTemplate}, {10, false, KindZero}, {6, false, KindZero}, {96, true, KindProtected}}
	select {
	case <-r.pager.Notify():
	case <-time.After(5 * time.Second):
		t.Error("nobody was notified")
	}
	deadline := time.Now().Add(5 * time.Second) // the guest runs on before its fault is noted
	got := r.pager.DrainTouched(nil)
	for len(got) < len(want) && time.Now().Before(deadline) {
		got = r.pager.DrainTouched(got)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("touches (-want +got):\n%s", d)
	}
}

func TestAFullLogLosesTheNewestFaultsAndCountsThem(t *testing.T) {
	l, err := newTouchLog()
	if err != nil {
		t.Fatal(err)
	}
	want := Touch{touchFrames - 1, true, KindProtected}
	for range touchLogLimit {
		if !l.add(want) {
			t.Fatal("full too soon")
		}
	}
	if l.add(Touch{}) {
		t.Error("there was room for one more")
	}
	if l.size() != touchLogLimit*4 {
		t.Errorf("a full log occupies %v", l.size())
	}
	got := l.drain(nil)
	if len(got) != touchLogLimit || slices.ContainsFunc(got, func(t Touch) bool { return t != want }) {
		t.Errorf("%d touches came back, some of them changed", len(got))
	}
	if l.trim(); l.size() != 0 {
		t.Errorf("a trimmed log occupies %v", l.size())
	}
	l.add(Touch{Frame: 1})
	if d := cmp.Diff([]Touch{{Frame: 1}}, l.drain(nil)); d != "" {
		t.Errorf("after a trim (-want +got):\n%s", d)
	}
	if err := l.close(); err != nil {
		t.Error(err)
	}
}

func TestAnEndedRestoreLeavesThePagesAsTheyWere(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(6, textPage(1))
	r.evict()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if res, err := r.pager.Restore(ctx, reads(6), Needed); !errors.Is(err, context.Canceled) || res.Restored() != 0 {
		t.Errorf("restore: %+v, %v", res, err)
	}
	if got := r.state(6); got != tagEvicted {
		t.Errorf("state %v", got)
	}
}

// Three sandboxes want a place: those whose call runs go first, and each gets one batch
// before one gets a second.
func TestBatchesTakeTurnsByClassAndSandbox(t *testing.T) {
	a, b, c := &Pager{name: "a"}, &Pager{name: "b"}, &Pager{name: "c"}
	ts := &turns{free: []*worker{nil}}
	take := func(p *Pager, class Class) {
		if _, err := ts.take(context.Background(), p, class); err != nil {
			t.Error(err)
		}
	}
	take(a, Speculative)
	got := make(chan string, 8)
	waiting := 0
	queue := func(p *Pager, class Class) {
		go func() { take(p, class); got <- p.name + " " + class.String() }()
		waiting++
		for {
			ts.mu.Lock()
			n := len(ts.waiting)
			ts.mu.Unlock()
			if n == waiting {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	queue(b, Speculative)
	queue(a, Needed)
	queue(a, Needed)
	queue(b, Needed)
	queue(c, Needed)
	var order []string
	for range 5 {
		ts.give(nil)
		order = append(order, <-got)
	}
	// a had the last turn: b and c have had none and come first, in the order of arrival.
	want := []string{"b needed", "c needed", "a needed", "a needed", "b speculative"}
	if d := cmp.Diff(want, order); d != "" {
		t.Errorf("order (-want +got):\n%s", d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := ts.take(ctx, a, Needed); !errors.Is(err, context.Canceled) || len(ts.waiting) != 0 {
		t.Errorf("take with an ended context: %v, %d wait", err, len(ts.waiting))
	}
}
