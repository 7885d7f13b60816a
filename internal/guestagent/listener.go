package guestagent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/agentzip/agentzip/api/link"
)

// Port is the guest's end of the byte stream to the host. Read returns io.EOF
// while no host is connected and may succeed again later; any other error is final.
type Port interface {
	io.ReadWriteCloser
	// AwaitHost blocks after Read returned io.EOF until reading is worth another
	// try. It returns an error only when the port was closed.
	AwaitHost() error
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// readChunk is how much of the stream is looked at in one go.
const readChunk = 32 << 10

// Listener turns a Port into a net.Listener: each session a host opens on the
// stream is one connection. Accept is called by one goroutine at a time and
// waits for the former connection to be closed.
type Listener struct {
	port Port

	// Owned by the goroutine that holds the session: Accept between sessions,
	// the connection's reader during one.
	buf     []byte // what the port is read into
	pending []byte // of buf: read, not searched for a Hello yet
	ready   []byte // of buf: searched, belongs to the session in hand
	hello   *link.Scanner
	greeted bool // a Hello mark was seen; its nonce comes next

	session chan struct{} // closed when the current connection is; nil before the first
	writing sync.Mutex    // held during each Write to the port: a session's last write ends before the next session's first

	closeOnce sync.Once
	closed    chan struct{}
}

// NewListener listens on port and owns it from here. It tells the host that
// whatever session it had with an earlier agent is over.
func NewListener(port Port) *Listener {
	l := &Listener{port: port, buf: make([]byte, readChunk), hello: link.NewScanner(link.Hello()), closed: make(chan struct{})}
	// No matter if it fails: a host that is not connected needs no Reset. The
	// write is tried at once; only a port without a host waits for the deadline.
	reset := link.Reset()
	_ = port.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	_, _ = port.Write(reset[:])
	_ = port.SetWriteDeadline(time.Time{})
	return l
}

// Accept waits for the next session.
func (l *Listener) Accept() (net.Conn, error) {
	if l.session != nil {
		select {
		case <-l.session:
		case <-l.closed:
			return nil, net.ErrClosed
		}
	}
	// Closing the former session left deadlines in the past. Its reader is out;
	// its last Write is once the lock is ours.
	l.writing.Lock()
	_ = l.port.SetWriteDeadline(time.Time{})
	l.writing.Unlock()
	_ = l.port.SetReadDeadline(time.Time{})
	nonce, err := l.awaitNonce()
	if err != nil {
		return nil, l.acceptError(err)
	}
	l.session = make(chan struct{})
	c := &sessionConn{l: l, done: l.session}
	welcome := link.Welcome()
	if _, err := c.Write(append(welcome[:], nonce...)); err != nil {
		_ = c.Close()
		return nil, l.acceptError(err)
	}
	return c, nil
}

func (l *Listener) acceptError(err error) error {
	select {
	case <-l.closed:
		return net.ErrClosed
	default:
		return fmt.Errorf("read link port: %w", err)
	}
}

// awaitNonce discards the stream up to the next Hello and returns the nonce behind it.
func (l *Listener) awaitNonce() ([]byte, error) {
	l.ready = nil
	var nonce []byte
	for {
		for len(l.pending) > 0 {
			if !l.greeted {
				n, found := l.hello.Feed(l.pending)
				l.pending, l.greeted = l.pending[n:], found
				continue
			}
			n := min(link.NonceSize-len(nonce), len(l.pending))
			nonce = append(nonce, l.pending[:n]...)
			l.pending = l.pending[n:]
			if len(nonce) == link.NonceSize {
				l.greeted = false
				return nonce, nil
			}
		}
		n, err := l.port.Read(l.buf)
		l.pending = l.buf[:n]
		if n > 0 || err == nil {
			continue
		}
		if !errors.Is(err, io.EOF) {
			return nil, err
		}
		// The host is gone; a Hello it began is void.
		nonce, l.greeted = nil, false
		l.hello.Restart()
		if err := l.port.AwaitHost(); err != nil {
			return nil, err
		}
	}
}

// next makes more of the stream ready for the session in hand. io.EOF says that
// the session is over: the host went away or opened another one.
//
// It reads as much as there is, not as much as HTTP/2 asks for: a Hello is then
// recognised before its first bytes are taken for a frame, which the server
// would mourn for a second before it lets go of the session.
func (l *Listener) next() error {
	if len(l.pending) == 0 {
		n, err := l.port.Read(l.buf)
		if n == 0 && err != nil {
			if errors.Is(err, io.EOF) {
				l.hello.Restart()
			}
			return err
		}
		l.pending = l.buf[:n]
	}
	at, found := l.hello.Feed(l.pending)
	if found {
		l.pending, l.greeted = l.pending[at:], true
		return io.EOF
	}
	l.ready, l.pending = l.pending, nil
	return nil
}

// Close ends the listener, the session in hand and the port.
func (l *Listener) Close() error {
	var err error
	l.closeOnce.Do(func() {
		close(l.closed)
		err = l.port.Close()
	})
	return err
}

// Addr is the port's name.
func (l *Listener) Addr() net.Addr { return portAddr{} }

type portAddr struct{}

func (portAddr) Network() string { return "virtio" }
func (portAddr) String() string  { return link.PortName }

// sessionConn is one session. Read is called by one goroutine.
type sessionConn struct {
	l    *Listener
	over bool // owned by the reader: the session ended in the stream

	closeOnce sync.Once
	mu        sync.Mutex
	isClosed  bool          // guarded by mu
	reading   sync.Mutex    // held during each Read: the reader is out before the next Accept reads
	done      chan struct{} // closed by Close, when no Read is running
}

// Read returns io.EOF when the host went away or opened another session.
func (c *sessionConn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.closed() {
		return 0, net.ErrClosed
	}
	if c.over {
		return 0, io.EOF
	}
	if len(c.l.ready) == 0 {
		if err := c.l.next(); err != nil {
			c.over = errors.Is(err, io.EOF)
			return 0, err
		}
	}
	n := copy(p, c.l.ready)
	c.l.ready = c.l.ready[n:]
	return n, nil
}

func (c *sessionConn) closed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isClosed
}

// Write sends p whole or fails.
func (c *sessionConn) Write(p []byte) (int, error) {
	c.l.writing.Lock()
	defer c.l.writing.Unlock()
	if c.closed() {
		return 0, net.ErrClosed
	}
	return c.l.port.Write(p)
}

// Close ends the session, not the port: blocked calls return, the next Accept may go on.
func (c *sessionConn) Close() error {
	c.closeOnce.Do(func() {
		c.mu.Lock()
		c.isClosed = true
		c.mu.Unlock()
		past := time.Unix(1, 0)
		_ = c.l.port.SetReadDeadline(past)
		_ = c.l.port.SetWriteDeadline(past)
		c.reading.Lock() // the reader has left
		defer c.reading.Unlock()
		close(c.done)
	})
	return nil
}

func (c *sessionConn) LocalAddr() net.Addr  { return portAddr{} }
func (c *sessionConn) RemoteAddr() net.Addr { return portAddr{} }

// SetDeadline and its siblings do nothing before the session is closed: the
// server uses no timeouts on the link, and Close owns the port's deadlines.
func (c *sessionConn) SetDeadline(time.Time) error      { return nil }
func (c *sessionConn) SetReadDeadline(time.Time) error  { return nil }
func (c *sessionConn) SetWriteDeadline(time.Time) error { return nil }
