package vmm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Wire is the stream to a guest's link port: both ends of a socket pair. It belongs to a
// sandbox, not to a VMM: while a sandbox has no VMM, what was sent and not yet read
// waits in the wire, and the next VMM goes on with it. Neither end sees that there was
// another process: an HTTP/2 session, with the streams on it, goes on.
//
//	flowing --Hold--> held --Release--> flowing
//	either --Close--> closed
//
// Held means that this process neither reads nor writes: then a VMM that stands still
// meets no byte, and no room for one, that would make it touch the guest's memory.
//
// Safe for concurrent use. Lock order: Wire.mu, then nothing; the locks of the two
// directions are held during a system call that Hold and Close interrupt.
type Wire struct {
	host  *net.UnixConn // immutable; our end
	guest *os.File      // immutable; the VMM's end, of which each VMM gets a copy

	in, out direction // reads and writes of Conn

	mu       sync.Mutex
	held     bool          // guarded by mu
	released chan struct{} // guarded by mu; closed by Release and Close
	closed   bool          // guarded by mu
}

// A direction is one of the two of a Wire.
type direction struct {
	turn sync.Mutex // held during a read or write of the socket

	deadline time.Time // guarded by Wire.mu; the user's
	set      func(time.Time) error
}

// NewWire returns a flowing wire. Close it.
func NewWire() (*Wire, error) {
	host, guest, err := socketPair(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	w := &Wire{host: host, guest: guest}
	w.in.set, w.out.set = host.SetReadDeadline, host.SetWriteDeadline
	return w, nil
}

// Conn returns our end: the same stream each time. Closing it closes the wire.
func (w *Wire) Conn() net.Conn { return (*wireConn)(w) }

// Hold stops the flow. When it returns, no read or write is under way; those that
// were, and those to come, wait for Release.
func (w *Wire) Hold() {
	w.mu.Lock()
	if w.held || w.closed {
		w.mu.Unlock()
		return
	}
	w.held, w.released = true, make(chan struct{})
	past := time.Unix(1, 0)
	_, _ = w.in.set(past), w.out.set(past)
	w.mu.Unlock()
	for _, d := range []*direction{&w.in, &w.out} {
		d.turn.Lock()   // whoever was inside is out
		d.turn.Unlock() //nolint:staticcheck // an empty section on purpose
	}
}

// Release lets the stream flow again.
func (w *Wire) Release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.held {
		return
	}
	w.held = false
	close(w.released)
	if !w.closed {
		_, _ = w.in.set(w.in.deadline), w.out.set(w.out.deadline)
	}
}

// A Level is how many bytes lie in a wire.
type Level struct {
	ToGuest int // not yet taken by the VMM
	ToHost  int // not yet read by us
}

// Level counts. Of a held wire whose VMM does not touch it the level is constant.
func (w *Wire) Level() (Level, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return Level{}, fmt.Errorf("look into wire: %w", net.ErrClosed)
	}
	unread := func(raw interface {
		Control(fn func(fd uintptr)) error
	},
	) (n int, err error) {
		var ioctlErr error
		err = raw.Control(func(fd uintptr) { n, ioctlErr = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
		return n, errors.Join(err, ioctlErr)
	}
	guest, err := w.guest.SyscallConn()
	if err != nil {
		return Level{}, fmt.Errorf("look into wire: %w", err)
	}
	host, err := w.host.SyscallConn()
	if err != nil {
		return Level{}, fmt.Errorf("look into wire: %w", err)
	}
	toGuest, err := unread(guest)
	toHost, err2 := unread(host)
	if err := errors.Join(err, err2); err != nil {
		return Level{}, fmt.Errorf("look into wire: %w", err)
	}
	return Level{ToGuest: toGuest, ToHost: toHost}, nil
}

// Close ends the stream for both sides. A second Close does nothing.
func (w *Wire) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	if w.held {
		w.held = false
		close(w.released)
	}
	if err := errors.Join(w.host.Close(), w.guest.Close()); err != nil {
		return fmt.Errorf("close wire: %w", err)
	}
	return nil
}

// copyOfGuestEnd returns a descriptor for one VMM.
func (w *Wire) copyOfGuestEnd() (*os.File, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, fmt.Errorf("take wire: %w", net.ErrClosed)
	}
	return dup(w.guest)
}

// enter waits until the wire flows.
func (w *Wire) enter() error {
	for {
		w.mu.Lock()
		held, released, closed := w.held, w.released, w.closed
		w.mu.Unlock()
		if closed {
			return net.ErrClosed
		}
		if !held {
			return nil
		}
		<-released
	}
}

// interrupted reports whether a failed call is to be tried again because Hold, not the
// user's deadline, ended it.
func (w *Wire) interrupted(d *direction, err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.closed && (d.deadline.IsZero() || time.Now().Before(d.deadline))
}

// move runs one read or write when the wire flows, again after each Hold.
func (w *Wire) move(d *direction, call func() (done bool, err error)) error {
	for {
		if err := w.enter(); err != nil {
			return err
		}
		d.turn.Lock()
		done, err := call()
		d.turn.Unlock()
		if done || err != nil && !w.interrupted(d, err) {
			return err
		}
	}
}

func (w *Wire) setDeadline(t time.Time, directions ...*direction) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return net.ErrClosed
	}
	var errs []error
	for _, d := range directions {
		d.deadline = t
		if !w.held {
			errs = append(errs, d.set(t))
		}
	}
	return errors.Join(errs...)
}

// wireConn is a Wire as its user's connection.
type wireConn Wire

func (c *wireConn) wire() *Wire { return (*Wire)(c) }

func (c *wireConn) Read(p []byte) (n int, err error) {
	w := c.wire()
	err = w.move(&w.in, func() (bool, error) {
		var err error
		n, err = w.host.Read(p)
		return n > 0 || err == nil, err
	})
	return n, err
}

func (c *wireConn) Write(p []byte) (n int, err error) {
	w := c.wire()
	err = w.move(&w.out, func() (bool, error) {
		k, err := w.host.Write(p[n:])
		n += k
		return n == len(p), err
	})
	return n, err
}

func (c *wireConn) Close() error                       { return c.wire().Close() }
func (c *wireConn) LocalAddr() net.Addr                { return c.host.LocalAddr() }
func (c *wireConn) RemoteAddr() net.Addr               { return c.host.RemoteAddr() }
func (c *wireConn) SetDeadline(t time.Time) error      { return c.wire().setDeadline(t, &c.in, &c.out) }
func (c *wireConn) SetReadDeadline(t time.Time) error  { return c.wire().setDeadline(t, &c.in) }
func (c *wireConn) SetWriteDeadline(t time.Time) error { return c.wire().setDeadline(t, &c.out) }
