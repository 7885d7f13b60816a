package proxy

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// silence is how long a stream may be without bytes until its tool window is
// closed (if the guest does not compute). Longer: a background process that
// waits keeps its sandbox uncompressed; shorter: a command that sleeps between
// two lines is compressed in its middle.
const silence = 2 * time.Second

// A window is the tool window of one request: open while bytes flow.
type window struct {
	sandbox lifecycle.Sandbox // immutable
	kind    string            // immutable

	mu     sync.Mutex
	end    func()      // guarded by mu; nil while the window is closed
	timer  *time.Timer // guarded by mu
	last   time.Time   // guarded by mu; of the last byte
	opens  bool        // guarded by mu; a reopening is under way
	closed bool        // guarded by mu; the request is over
}

// openWindow returns when the guest can answer.
func openWindow(ctx context.Context, s lifecycle.Sandbox, kind string) (*window, error) {
	end, err := s.BeginCall(ctx, kind)
	if err != nil {
		return nil, err
	}
	w := &window{sandbox: s, kind: kind, end: end, last: time.Now()}
	w.mu.Lock()
	w.timer = time.AfterFunc(silence, w.look)
	w.mu.Unlock()
	return w, nil
}

// look is the timer: is the stream silent?
func (w *window) look() {
	w.mu.Lock()
	if w.closed || w.end == nil {
		w.mu.Unlock()
		return
	}
	if left := silence - time.Since(w.last); left > 0 {
		w.timer.Reset(left)
		w.mu.Unlock()
		return
	}
	w.mu.Unlock()
	busy := w.sandbox.Busy()
	w.mu.Lock()
	if w.closed || w.end == nil {
		w.mu.Unlock()
		return
	}
	if busy || time.Since(w.last) < silence {
		w.timer.Reset(silence)
		w.mu.Unlock()
		return
	}
	end := w.end
	w.end = nil
	w.mu.Unlock()
	end()
}

// moved notes that bytes flowed. A closed window is opened again, beside the
// bytes: they are here already, and the guest is awake.
func (w *window) moved() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last = time.Now()
	if w.closed || w.end != nil || w.opens {
		return
	}
	w.opens = true
	go w.reopen()
}

func (w *window) reopen() {
	ctx, cancel := context.WithTimeout(context.Background(), silence)
	defer cancel()
	end, err := w.sandbox.BeginCall(ctx, w.kind)
	w.mu.Lock()
	w.opens = false
	switch {
	case err != nil: // it dies; whoever reads the stream sees it
		w.mu.Unlock()
		return
	case w.closed:
		w.mu.Unlock()
		end()
		return
	}
	w.end = end
	w.timer.Reset(silence)
	w.mu.Unlock()
}

// close ends the window with its request.
func (w *window) close() {
	w.mu.Lock()
	w.closed = true
	w.timer.Stop()
	end := w.end
	w.end = nil
	w.mu.Unlock()
	if end != nil {
		end()
	}
}

// countedBody tells the window of what the client sends.
type countedBody struct {
	io.ReadCloser
	window *window
}

func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.window.moved()
	}
	return n, err
}

// countedWriter tells the window of what the guest answers.
type countedWriter struct {
	http.ResponseWriter
	window *window
}

func (w countedWriter) Write(p []byte) (int, error) {
	w.window.moved()
	return w.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach Flush and Hijack.
func (w countedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// countedConn tells the window of what flows to and from a port, also after an
// upgrade, when there is no body any more.
type countedConn struct {
	net.Conn
	window *window
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.window.moved()
	}
	return n, err
}

func (c countedConn) Write(p []byte) (int, error) {
	c.window.moved()
	return c.Conn.Write(p)
}
