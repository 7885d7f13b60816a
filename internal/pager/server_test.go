package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

func TestFaultsOfManySandboxesAreServedAtOnce(t *testing.T) {
	const n, frames = 6, 512
	server := runServer(t)
	var wg sync.WaitGroup
	for range n {
		r := newRig(t, frames, 2)
		r.server = server
		r.serve()
		wg.Go(func() {
			r.hammer(frames, 500*time.Millisecond, func(ctx context.Context) error {
				_, err := r.pager.Evict(ctx)
				return err
			})
		})
	}
	wg.Wait()
}

func TestAFaultThatCameBeforeItsPagerWasAddedIsServed(t *testing.T) {
	r := newRig(t, 64, 1)
	got := make(chan error, 1)
	go func() { _, err := r.vm.Channels[0].Read(7, false); got <- err }()
	waitForEvent(t, r)
	r.serve()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestAServerRefusesAPagerTwiceAndAfterItsEnd(t *testing.T) {
	r := newRig(t, 64, 1)
	s := NewServer(ServerOptions{Threads: 1})
	ctx, cancel := context.WithCancel(context.Background())
	if err := s.Add(r.pager); err != nil {
		t.Fatal(err)
	}
	if err := s.Add(r.pager); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("second add: %v", err)
	}
	s.Remove(r.pager)
	s.Remove(r.pager)
	if err := s.Add(r.pager); err != nil {
		t.Errorf("add after remove: %v", err)
	}
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Fatal(err)
	}
	s.Remove(r.pager)
	if err := s.Add(r.pager); err == nil || !strings.Contains(err.Error(), "ended") {
		t.Errorf("add after the end: %v", err)
	}
}

func TestServingAFaultDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	r := newRig(t, 64, 1, protectRestored)
	server := runServer(t)
	r.server = server
	r.serve()
	r.write(6, textPage(1))
	r.write(7, zeroPage())
	r.evict()
	server.Remove(r.pager)
	w := &faultWorker{codec: cohort.NewLoader()}
	defer w.codec.Close()
	drop := func(f units.Frame) {
		if err := errors.Join(r.guest.Drop([]guestmem.Run{{Start: f, Pages: 1}}), r.guest.Unprotect(guestmem.Run{Start: f, Pages: 1})); err != nil {
			t.Fatal(err)
		}
	}
	evicted6 := r.pager.table.load(6)
	again := func(f units.Frame, e entry) {
		drop(f)
		r.pager.table.store(f, e)
	}
	base := testing.AllocsPerRun(50, func() { again(6, evicted6) }) // what Drop costs, which no fault does
	for name, fn := range map[string]func(){
		"blocking restore": func() {
			again(6, evicted6)
			r.pager.handle(guestmem.Fault{Frame: 6, Minor: true}, w, time.Now())
		},
		"write to a clean page": func() {
			again(6, evicted6)
			r.pager.handle(guestmem.Fault{Frame: 6, Minor: true}, w, time.Now())
			if err := r.cohort.Ref(evicted6.ref()); err != nil {
				t.Error(err)
			}
			r.pager.handle(guestmem.Fault{Frame: 6, Write: true, WP: true}, w, time.Now())
			r.pager.kept++
		},
		"template page": func() { drop(11); r.pager.handle(guestmem.Fault{Frame: 11, Minor: true}, w, time.Now()) },
		"hole":          func() { drop(10); r.pager.handle(guestmem.Fault{Frame: 10}, w, time.Now()) },
		"stale":         func() { drop(63); r.pager.handle(guestmem.Fault{Frame: 11, Minor: true}, w, time.Now()) },
		"no fault at all": func() {
			drop(63)
			if !serveFaults(r.pager, w) {
				t.Error("not served")
			}
		},
	} {
		if got := testing.AllocsPerRun(50, fn); got > base {
			t.Errorf("%s: %v allocations, a drop alone %v", name, got, base)
		}
	}
	again(6, evicted6) // or its entry would be left over
	r.unharmed()
}

func TestTouchedFramesAreThoseThatFaulted(t *testing.T) {
	r := newRig(t, 4096, 1, protectRestored, func(o *Options) { o.FaultAround = 1 }).serve()
	r.write(4000, textPage(1))
	r.write(6, textPage(2))
	if d := cmp.Diff([]Touch{{4000, true, KindZero}, {6, true, KindTemplate}}, r.pager.DrainTouched(nil)); d != "" {
		t.Errorf("after writes (-want +got):\n%s", d)
	}
	r.evict()
	if d := cmp.Diff([]Touch{{6, true, KindPrivate}, {4000, true, KindPrivate}}, r.pager.DrainTouched(nil)); d != "" {
		t.Errorf("after a pass (-want +got):\n%s", d)
	}
	if !r.pager.Evicted(6) || r.pager.Evicted(7) || r.pager.Evicted(1<<20) {
		t.Error("frame 6 is evicted, 7 not, and 1<<20 does not exist")
	}
	if got, err := r.pager.Restore(context.Background(), reads(6, 4000, 4000, 9999), Needed); err != nil || got.Evicted != 2 || got.Present != 2 {
		t.Errorf("restore: %+v, %v, want 2, and 2 of no use", got, err)
	}
	r.read(6) // restored ahead: no fault tells
	r.poke(4000, 1)
	if d := cmp.Diff([]Touch{{Frame: 1}, {4000, true, KindProtected}}, r.pager.DrainTouched(reads(1))); d != "" {
		t.Errorf("after a restore (-want +got):\n%s", d)
	}
}

func TestAPageRestoredForWritingTakesTheWriteWithoutAFault(t *testing.T) {
	r := newRig(t, 64, 1, protectRestored).serve()
	for f := units.Frame(5); f < 9; f++ {
		r.write(f, textPage(uint64(f)))
	}
	r.evict()
	before := r.pager.Stats()
	if got, err := r.pager.Restore(context.Background(), []Touch{{Frame: 5, Write: true}, {Frame: 6}, {Frame: 7, Write: true}, {Frame: 8, Write: true}}, Needed); err != nil || got.Evicted != 4 {
		t.Fatalf("restore: %+v, %v, want 4", got, err)
	}
	if u, err := r.pager.Usage(); err != nil || u.Kept != 1 {
		t.Errorf("after the restore: %+v, %v; want one page with an entry, the one not to be written", u, err)
	}
	for f := units.Frame(5); f < 9; f++ {
		r.poke(f, uint64(f))
	}
	after := r.pager.Stats()
	if got := after.Protected.Count - before.Protected.Count; got != 1 {
		t.Errorf("%d write faults, want the one of frame 6", got)
	}
	r.evict()
	for f := units.Frame(5); f < 9; f++ {
		want := textPage(uint64(f))
		binary.NativeEndian.PutUint64(want[64:], uint64(f))
		if got := r.read(f); *got != *want {
			t.Errorf("frame %d is not what was written after its restore", f)
		}
	}
}

// reads are pages that are expected to be read.
func reads(frames ...units.Frame) []Touch {
	touches := make([]Touch, len(frames))
	for i, f := range frames {
		touches[i].Frame = f
	}
	return touches
}

// mixed expects every third page to be written.
func mixed(frames []units.Frame) []Touch {
	touches := reads(frames...)
	for i := range touches {
		touches[i].Write = touches[i].Frame%3 == 0
	}
	return touches
}

func TestNeighboursAreMappedWithATemplatePage(t *testing.T) {
	r := newRig(t, 256, 1).serve() // window 16: frames 32..47
	r.write(38, textPage(1))
	r.evict()
	r.write(41, textPage(2))
	before := r.pager.Faults()
	for f := units.Frame(32); f < 48; f++ {
		want := textPage(1)
		switch f {
		case 38:
		case 41:
			want = textPage(2)
		default:
			want = content("base", f, 0)
		}
		if *r.read(f) != *want {
			t.Errorf("frame %d has another content", f)
		}
	}
	// Holes at 35, 40, 45 split what one fault maps; 38 is evicted and needs its own.
	if n := r.pager.Faults() - before; n > 9 {
		t.Errorf("%d faults for 16 pages: neighbours were not mapped", n)
	}
	if r.pager.Stats().Around == 0 {
		t.Error("no neighbour was counted")
	}
}

func TestAPageThatDoesNotShrinkIsEncodedOnceUntilItIsWritten(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(7, randomPage(1))
	if got := r.evict(); got.Kept != 1 {
		t.Fatalf("first pass %+v, want one page kept", got)
	}
	if err := failArmed(t, "cohort.put", func() { // reached only by encoding
		if got := r.evict(); got.Kept != 1 {
			t.Errorf("second pass %+v, want one page kept", got)
		}
	}); err != nil {
		t.Error(err)
	}
	r.write(7, textPage(1))
	if got := r.evict(); got.Encoded != 1 {
		t.Errorf("after a write %+v, want it encoded", got)
	}
}

func TestACleanPageIsDroppedWithoutEncoding(t *testing.T) {
	r := newRig(t, 64, 1, protectRestored).serve()
	r.write(7, textPage(1))
	r.evict()
	h := r.pager.table.load(7).ref()
	for range 3 {
		r.read(7)
		if got := r.evict(); got.Clean != 1 || got.Encoded != 0 || got.Dropped != 1 {
			t.Errorf("pass %+v, want one clean page dropped", got)
		}
	}
	if got := r.pager.table.load(7); got != evicted(h) {
		t.Errorf("the page has another entry %v", got)
	}
}

func TestACancelledPassKeepsWhatIsEncodedAndDropsNothing(t *testing.T) {
	const frames = 512
	h := &hooked{}
	r := newRig(t, frames, 1, hook(h)).serve()
	for f := range units.Frame(frames) {
		r.write(f, textPage(uint64(f)))
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.afterRead = cancel
	res, err := r.pager.Evict(ctx)
	if !errors.Is(err, context.Canceled) || res.Dropped != 0 || res.Encoded+res.Abandoned != BatchPages {
		t.Errorf("cancelled pass: %+v, %v: want the first batch given up", res, err)
	}
	for f := range units.Frame(frames) {
		if *r.read(f) != *textPage(uint64(f)) {
			t.Fatalf("frame %d has another content", f)
		}
	}
	if _, err := r.pager.Evict(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("pass with a dead context: %v", err)
	}
	if got := r.evict(); got.Dropped != frames {
		t.Errorf("the next pass %+v, want all dropped", got)
	}
}

func TestTheTableOccupiesOnlyWhatWasTouched(t *testing.T) {
	r := newRig(t, 1<<15, 1).serve()
	u, err := r.pager.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.PageTable > 4*units.KiB {
		t.Errorf("a fresh page table occupies %v", u.PageTable)
	}
	r.write(5, textPage(1))
	r.write(20000, textPage(2))
	r.evict()
	for f := units.Frame(0); f < 1<<15; f += 512 { // looking must not allocate
		r.read(f)
	}
	if u, err = r.pager.Usage(); err != nil {
		t.Fatal(err)
	}
	if u.PageTable > 20*units.KiB { // two parts of the words, one of each bitmap, and the sets
		t.Errorf("the page table occupies %v after two pages were evicted", u.PageTable)
	}
	if u.Kept != 2 || u.Encoded == 0 || u.Encoded > 2*units.PageSize {
		t.Errorf("usage %+v, want two small pages", u)
	}
}

func TestHistogramPercentilesAreAtMostAFewPercentHigh(t *testing.T) {
	var h histogram
	if got := h.snapshot().P99(); got != 0 {
		t.Errorf("empty: %v", got)
	}
	for i := range 100_000 {
		h.record(time.Duration(i) * time.Microsecond)
	}
	s := h.snapshot()
	for q, want := range map[float64]time.Duration{0.5: 50 * time.Millisecond, 0.95: 95 * time.Millisecond, 0.99: 99 * time.Millisecond} {
		if got := s.Quantile(q); got < want || got > want*107/100 {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
	if s.Max != 99_999*time.Microsecond || s.Quantile(1) != s.Max || s.Count != 100_000 || s.Mean() != 49_999_500*time.Nanosecond {
		t.Errorf("max %v, q1 %v, count %d, mean %v", s.Max, s.Quantile(1), s.Count, s.Mean())
	}
	m := s
	m.Merge(s)
	if m.Count != 2*s.Count || m.P50() != s.P50() {
		t.Errorf("merged: count %d, p50 %v", m.Count, m.P50())
	}
	for ns := int64(0); ns < 1<<40; ns = ns*5/4 + 1 {
		b := bucket(ns)
		if ns < 1<<35 && (ns >= upper(b) || b > 0 && ns < upper(b-1)) {
			t.Fatalf("%d ns is in bucket %d, which ends at %d", ns, b, upper(b))
		}
	}
}
