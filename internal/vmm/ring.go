package vmm

import (
	"errors"
	"io"
	"sync"
	"time"
)

// A ring keeps the last bytes of an endless stream. Safe for concurrent use.
type ring struct {
	limit int // immutable

	mu   sync.Mutex
	buf  []byte // guarded by mu; at most 2*limit, so that most writes only append
	open bool   // guarded by mu; a reader still feeds it
}

func newRing(limit int) *ring { return &ring{limit: limit, open: true} }

// Write keeps the end of p; it never fails.
func (r *ring) Write(p []byte) (int, error) {
	n := len(p)
	if len(p) > r.limit {
		p = p[len(p)-r.limit:]
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.buf)+len(p) > 2*r.limit {
		keep := r.buf[max(0, len(r.buf)-r.limit+len(p)):]
		r.buf = r.buf[:copy(r.buf, keep)]
	}
	r.buf = append(r.buf, p...)
	return n, nil
}

// bytes returns a copy of the last limit bytes.
func (r *ring) bytes() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]byte(nil), r.buf[max(0, len(r.buf)-r.limit):]...)
}

// drainPause slows down a writer that fills every read: a VMM or guest that floods
// gets 4 MiB/s of our attention and then waits. Without the pause it would take a
// core from the fault threads; ten times longer, a panic's stack trace would be late.
const drainPause = time.Millisecond

// drain feeds the ring from src until its end.
func (r *ring) drain(src io.Reader) error {
	buf := make([]byte, 4096)
	for {
		n, err := src.Read(buf)
		_, _ = r.Write(buf[:n])
		if n == len(buf) {
			time.Sleep(drainPause)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
