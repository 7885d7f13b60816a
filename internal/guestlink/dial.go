package guestlink

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/api/link"
)

// ErrPortClosed says that nothing in the guest listens on the port.
var ErrPortClosed = errors.New("port is not open in the guest")

// lingerLimit is how long a connection that was closed here waits for the guest
// to close its half, so that what was written is not cut off by a reset. Longer
// keeps streams of servers that never close.
const lingerLimit = 5 * time.Second

// Dial connects to a TCP port of the guest, on 127.0.0.1 or, if nobody listens
// there, on ::1. The error wraps ErrPortClosed if nobody listens at all.
//
// The connection is full duplex; it has CloseWrite for its sending half. A
// failed guest or link shows as an error of Read and Write that wraps
// ECONNRESET. An idle connection costs two parked goroutines here and two there.
func (c *Client) Dial(ctx context.Context, port int) (net.Conn, error) {
	what := "connect to port " + strconv.Itoa(port)
	// The connection outlives ctx, which bounds the dialling only.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	near, far := net.Pipe()
	conn := &portConn{Conn: near, far: far, port: port, cancel: cancel}
	req, err := http.NewRequestWithContext(streamCtx, http.MethodPost, baseURL+link.DialPath+"?port="+strconv.Itoa(port), &upstream{conn: conn})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	stop := context.AfterFunc(ctx, cancel)
	resp, err := c.Transport().RoundTrip(req)
	if !stop() || err != nil {
		cancel()
		if err == nil {
			resp.Body.Close()
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s: %w", what, context.Cause(ctx))
		}
		return nil, c.describe(ctx, what, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer cancel()
		defer resp.Body.Close()
		return nil, fmt.Errorf("%s: %w", what, dialStatus(resp))
	}
	go conn.receive(resp.Body)
	return conn, nil
}

func dialStatus(resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusBadGateway:
		return ErrPortClosed
	case http.StatusPreconditionFailed:
		return ErrSealed
	}
	var body struct {
		Message string `json:"message"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&body); err != nil || body.Message == "" {
		body.Message = resp.Status
	}
	return errors.New(body.Message)
}

// portConn is a connection to a port. Its user holds the embedded near end of a
// pipe, which brings the deadlines; the far end is moved to and from the stream.
//
//	near.Write -> far.Read -> upstream, the request's body
//	near.Read  <- far.Write <- receive, the answer's body
type portConn struct {
	net.Conn
	far    net.Conn
	port   int
	cancel context.CancelFunc // ends the stream

	halfClosed atomic.Bool // CloseWrite was called
	closing    atomic.Bool // Close was called

	mu      sync.Mutex
	ended   bool        // guarded by mu: the guest sends no more
	failure error       // guarded by mu: why, nil for an orderly end
	over    bool        // guarded by mu: receive is about to return
	linger  *time.Timer // guarded by mu: ends the stream if the guest does not
}

// Read returns io.EOF after the guest's orderly end.
func (c *portConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil {
		return n, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closing.Load():
		return n, c.error("read", net.ErrClosed)
	case c.ended && c.failure != nil:
		return n, c.error("read", c.failure)
	case c.ended:
		return n, io.EOF
	}
	return n, c.error("read", err)
}

// Write returns when the transport has taken p.
func (c *portConn) Write(p []byte) (int, error) {
	if c.halfClosed.Load() {
		return 0, c.error("write", unix.EPIPE)
	}
	n, err := c.Conn.Write(p)
	switch {
	case err == nil || errors.Is(err, os.ErrDeadlineExceeded):
	case c.closing.Load():
		err = net.ErrClosed
	default:
		err = unix.ECONNRESET // the far end is closed only when the stream is
	}
	return n, c.error("write", err)
}

func (c *portConn) error(op string, err error) error {
	if err == nil {
		return nil
	}
	return &net.OpError{Op: op, Net: "guest", Addr: c.RemoteAddr(), Err: err}
}

// CloseWrite ends the sending half; the guest's program reads to an end.
func (c *portConn) CloseWrite() error {
	if c.halfClosed.CompareAndSwap(false, true) {
		_ = c.far.SetReadDeadline(time.Unix(1, 0)) // upstream's Read sees it
	}
	return nil
}

// Close ends both halves. What was written still reaches the guest.
func (c *portConn) Close() error {
	if !c.closing.CompareAndSwap(false, true) {
		return c.error("close", net.ErrClosed)
	}
	_ = c.Conn.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over {
		c.linger = time.AfterFunc(lingerLimit, c.cancel)
	}
	return nil
}

// SetReadDeadline bounds Read.
func (c *portConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return nil // Read returns at once, whatever its deadline
	}
	return c.Conn.SetReadDeadline(t)
}

// SetDeadline bounds Read and Write.
func (c *portConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// end makes Read return from now on.
func (c *portConn) end(failure error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended, c.failure = true, failure
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
}

// receive moves the answer to the user until the stream ends.
func (c *portConn) receive(body io.ReadCloser) {
	defer c.finish()
	defer body.Close()
	switch err := c.pieces(body); {
	case errors.Is(err, io.ErrClosedPipe):
		// The user has closed; what it wrote before may still be on its way. The
		// stream ends when the guest closes too, or soon.
		_, _ = io.Copy(io.Discard, body)
	case err != nil:
		c.end(unix.ECONNRESET)
	default:
		c.end(nil)
		// The stream lives on for what the user still sends: until it closes its
		// half, or the guest resets the connection.
		if n, err := io.Copy(io.Discard, body); err != nil || n > 0 {
			c.end(unix.ECONNRESET)
		}
	}
}

// finish lets go of what Read, Write and the transport may wait for.
func (c *portConn) finish() {
	c.cancel()
	_ = c.far.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	if c.linger != nil {
		c.linger.Stop()
	}
}

// pieces moves pieces until the empty one. io.ErrClosedPipe: the user has closed.
func (c *portConn) pieces(body io.Reader) error {
	var head [4]byte
	for {
		if _, err := io.ReadFull(body, head[:]); err != nil {
			return errors.Join(errors.New("reset"), err)
		}
		size := binary.BigEndian.Uint32(head[:])
		if size == 0 {
			return nil
		}
		if size > link.DialPiece {
			return fmt.Errorf("a piece of %d bytes", size)
		}
		buf := pieceBuffers.Get().(*[link.DialPiece]byte) //nolint:forcetypeassert // the pool holds nothing else
		_, err := io.ReadFull(body, buf[:size])
		if err == nil {
			_, err = c.far.Write(buf[:size])
		}
		pieceBuffers.Put(buf)
		if err != nil {
			return err
		}
	}
}

var pieceBuffers = sync.Pool{New: func() any { return new([link.DialPiece]byte) }}

// LocalAddr is the link.
func (c *portConn) LocalAddr() net.Addr { return guestAddr("link") }

// RemoteAddr is the port in the guest.
func (c *portConn) RemoteAddr() net.Addr { return guestAddr("guest:" + strconv.Itoa(c.port)) }

type guestAddr string

func (guestAddr) Network() string  { return "guest" }
func (a guestAddr) String() string { return string(a) }

// upstream is the request's body: what the user writes.
type upstream struct {
	conn *portConn
}

func (u *upstream) Read(p []byte) (int, error) {
	n, err := u.conn.far.Read(p)
	if err == nil {
		return n, nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && u.conn.halfClosed.Load() {
		err = io.EOF
	}
	return n, err
}

// Close is called by the transport when it needs no more of the body: a Read in
// progress must return.
func (u *upstream) Close() error {
	return u.conn.far.SetReadDeadline(time.Unix(1, 0))
}
