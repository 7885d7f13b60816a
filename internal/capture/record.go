package capture

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/agentzip/agentzip/internal/units"
)

// An op says what a run of a record is; see the package doc.
type op uint8

const (
	opEnd op = iota
	opSame
	opContent
	opGone
)

// A kind says what a record describes.
type kind byte

const (
	kindMemory kind = 'M'
	kindRoot   kind = 'R'
	kindGap    kind = 'G'
)

const magic = "AZCAP1"

// A header begins a record.
type header struct {
	kind          kind
	frames        uint64
	sibling, call uint64 // 0 unless kind is kindGap
}

// runPages is the longest run with content that is written: what the writer buffers, 256 KiB.
const runPages = 64

// A recordWriter writes one record after another. One goroutine uses it.
type recordWriter struct {
	w    io.Writer
	next uint64 // the frame behind the last run written

	op    op     // of the run under way
	start uint64 // its first frame
	n     uint64 // its length; 0: there is none
	pages []byte // its content
	num   []byte // scratch
}

func newRecordWriter() *recordWriter {
	return &recordWriter{pages: make([]byte, 0, runPages*units.PageSize)}
}

// begin starts a record on w.
func (r *recordWriter) begin(w io.Writer, h header) error {
	r.w, r.next, r.n, r.pages = w, 0, 0, r.pages[:0]
	b := append([]byte(magic), byte(h.kind))
	b = binary.AppendUvarint(b, h.frames)
	if h.kind == kindGap {
		b = binary.AppendUvarint(b, h.sibling)
		b = binary.AppendUvarint(b, h.call)
	}
	_, err := r.w.Write(b)
	return err
}

// add appends a frame, which is above all before it. page is its content if o is opContent.
func (r *recordWriter) add(o op, f units.Frame, page *units.Page) error {
	at := uint64(f)
	if r.n == 0 || o != r.op || at != r.start+r.n || len(r.pages) == cap(r.pages) {
		if err := r.flush(); err != nil {
			return err
		}
		r.op, r.start = o, at
	}
	r.n++
	if o == opContent {
		r.pages = append(r.pages, page[:]...)
	}
	return nil
}

func (r *recordWriter) flush() error {
	if r.n == 0 {
		return nil
	}
	r.num = binary.AppendUvarint(r.num[:0], (r.start-r.next)<<2|uint64(r.op))
	r.num = binary.AppendUvarint(r.num, r.n)
	if _, err := r.w.Write(r.num); err != nil {
		return err
	}
	if len(r.pages) > 0 {
		if _, err := r.w.Write(r.pages); err != nil {
			return err
		}
	}
	r.next, r.n, r.pages = r.start+r.n, 0, r.pages[:0]
	return nil
}

// end completes the record.
func (r *recordWriter) end() error {
	if err := r.flush(); err != nil {
		return err
	}
	_, err := r.w.Write([]byte{byte(opEnd)})
	return err
}

// A recordReader reads one record after another. One goroutine uses it.
type recordReader struct {
	r      *bufio.Reader
	frames uint64
	next   uint64 // the frame behind the last run
}

func newRecordReader() *recordReader { return &recordReader{r: bufio.NewReaderSize(nil, 64<<10)} }

// begin starts a record that must have the header want.
func (r *recordReader) begin(src io.Reader, want header) error {
	r.r.Reset(src)
	r.frames, r.next = want.frames, 0
	var b [len(magic) + 1]byte
	if _, err := io.ReadFull(r.r, b[:]); err != nil {
		return cutShort(err)
	}
	got := header{kind: kind(b[len(magic)])}
	if string(b[:len(magic)]) != magic || got.kind != want.kind {
		return fmt.Errorf("it begins with %q, not %q", b, magic+string(rune(want.kind)))
	}
	fields := []*uint64{&got.frames}
	if got.kind == kindGap {
		fields = append(fields, &got.sibling, &got.call)
	}
	for _, f := range fields {
		v, err := binary.ReadUvarint(r.r)
		if err != nil {
			return cutShort(err)
		}
		*f = v
	}
	if got != want {
		return fmt.Errorf("it is of sibling %d, call %d, %d frames, not of sibling %d, call %d, %d frames",
			got.sibling, got.call, got.frames, want.sibling, want.call, want.frames)
	}
	return nil
}

// run returns the next run; opEnd is the last. After opContent its pages must be read.
func (r *recordReader) run() (o op, start, n uint64, err error) {
	v, err := binary.ReadUvarint(r.r)
	if err != nil {
		return 0, 0, 0, cutShort(err)
	}
	o = op(v & 3)
	if o == opEnd {
		if v != 0 {
			return 0, 0, 0, fmt.Errorf("run %#x is of no known kind", v)
		}
		return opEnd, 0, 0, r.atEnd()
	}
	if n, err = binary.ReadUvarint(r.r); err != nil {
		return 0, 0, 0, cutShort(err)
	}
	skip := v >> 2
	if skip > r.frames-r.next || n == 0 || n > r.frames-r.next-skip {
		return 0, 0, 0, fmt.Errorf("a run of %d frames, %d after frame %d, does not fit into %d", n, skip, r.next, r.frames)
	}
	start = r.next + skip
	r.next = start + n
	return o, start, n, nil
}

// atEnd wants the source to have ended, which makes zstd compare its checksum.
func (r *recordReader) atEnd() error {
	_, err := r.r.ReadByte()
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err == nil:
		return errors.New("something follows its end")
	}
	return err
}

// page reads the next page of a run with content.
func (r *recordReader) page(dst *units.Page) error {
	if _, err := io.ReadFull(r.r, dst[:]); err != nil {
		return cutShort(err)
	}
	return nil
}

// cutShort says so if err is the end of the source in the middle of a record.
func cutShort(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("it is cut short: %w", io.ErrUnexpectedEOF)
	}
	return err
}
