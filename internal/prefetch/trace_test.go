package prefetch

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// A trace is what the guests of one cohort touched, recorded with fault-around, mapping back
// and prefetch off and all private pages dropped in each gap: the true order of first touches.
type trace struct{ boxes []tracedBox }

type tracedBox struct {
	name  string
	calls []tracedCall
}

type tracedCall struct {
	kind, shell string
	took        int           // ms
	evict       []units.Frame // became evicted since the call before began
	unevict     []units.Frame // are no longer
	touches     []tracedTouch // in order of first touch; of shared pages only those that were written
	private     []units.Frame // found private after it beside those: written in the gap, or before
}

type tracedTouch struct {
	frame      units.Frame
	evicted    bool // else shared
	write      bool // it was written in this call
	firstWrite bool // the first touch of an evicted page was a write
	at         int  // ms after the call began
}

// loadTrace reads a file of testdata, or the one that AGENTZIP_TRACE names.
func loadTrace(tb testing.TB) trace {
	tb.Helper()
	path := os.Getenv("AGENTZIP_TRACE")
	if path == "" {
		path = "testdata/siblings.gz"
	}
	f, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // read only
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	r := &traceReader{r: bufio.NewReader(z)}
	var t trace
	for range r.num() {
		b := tracedBox{name: r.text()}
		for range r.num() {
			b.calls = append(b.calls, r.call())
		}
		t.boxes = append(t.boxes, b)
	}
	if r.err != nil {
		tb.Fatalf("read %s: %v", path, r.err)
	}
	return t
}

// A traceReader reads variable-length numbers. After an error it reads zeros.
type traceReader struct {
	r   *bufio.Reader
	err error
}

func (r *traceReader) num() int {
	if r.err != nil {
		return 0
	}
	n, err := binary.ReadUvarint(r.r)
	if err != nil {
		r.err = fmt.Errorf("number: %w", err)
		return 0
	}
	return int(n)
}

func (r *traceReader) text() string {
	b := make([]byte, r.num())
	if _, err := io.ReadFull(r.r, b); err != nil && r.err == nil {
		r.err = fmt.Errorf("text: %w", err)
	}
	return string(b)
}

func (r *traceReader) frames() []units.Frame {
	out := make([]units.Frame, r.num())
	at := 0
	for i := range out {
		at += r.num()
		out[i] = units.Frame(at)
	}
	return out
}

func (r *traceReader) call() tracedCall {
	c := tracedCall{kind: r.text(), shell: r.text(), took: r.num(), evict: r.frames(), unevict: r.frames()}
	frame, at := 0, 0
	for range r.num() {
		n := r.num()
		delta := n >> 4
		if n>>3&1 != 0 {
			delta = -delta - 1
		}
		frame += delta
		at += r.num()
		c.touches = append(c.touches, tracedTouch{
			frame: units.Frame(frame), write: n&1 != 0, evicted: n&2 != 0, firstWrite: n&4 != 0, at: at,
		})
	}
	c.private = r.frames()
	return c
}
