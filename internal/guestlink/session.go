package guestlink

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/agentzip/agentzip/api/link"
)

// ErrLinkDown says that the stream to the guest ended: the VM died, the agent
// was started again or the Client was closed. A command that was running may go
// on in the guest; whether a request in flight was carried out is unknown.
var ErrLinkDown = errors.New("link to the guest is down")

// streamBuffer is what one stream may hold here when its reader is slow. Half
// of it starves fast streams on a busy host, twice as much is twice the memory.
const streamBuffer = 256 << 10

// session is one HTTP/2 connection, open on a stream.
type session struct {
	conn *resetConn
	http *http.ClientConn
}

// open greets the guest on conn and begins HTTP/2. If ctx ends first, the
// stream is still good for another attempt.
func open(ctx context.Context, conn net.Conn) (*session, error) {
	rest, err := greet(ctx, conn)
	if err != nil {
		return nil, err
	}
	rc := &resetConn{Conn: conn, rest: rest, reset: link.NewScanner(link.Reset()), down: make(chan struct{})}
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		Protocols:          &protocols,
		DisableCompression: true, // files come as they are, with their length
		DialContext:        func(context.Context, string, string) (net.Conn, error) { return rc, nil },
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: streamBuffer,
			// What 256 streams whose readers sleep may hold before they close the
			// window of the others. (The documentation of net/http allows less than
			// 4 MiB, its code more; a value it does not take becomes 1 GiB.)
			MaxReceiveBufferPerConnection: 64 << 20,
		},
	}
	cc, err := transport.NewClientConn(ctx, "http", "guest:80")
	if err != nil {
		_ = rc.Close()
		return nil, fmt.Errorf("%w: begin HTTP/2: %w", ErrLinkDown, err)
	}
	return &session{conn: rc, http: cc}, nil
}

// greet opens a session on conn and returns what was read behind the Welcome.
func greet(ctx context.Context, conn net.Conn) ([]byte, error) {
	finished, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-ctx.Done():
			_ = conn.SetDeadline(time.Unix(1, 0))
		case <-finished:
		}
	}()
	g := greeter{conn: conn, written: make(chan error, 1)}
	rest, err := g.run()
	if err != nil {
		_ = conn.SetDeadline(time.Unix(1, 0)) // a Write that is still waiting
	}
	g.wait()
	close(finished)
	<-watched
	_ = conn.SetDeadline(time.Time{})
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%w: greet guest: %w", ErrLinkDown, err)
	}
	return rest, nil
}

// greeter says Hello and waits for its Welcome.
type greeter struct {
	conn    net.Conn
	nonce   []byte // of the last Hello
	pending int    // Hellos being written
	written chan error
}

// hello sends a Hello with a fresh nonce beside the reading: a guest that is
// still pushing bytes of a former session may not take ours before it is rid of them.
func (g *greeter) hello() error {
	for g.pending > 0 {
		if err := g.collect(); err != nil {
			return err
		}
	}
	g.nonce = make([]byte, link.NonceSize)
	if _, err := rand.Read(g.nonce); err != nil {
		return fmt.Errorf("make nonce: %w", err)
	}
	mark := link.Hello()
	greeting := append(mark[:], g.nonce...)
	g.pending++
	go func() {
		_, err := g.conn.Write(greeting)
		g.written <- err
	}()
	return nil
}

func (g *greeter) collect() error {
	g.pending--
	return <-g.written
}

// wait returns when no Write is in progress.
func (g *greeter) wait() {
	for g.pending > 0 {
		_ = g.collect()
	}
}

// run discards the stream up to the Welcome of the last Hello.
func (g *greeter) run() ([]byte, error) {
	if err := g.hello(); err != nil {
		return nil, err
	}
	welcome, reset := link.NewScanner(link.Welcome()), link.NewScanner(link.Reset())
	buf := make([]byte, 32<<10)
	var answer []byte // what came behind a Welcome, while it is shorter than a nonce
	inside := false
	for {
		n, err := g.conn.Read(buf)
		if _, found := reset.Feed(buf[:n]); found {
			// A fresh agent; the one before it may have eaten the Hello.
			if err := g.hello(); err != nil {
				return nil, err
			}
		}
		piece := buf[:n]
		for len(piece) > 0 {
			if !inside {
				at, found := welcome.Feed(piece)
				piece, inside = piece[at:], found
				continue
			}
			take := min(link.NonceSize-len(answer), len(piece))
			answer = append(answer, piece[:take]...)
			piece = piece[take:]
			if len(answer) < link.NonceSize {
				break
			}
			if bytes.Equal(answer, g.nonce) {
				return bytes.Clone(piece), nil
			}
			inside, answer = false, answer[:0] // the answer to an earlier Hello
		}
		if err != nil {
			return nil, err
		}
	}
}

// resetConn is the stream of a session: it ends when the guest's agent says
// that it is a new one.
type resetConn struct {
	net.Conn
	reset *link.Scanner // owned by the reader
	rest  []byte        // owned by the reader; read before the session began

	once sync.Once
	down chan struct{} // closed by Close
}

// Read is called by the HTTP/2 connection's one reader.
func (c *resetConn) Read(p []byte) (int, error) {
	var n int
	if len(c.rest) > 0 {
		n = copy(p, c.rest)
		c.rest = c.rest[n:]
	} else {
		var err error
		if n, err = c.Conn.Read(p); err != nil {
			return n, err
		}
	}
	if _, found := c.reset.Feed(p[:n]); found {
		return 0, errors.New("the agent was started again")
	}
	return n, nil
}

// Close closes the stream too: HTTP/2 closes it when the session broke, and a
// broken session is what ends a Client.
func (c *resetConn) Close() error {
	err := net.ErrClosed
	c.once.Do(func() {
		close(c.down)
		err = c.Conn.Close()
	})
	return err
}
