package vmm

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// guestEnd returns the VMM's end as a connection.
func guestEnd(t *testing.T, w *Wire) net.Conn {
	t.Helper()
	f, err := w.copyOfGuestEnd()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func newWire(t *testing.T) *Wire {
	t.Helper()
	w, err := NewWire()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func TestAWireLosesNothingWhileVMMsComeAndGoAndItIsHeld(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	written := make(chan error, 1)
	go func() {
		_, err := w.Conn().Write(want)
		written <- err
	}()
	var got []byte
	buf := make([]byte, 50_000)
	for i := 0; len(got) < len(want); i++ {
		guest := guestEnd(t, w)
		n, err := guest.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf[:n]...)
		w.Hold()
		before, err := w.Level()
		if err != nil {
			t.Fatal(err)
		}
		if i%4 == 0 {
			time.Sleep(time.Millisecond)
		}
		if after, err := w.Level(); err != nil || after != before {
			t.Fatalf("a held wire changed from %+v to %+v (%v)", before, after, err)
		}
		if err := guest.Close(); err != nil { // the VMM ends
			t.Fatal(err)
		}
		w.Release()
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("what arrived is not what was sent")
	}
}

func TestAReadOfAHeldWireWaits(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	guest := guestEnd(t, w)
	read := make(chan []byte, 1)
	go func() {
		b := make([]byte, 16)
		n, err := w.Conn().Read(b)
		if err != nil {
			t.Error(err)
		}
		read <- b[:n]
	}()
	w.Hold()
	if _, err := guest.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	select {
	case b := <-read:
		t.Fatalf("it read %q", b)
	case <-time.After(20 * time.Millisecond):
	}
	if l, err := w.Level(); err != nil || l.ToHost != 4 || l.ToGuest != 0 {
		t.Errorf("level is %+v (%v), want 4 bytes to the host", l, err)
	}
	w.Release()
	if b := <-read; string(b) != "late" {
		t.Errorf("it read %q", b)
	}
}

func TestAWiresUserKeepsItsDeadlines(t *testing.T) {
	t.Parallel()
	w := newWire(t)
	c := w.Conn()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	w.Hold()
	w.Release()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v, want a timeout", err)
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(c, make([]byte, 1))
		done <- err
	}()
	w.Hold() // a wire that is closed while it is held lets go too
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("read of a closed wire: %v, want net.ErrClosed", err)
	}
	if _, err := w.Level(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("level of a closed wire: %v, want net.ErrClosed", err)
	}
}
