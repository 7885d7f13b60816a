package pager

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

var errInjected = errors.New("injected")

// arm arms a failure point and checks at the end of the test that it was hit.
func arm(t *testing.T, name string, after int, err error) {
	t.Helper()
	before := fault.Hits(name)
	if e := fault.Arm(name, after, err); e != nil {
		t.Fatal(e)
	}
	t.Cleanup(func() {
		fault.Disarm(name)
		if fault.Hits(name) != before+1 {
			t.Errorf("%s was not hit", name)
		}
	})
}

// stays checks that frames have their content and can be written without any fault: an
// unhappy pass must leave no page protected without reason.
func stays(t *testing.T, r *rig, want map[units.Frame]*units.Page) {
	t.Helper()
	r.unharmed()
	faults := r.pager.Faults()
	for f, p := range want {
		if *r.read(f) != *p {
			t.Errorf("frame %d has another content", f)
		}
		r.write(f, p)
	}
	if n := r.pager.Faults() - faults; n != 0 {
		t.Errorf("%d faults on pages that should be left alone", n)
	}
	if n := r.cohort.Stats().Pool.Entries; n != 0 {
		t.Errorf("%d pool entries are left", n)
	}
}

func TestAPassThatFailsLeavesThePagesAsTheyWere(t *testing.T) {
	for _, tt := range []struct {
		point string
		err   error
		want  error
	}{
		{"guestmem.scan", errInjected, errInjected},
		{"guestmem.protect", errInjected, errInjected},
		{"guestmem.read", errInjected, errInjected},
		{"cohort.put", errInjected, errInjected},
		{"cohort.put", cohort.ErrFull, cohort.ErrFull},
		{"cohort.mismatch", errInjected, ErrVerify},
	} {
		t.Run(tt.point+" "+tt.err.Error(), func(t *testing.T) {
			r := newRig(t, 64, 1).serve()
			want := map[units.Frame]*units.Page{7: textPage(1)}
			r.write(7, want[7])
			arm(t, tt.point, 0, tt.err)
			if _, err := r.pager.Evict(context.Background()); !errors.Is(err, tt.want) {
				t.Errorf("evict: %v, want %v", err, tt.want)
			}
			stays(t, r, want)
			if got := r.evict(); got.Dropped != 1 {
				t.Errorf("the next pass: %+v, want the page dropped", got)
			}
			checkThroughEviction(t, r, 7, want[7])
		})
	}
}

// Of several runs the second cannot be protected: the first goes back too.
func TestABatchThatCannotBeProtectedGoesBackAsAWhole(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	want := map[units.Frame]*units.Page{7: textPage(1), 9: textPage(2), 12: textPage(3)}
	for f, p := range want {
		r.write(f, p)
	}
	arm(t, "guestmem.protect", 1, errInjected)
	if _, err := r.pager.Evict(context.Background()); !errors.Is(err, errInjected) {
		t.Errorf("evict: %v", err)
	}
	stays(t, r, want)
}

func TestAnEncodingThatDoesNotVerifyIsReportedAndNotDropped(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(7, textPage(1))
	r.write(8, textPage(2))
	arm(t, "cohort.mismatch", 0, errInjected)
	res, err := r.pager.Evict(context.Background())
	if !errors.Is(err, ErrVerify) || !strings.Contains(err.Error(), "frame 7") || !strings.Contains(err.Error(), "encoder") {
		t.Errorf("evict: %v, want ErrVerify with frame and encoder named", err)
	}
	if res.Dropped != 1 || r.pager.Stats().Mismatches != 1 {
		t.Errorf("result %+v, %d mismatches: want the other page dropped and 1", res, r.pager.Stats().Mismatches)
	}
	if got := [2]tag{r.state(7), r.state(8)}; got != [2]tag{tagTemplate, tagEvicted} {
		t.Errorf("states %v", got)
	}
}

// fatalCase is an operation that the sandbox does not survive.
func TestAFailureThatNobodyCanRepairKillsTheSandboxByName(t *testing.T) {
	read7 := func(r *rig) { _, _ = r.vm.Channels[0].Read(7, false) }
	evicted7 := func(r *rig) { r.write(7, textPage(1)); r.evict() }
	evict := func(r *rig) { _, _ = r.pager.Evict(context.Background()) }
	for _, tt := range []struct {
		name, point string
		prepare     func(r *rig)
		act         func(r *rig)
		want        []string // in the reason
		integrity   bool
	}{
		{"install fails", "guestmem.copy", evicted7, read7, []string{"install frame 7"}, false},
		{"decoded page is damaged", "cohort.corrupt", evicted7, read7, []string{"frame 7", "pool entry"}, true},
		{"template page cannot be mapped", "guestmem.continue", func(*rig) {}, read7, []string{"frame 7"}, false},
		{"zero page cannot be mapped", "guestmem.zeropage", func(r *rig) { r.write(7, zeroPage()); r.evict() }, read7, []string{"frame 7"}, false},
		{"drop fails", "guestmem.drop", func(r *rig) { r.write(7, textPage(1)) }, evict, []string{"drop"}, false},
		{"markers cannot be cleared", "guestmem.unprotect", func(r *rig) { r.write(7, textPage(1)) }, evict, []string{"clear markers", "frame 7"}, false},
		{"kept page cannot be unprotected", "guestmem.unprotect", func(r *rig) { r.write(7, randomPage(1)) }, evict, []string{"unprotect", "frame 7"}, false},
		{
			"clean page cannot be unprotected", "guestmem.unprotect", func(r *rig) { evicted7(r); r.read(7) },
			func(r *rig) { _ = r.vm.Channels[0].Poke(7, 0, 1) }, nil, false,
		},
		{
			"restored page is damaged", "cohort.corrupt", evicted7, func(r *rig) { _, _ = r.pager.Restore(context.Background(), reads(7), Needed) },
			[]string{"frame 7", "pool entry"},
			true,
		},
		{
			"restored page cannot be installed", "guestmem.copy", evicted7, func(r *rig) { _, _ = r.pager.Restore(context.Background(), reads(7), Needed) },
			[]string{"install frame 7"},
			false,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, 64, 1, leaveUnmapped, protectRestored).serve()
			tt.prepare(r)
			arm(t, tt.point, 0, errInjected)
			if err := r.vm.Channels[0].SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			tt.act(r)
			got := r.fatals(1)
			if len(got) != 1 {
				t.Fatalf("OnFatal was called %d times, want once", len(got))
			}
			if !errors.Is(got[0], ErrFatal) || !errors.Is(got[0], errInjected) || errors.Is(got[0], ErrIntegrity) != tt.integrity {
				t.Errorf("reason %v", got[0])
			}
			for _, w := range append(tt.want, "test") {
				if !strings.Contains(got[0].Error(), w) {
					t.Errorf("reason %q does not name %q", got[0], w)
				}
			}
			if _, err := r.pager.Evict(context.Background()); !errors.Is(err, ErrFatal) {
				t.Errorf("evict afterwards: %v, want ErrFatal", err)
			}
			if _, err := r.pager.Restore(context.Background(), reads(7), Needed); !errors.Is(err, ErrFatal) {
				t.Errorf("restore afterwards: %v, want ErrFatal", err)
			}
		})
	}
}

// A bit of the pool flips: the guest must never see the page.
func TestADamagedPoolEntryKillsTheSandboxAndIsNeverInstalled(t *testing.T) {
	for _, by := range []string{"fault", "restore"} {
		t.Run(by, func(t *testing.T) {
			r := newRig(t, 64, 1).serve()
			r.write(7, textPage(1))
			r.evict()
			r.flipBit(7)
			if err := r.vm.Channels[0].SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if by == "fault" {
				if _, err := r.vm.Channels[0].Read(7, false); err == nil {
					t.Error("the guest read a damaged page")
				}
			} else if _, err := r.pager.Restore(context.Background(), reads(7), Needed); !errors.Is(err, ErrIntegrity) {
				t.Errorf("restore: %v", err)
			}
			got := r.fatals(1)
			if len(got) != 1 || !errors.Is(got[0], ErrIntegrity) || !regexp.MustCompile(`frame 7: pool entry \d+: encoder zstd`).MatchString(got[0].Error()) {
				t.Errorf("reasons %v, want one that names frame and encoder", got)
			}
			if n, err := guestmem.CountPrivate(r.vm.PID, r.im); err != nil || n != 0 {
				t.Errorf("%d pages were installed (%v)", n, err)
			}
		})
	}
}

// A page that is mapped although it is evicted holds nobody knows what.
func TestAnEvictedPageThatIsMappedIsFatalNotIgnored(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(7, textPage(1))
	r.evict()
	if _, err := r.guest.Copy(7, randomPage(9)[:], false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.pager.Restore(context.Background(), reads(7), Needed); !errors.Is(err, ErrIntegrity) {
		t.Errorf("restore: %v, want ErrIntegrity", err)
	}
}

func TestAFullPoolStopsEncodingAndNothingElse(t *testing.T) {
	const frames = 1024
	r := newRig(t, frames, 1)
	r.useCohort(cohort.Options{Limit: units.MiB})
	r.serve()
	half := func(f units.Frame) *units.Page { // shrinks to about 2 KiB
		p := randomPage(uint64(f))
		clear(p[2048:])
		return p
	}
	for f := range units.Frame(frames) {
		p := half(f)
		if f%4 == 3 {
			p = zeroPage()
		}
		r.write(f, p)
	}
	res, err := r.pager.Evict(context.Background())
	if !errors.Is(err, cohort.ErrFull) || !strings.Contains(err.Error(), "test") {
		t.Fatalf("evict: %v, want ErrFull", err)
	}
	if got := r.cohort.Pool().Footprint(); got > units.MiB {
		t.Errorf("the pool holds %v, its limit is 1 MiB", got)
	}
	if res.Encoded == 0 || res.Abandoned == 0 || res.Zeros+res.Equal != frames/4 || res.Encoded+res.Abandoned+res.Kept != frames*3/4 {
		t.Errorf("result %+v: want a part encoded and all zero pages dropped", res)
	}
	if got := r.pager.Stats().FullPasses; got != 1 {
		t.Errorf("full passes %d, want 1", got)
	}
	for f := range units.Frame(frames) {
		want := half(f)
		if f%4 == 3 {
			want = zeroPage()
		}
		if *r.read(f) != *want {
			t.Fatalf("frame %d has another content", f)
		}
	}
}

func TestAVMMThatDiesIsNoFailure(t *testing.T) {
	const frames = 1024
	r := newRig(t, frames, 2).serve()
	for i, c := range r.vm.Channels {
		go func() { _, _ = c.Hammer(units.Frame(i*frames/2), frames/2, time.Minute) }()
	}
	time.AfterFunc(200*time.Millisecond, r.vm.Kill)
	deadline := time.Now().Add(10 * time.Second)
	var err error
	for err == nil && time.Now().Before(deadline) {
		if _, err = r.pager.Evict(context.Background()); err == nil {
			_, err = r.pager.Restore(context.Background(), reads(1, 2, 3, 500), Needed)
		}
	}
	if !errors.Is(err, ErrGone) {
		t.Errorf("got %v, want ErrGone", err)
	}
	if _, err := r.pager.Usage(); !errors.Is(err, ErrGone) {
		t.Errorf("usage: %v, want ErrGone", err)
	}
	if got := r.fatals(0); len(got) != 0 {
		t.Errorf("OnFatal was told %v", got)
	}
}

func TestAPanicOfTheCodeCostsOneSandbox(t *testing.T) {
	server := runServer(t)
	h := &hooked{}
	bad, good := newRig(t, 64, 1, hook(h)), newRig(t, 64, 1)
	for _, r := range []*rig{bad, good} {
		r.server = server
		r.serve()
		r.write(7, textPage(1))
	}
	h.afterRead = func() { panic("a bug") }
	if _, err := bad.pager.Evict(context.Background()); !errors.Is(err, ErrFatal) || !strings.Contains(err.Error(), "a bug") {
		t.Errorf("evict: %v, want ErrFatal with the panic", err)
	}
	if got := bad.fatals(1); len(got) != 1 {
		t.Errorf("OnFatal was called %d times", len(got))
	}
	checkThroughEviction(t, good, 7, textPage(1))
}

func TestAClosedPagerRefuses(t *testing.T) {
	r := newRig(t, 64, 1).serve()
	r.write(7, textPage(1))
	r.evict()
	r.close()
	if _, err := r.pager.Evict(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("evict: %v", err)
	}
	if _, err := r.pager.Restore(context.Background(), reads(7), Needed); !errors.Is(err, ErrClosed) {
		t.Errorf("restore: %v", err)
	}
	if _, err := r.pager.Usage(); !errors.Is(err, ErrClosed) {
		t.Errorf("usage: %v", err)
	}
	if got := r.pager.DrainTouched(nil); got != nil {
		t.Errorf("touched: %v", got)
	}
	if err := r.pager.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestWrongOptionsAreRefused(t *testing.T) {
	im, other := guestmemtest.Image(t, 16), guestmemtest.Image(t, 32)
	vm := guestmemtest.Start(t, im, 1)
	g, err := guestmem.Attach(vm.Shim, vm.PID, im)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	p := newCohort(t, im, cohort.Options{})
	defer p.Close()
	var got []string
	for _, o := range []Options{
		{Image: im, Cohort: p},
		{Guest: g, Cohort: p},
		{Guest: g, Image: im},
		{Guest: g, Image: other, Cohort: p},
		{Guest: g, Image: im, Cohort: p, FaultAround: 3},
	} {
		_, err := New(o)
		if err == nil {
			err = io.EOF
		}
		got = append(got, strings.TrimPrefix(err.Error(), "create pager: "))
	}
	want := []string{
		"guest, image and cohort are required", "guest, image and cohort are required", "guest, image and cohort are required",
		"the guest has 16 pages, its image 32", "fault-around of 3 pages is not a power of two up to 512",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("errors (-want +got):\n%s", d)
	}
}

// failArmed runs fn with a failure point armed and says whether fn came across it.
func failArmed(t *testing.T, name string, fn func()) error {
	t.Helper()
	before := fault.Hits(name)
	if err := fault.Arm(name, 0, errInjected); err != nil {
		return err
	}
	defer fault.Disarm(name)
	fn()
	if fault.Hits(name) != before {
		return fmt.Errorf("%s was reached", name)
	}
	return nil
}

// protectRestored makes evicted pages that come back Clean, not Loose.
func protectRestored(o *Options) { o.ProtectRestored = true }

// leaveUnmapped lets faults map template and zero pages that were dropped.
func leaveUnmapped(o *Options) { o.LeaveUnmapped = true }
