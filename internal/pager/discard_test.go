package pager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

// report reports pages free as QEMU does and returns how long that took.
func (r *rig) report(f units.Frame, n int) time.Duration {
	r.t.Helper()
	a, err := r.vm.Channels[0].Discard(f, n)
	if err != nil {
		r.t.Fatal(err)
	}
	if a.Bad != 0 {
		r.t.Fatalf("the VMM was told %v", unix.Errno(a.Bad))
	}
	return time.Duration(a.Nanos)
}

// locked sets a hook that a fault thread will look at with the mutex held.
func (r *rig) locked(set func()) {
	r.pager.mu.Lock()
	defer r.pager.mu.Unlock()
	set()
}

// privateNow counts the private pages of a run.
func (r *rig) privateNow(run guestmem.Run) (n int) {
	r.t.Helper()
	r.pager.mu.Lock() // Private excludes itself
	defer r.pager.mu.Unlock()
	if err := r.guest.Private(run, func(p guestmem.Run) { n += p.Pages }); err != nil {
		r.t.Fatal(err)
	}
	return n
}

func TestAReportedPageIsForgottenInEveryState(t *testing.T) {
	for _, s := range situations {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, 64, 2).serve()
			before := s.make(r, s.frame)
			one := guestmem.Run{Start: s.frame, Pages: 1}
			owned := r.privateNow(one) == 1 || s.state == tagEvicted
			r.report(s.frame, 1)
			want, state := before, s.state
			if owned {
				want, state = zeroPage(), tagZero
				if r.im.Hole(s.frame) {
					state = tagTemplate
				}
			}
			if got := r.state(s.frame); got != state {
				t.Errorf("state %v, want %v", got, state)
			}
			if got := r.privateNow(one); got != 0 {
				t.Errorf("%d private pages are left", got)
			}
			if got := r.cohort.Stats().Pool.Entries; got != 0 {
				t.Errorf("%d pool entries are left", got)
			}
			if got := r.read(s.frame); *got != *want {
				t.Error("the page reads as neither zeros nor what it was")
			}
			// In use again: written, evicted, read and written like any other.
			r.poke(s.frame, token)
			r.evict()
			if got := r.read(s.frame); *got != *poked(s.frame, want) {
				t.Error("a write after the report was lost")
			}
			if got := r.pager.Stats(); got.Reported != 1 || got.Reports.Count != 1 {
				t.Errorf("%d reports of %d pages were counted, want one of one", got.Reports.Count, got.Reported)
			}
			r.unharmed()
		})
	}
}

func TestAReportOfALargeRangeLeavesItsNeighboursAlone(t *testing.T) {
	const frames = 1024
	r := newRig(t, frames, 2, func(o *Options) { o.EvictedAround = 1 }).serve()
	for f := range units.Frame(frames) {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	for f := units.Frame(100); f < 700; f += 2 {
		r.read(f) // every other one is clean
	}
	const start, pages = 101, 601
	r.report(start, pages)
	for f := range units.Frame(frames) {
		want := textPage(uint64(f))
		if f >= start && f < start+pages {
			want = zeroPage()
		}
		if got := r.read(f); *got != *want {
			t.Fatalf("frame %d (%v) has another content", f, r.state(f))
		}
	}
	got := r.pager.Stats()
	if got.Reported != pages || got.DiscardedEntries != pages || got.Discarded != 299 {
		t.Errorf("reported %d, discarded %d pages and %d entries; want %d, 299 and %d", got.Reported, got.Discarded, got.DiscardedEntries, pages, pages)
	}
	r.unharmed()
}

func TestAReportedPageInTheHandsOfAPassIsLeftToIt(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 2, hook(h)).serve()
	r.write(pageFrame, textPage(1))
	r.write(pageFrame+1, zeroPage())
	h.afterRead = func() { r.report(pageFrame, 2) }
	res := r.evict()
	if res.Dropped != 2 || res.Encoded != 1 || res.Zeros != 1 || res.Cancelled != 0 {
		t.Errorf("the pass went otherwise: %+v", res)
	}
	if got := r.read(pageFrame); *got != *textPage(1) {
		t.Error("the page has another content")
	}
	r.unharmed()
}

// The pass must not make Busy what is no longer mapped: its reader would wait for ever.
func TestPagesReportedBetweenScanAndProtectAreLeftOutOfThePass(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 256, 2, hook(h)).serve()
	want := map[units.Frame]*units.Page{}
	for f := units.Frame(10); f < 200; f++ {
		if f%7 == 0 {
			continue
		}
		r.write(f, textPage(uint64(f)))
		want[f] = textPage(uint64(f))
	}
	h.afterScan = func() {
		r.report(20, 2) // neighbours, both kinds of frame without a private page among them
		r.report(40, 100)
		r.poke(60, token) // in use again: private, and taken by the pass
		r.read(61)        // mapped, not private
		for f := range want {
			if f == 20 || f == 21 || f >= 40 && f < 140 {
				want[f] = zeroPage()
			}
		}
		want[60] = poked(60, zeroPage())
	}
	done := make(chan EvictResult, 1)
	go func() {
		res, err := r.pager.Evict(t.Context())
		if err != nil {
			t.Error(err)
		}
		done <- res
	}()
	select {
	case res := <-done:
		if got := res.Scanned - res.Dropped; got < 80 || res.Cancelled+res.Abandoned+res.Kept != 0 {
			t.Errorf("the pass took discarded pages in hand: %+v", res)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the pass does not end")
	}
	for range 2 {
		for f, w := range want {
			if got := r.read(f); *got != *w {
				t.Errorf("frame %d (%v) has another content", f, r.state(f))
			}
		}
		r.evict()
	}
	r.unharmed()
}

// Between two runs of a batch a pass gives the mutex up for those that wait, reports too.
func TestPagesReportedInTheMiddleOfABatchAreLeftOutOfThePass(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 256, 2, hook(h)).serve()
	for f := units.Frame(1); f < 100; f += 2 { // runs of one
		r.write(f, textPage(uint64(f)))
	}
	reported := make(chan error, 1)
	h.beforeProtect = func() {
		go func() {
			_, err := r.vm.Channels[0].Discard(50, 50)
			reported <- err
		}()
		for r.pager.waiting.Load() == 0 { // the report wants the mutex, which the pass holds
			time.Sleep(time.Millisecond)
		}
	}
	done := make(chan EvictResult, 1)
	go func() {
		res, err := r.pager.Evict(t.Context())
		if err != nil {
			t.Error(err)
		}
		done <- res
	}()
	select {
	case res := <-done:
		if res.Dropped != 25 {
			t.Errorf("the pass dropped %d pages, want the 25 that were not reported: %+v", res.Dropped, res)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the pass does not end")
	}
	if err := <-reported; err != nil {
		t.Fatal(err)
	}
	for f := units.Frame(1); f < 100; f += 2 {
		want := textPage(uint64(f))
		if f >= 50 {
			want = zeroPage()
		}
		if got := r.read(f); *got != *want {
			t.Errorf("frame %d (%v) has another content", f, r.state(f))
		}
	}
	r.unharmed()
}

func TestACleanPageReportedBetweenScanAndDropIsNotDroppedAsClean(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 2, hook(h), protectRestored).serve()
	r.write(pageFrame, textPage(1))
	r.write(holeFrame, textPage(2))
	r.evict()
	r.read(pageFrame)
	r.write(holeFrame, textPage(3)) // so that the pass has something to read
	h.afterRead = func() {
		r.report(pageFrame, 1)
		r.poke(pageFrame, token) // and is in use again
	}
	r.evict()
	if got := r.read(pageFrame); *got != *poked(pageFrame, zeroPage()) {
		t.Error("the write after the report was lost")
	}
	r.unharmed()
}

func TestAReportThatNobodyTakesIsGivenUpAndNeverActedUpon(t *testing.T) {
	r := newRig(t, 64, 2).serve()
	r.poke(pageFrame, token)
	r.server.Remove(r.pager)
	want := poked(pageFrame, guestmemtest.Base(pageFrame))
	if took := r.report(pageFrame, 1); took < 15*time.Millisecond || took > 10*time.Second {
		t.Errorf("the VMM waited %v, want 20 ms and the time to get a core", took)
	}
	r.serve() // too late: the guest may use the page again
	for range 3 {
		if took := r.report(pageFrame, 1); took > 500*time.Millisecond {
			t.Errorf("the VMM waited %v after a report was given up, want it not to ask for a second", took)
		}
	}
	if got := r.read(pageFrame); *got != *want {
		t.Error("a report that was given up was acted upon, or the VMM dropped the page itself")
	}
	if got := r.pager.Stats().Reports.Count; got != 0 {
		t.Errorf("%d reports were served", got)
	}
	time.Sleep(1100 * time.Millisecond)
	r.report(pageFrame, 1)
	if got := r.read(pageFrame); *got != *zeroPage() {
		t.Error("the guest is not asked again after a second")
	}
	r.unharmed()
}

func TestAReportThatIsTakenIsWaitedForHoweverSlowTheDaemonIs(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 2, hook(h)).serve()
	r.poke(pageFrame, token)
	r.locked(func() { h.beforeDrop = func() { time.Sleep(100 * time.Millisecond) } }) // five times the shim's patience
	if took := r.report(pageFrame, 1); took < 100*time.Millisecond {
		t.Errorf("the VMM went on after %v, with its page not yet dropped", took)
	}
	r.poke(pageFrame, token)
	if got := r.read(pageFrame); *got != *poked(pageFrame, zeroPage()) {
		t.Error("a write after the report was lost")
	}
	r.unharmed()
}

func TestAVMMThatDiesDuringItsReportIsNoFailure(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 2, hook(h)).serve()
	r.poke(pageFrame, token)
	killed := make(chan struct{})
	r.locked(func() { h.beforeDrop = func() { r.vm.Kill(); close(killed) } })
	_, _ = r.vm.Channels[0].Discard(pageFrame, 1)
	<-killed
	r.server.Remove(r.pager) // waits until the report is served
	if got := r.fatals(0); len(got) != 0 {
		t.Errorf("OnFatal was told %v", got)
	}
	if err := r.pager.Err(); !errors.Is(err, ErrGone) {
		t.Errorf("got %v, want ErrGone", err)
	}
}

func TestAReportThatFailsKillsTheSandboxByName(t *testing.T) {
	for _, tt := range []struct{ point, want string }{
		{"guestmem.report", "report of free pages"},
		{"guestmem.scan", "look for 1 reported pages from frame 6"},
		{"guestmem.drop", "drop reported pages from frame 6"},
		{"guestmem.unprotect", "clear markers of 1 reported pages from frame 6"},
	} {
		t.Run(tt.point, func(t *testing.T) {
			r := newRig(t, 64, 2).serve()
			r.poke(pageFrame, token)
			arm(t, tt.point, 0, errInjected)
			r.report(pageFrame, 1) // ends all the same
			got := r.fatals(1)
			if len(got) != 1 || !errors.Is(got[0], ErrFatal) || !errors.Is(got[0], errInjected) {
				t.Fatalf("OnFatal was told %v", got)
			}
			if msg := got[0].Error(); !containsAll(msg, tt.want, "test") {
				t.Errorf("reason %q does not name %q", msg, tt.want)
			}
		})
	}
}

func TestAPanicDuringAReportCostsOneSandbox(t *testing.T) {
	h := &hooked{}
	r := newRig(t, 64, 2, hook(h)).serve()
	r.poke(pageFrame, token)
	r.locked(func() { h.beforeDrop = func() { panic("a bug") } })
	_ = r.vm.Channels[0].SetDeadline(time.Now().Add(200 * time.Millisecond))
	_, _ = r.vm.Channels[0].Discard(pageFrame, 1)
	if got := r.fatals(1); len(got) != 1 || !errors.Is(got[0], ErrFatal) {
		t.Errorf("OnFatal was told %v", got)
	}
	if _, err := r.pager.Evict(context.Background()); !errors.Is(err, ErrFatal) {
		t.Errorf("evict afterwards: %v, want ErrFatal", err)
	}
}

func TestBitsBecomeRuns(t *testing.T) {
	for _, tt := range []struct {
		set  uint64
		want string
	}{
		{0, "[]"},
		{1, "[{7 1}]"},
		{1 << 63, "[{70 1}]"},
		{^uint64(0), "[{7 64}]"},
		{0b1011000, "[{10 2} {13 1}]"},
		{3<<62 | 1, "[{7 1} {69 2}]"},
	} {
		if got := fmt.Sprint(bitRuns(nil, 7, tt.set)); got != tt.want {
			t.Errorf("%#x: %s, want %s", tt.set, got, tt.want)
		}
	}
}

func containsAll(s string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}
