package guestmem_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

func TestPrivatePagesAreReadWithoutAUserfaultfd(t *testing.T) {
	im := guestmemtest.Image(t, frames)
	vm := guestmemtest.Start(t, im, 1)
	want := map[units.Frame]*units.Page{}
	write := func(f units.Frame) {
		t.Helper()
		if err := vm.Channels[0].Poke(f, 8, 0xabc); err != nil {
			t.Fatal(err)
		}
		want[f] = guestmemtest.Base(f)
		copy(want[f][8:], []byte{0xbc, 0x0a, 0, 0, 0, 0, 0, 0})
	}
	write(0)
	write(frames - 1)
	for f := units.Frame(100); f < 300; f++ { // several reads
		write(f)
	}
	if _, err := vm.Channels[0].Touch(500, 4, false); err != nil { // mapped, not private
		t.Fatal(err)
	}
	r, err := guestmem.OpenReader(vm.PID, im)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range 2 { // a Reader may be used again
		got, last := 0, -1
		err = r.Private(func(f units.Frame, page *units.Page) error {
			if int(f) <= last {
				t.Fatalf("frame %d after %d", f, last)
			}
			last, got = int(f), got+1
			if w := want[f]; w == nil || !bytes.Equal(w[:], page[:]) {
				t.Errorf("frame %d was read wrong", f)
			}
			return nil
		})
		if d := cmp.Diff(len(want), got); err != nil || d != "" {
			t.Errorf("read pages (-want +got):\n%s%v", d, err)
		}
	}

	enough := errors.New("enough")
	seen := 0
	if err := r.Private(func(units.Frame, *units.Page) error { seen++; return enough }); !errors.Is(err, enough) || seen != 1 {
		t.Errorf("got %v after %d pages, want the visitor's error after one", err, seen)
	}
	if err := fault.Arm("guestmem.read", 1, enough); err != nil {
		t.Fatal(err)
	}
	if err := r.Private(func(units.Frame, *units.Page) error { return nil }); !errors.Is(err, enough) {
		t.Errorf("a read that failed: %v", err)
	}
	vm.Kill()
	if err := r.Private(func(units.Frame, *units.Page) error { return nil }); !errors.Is(err, guestmem.ErrGone) {
		t.Errorf("a dead process: %v, want ErrGone", err)
	}
	if _, err := guestmem.OpenReader(vm.PID, im); !errors.Is(err, guestmem.ErrGone) {
		t.Errorf("opening a dead process: %v, want ErrGone", err)
	}
}
