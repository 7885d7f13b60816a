package guestmem_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// awaitReport waits for the next report and takes it.
func awaitReport(t *testing.T, g *guestmem.Guest) guestmem.Run {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(g.ReportFD()), Events: unix.POLLIN}}, 5000)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n != 1 {
			t.Fatalf("no report came: %d, %v", n, err)
		}
		r, ok, err := g.Report()
		if err != nil || !ok {
			t.Fatalf("report: %v, %v", ok, err)
		}
		return r
	}
}

func TestAHoleInTheGuestsMemoryBecomesAReport(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	if err := vm.Channels[0].Poke(11, 8, 7); err != nil {
		t.Fatal(err)
	}
	before, err := hostmem.Allocated(im.File())
	if err != nil {
		t.Fatal(err)
	}
	// Without the guard the seal refuses.
	if a, err := vm.Channels[0].Discard(11, 1); err != nil || unix.Errno(a.Bad) != unix.EPERM {
		t.Fatalf("before Attach: %v, errno %d, want EPERM", err, a.Bad)
	}
	g := attach(t, im, vm)
	for _, tt := range []struct {
		frame units.Frame
		n     int
		want  guestmem.Run
	}{
		{10, 3, guestmem.Run{Start: 10, Pages: 3}},
		{0, frames, guestmem.Run{Start: 0, Pages: frames}},
		{frames - 1, 1, guestmem.Run{Start: frames - 1, Pages: 1}},
		{frames - 1, 2, guestmem.Run{}}, // beyond the end: no sane VMM says so
	} {
		done := make(chan error, 1)
		go func() {
			a, err := vm.Channels[0].Discard(tt.frame, tt.n)
			if err == nil && a.Bad != 0 {
				err = fmt.Errorf("the VMM was told errno %d", a.Bad)
			}
			done <- err
		}()
		if d := cmp.Diff(tt.want, awaitReport(t, g)); d != "" {
			t.Errorf("report (-want +got):\n%s", d)
		}
		select {
		case err := <-done:
			t.Fatalf("the VMM went on before the answer: %v", err)
		case <-time.After(40 * time.Millisecond): // twice the shim's patience
		}
		if err := g.Answer(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if got, err := hostmem.Allocated(im.File()); err != nil || got != before {
		t.Errorf("the template has %v (%v), had %v", got, err, before)
	}
	if d := cmp.Diff([]guestmem.Run{{Start: 11, Pages: 1}}, scan(t, g)); d != "" {
		t.Errorf("private pages after reports that only were answered (-want +got):\n%s", d)
	}
}

func TestAReportNobodyTakesIsReadBack(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	g := attach(t, im, vm)
	if a, err := vm.Channels[0].Discard(11, 1); err != nil || a.Bad != 0 || a.Nanos < 15e6 {
		t.Errorf("discard: %v, errno %d after %v; want success after 20 ms", err, a.Bad, time.Duration(a.Nanos))
	}
	if _, ok, err := g.Report(); ok || err != nil {
		t.Errorf("report: %v, %v; want none", ok, err)
	}
}

func TestAGuestIsGuardedOnce(t *testing.T) {
	im := guestmemtest.Image(t, 64)
	vm := guestmemtest.Start(t, im, 1)
	attach(t, im, vm)
	if _, err := guestmem.Attach(vm.Shim, vm.PID, im); err == nil {
		t.Error("a guest was attached twice")
	}
}

func TestReportsOfADeadGuestSayGone(t *testing.T) {
	im := guestmemtest.Image(t, 64)
	vm := guestmemtest.Start(t, im, 1)
	g := attach(t, im, vm)
	vm.Kill()
	if _, _, err := g.Report(); !errors.Is(err, guestmem.ErrGone) {
		t.Errorf("report: %v, want ErrGone", err)
	}
	if err := g.Answer(); !errors.Is(err, guestmem.ErrGone) {
		t.Errorf("answer: %v, want ErrGone", err)
	}
	if err := g.Private(guestmem.Run{Start: 0, Pages: 64}, func(guestmem.Run) {}); !errors.Is(err, guestmem.ErrGone) {
		t.Errorf("private: %v, want ErrGone", err)
	}
}
