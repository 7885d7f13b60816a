package capture

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A Set is a capture, opened for reading. It holds no files open.
type Set struct {
	dir  string // immutable
	info *Info  // immutable
}

// A Gap is what one sibling held after one call.
type Gap struct {
	Sibling, Call int
	At            time.Duration // from the start of the run
	Frames        []units.Frame // all private pages, ascending
	Changed       []Change      // of them new, or changed since the sibling's gap before; ascending
	Gone          []units.Frame // private in the gap before, no longer; ascending
}

// A Change is a private page with its content.
type Change struct {
	Frame units.Frame
	Page  *units.Page
}

// Open reads and checks the description of a capture. Errors wrap ErrNotFound, ErrFormat or
// ErrDamaged. The pages themselves are checked as they are read.
func Open(dir string) (*Set, error) {
	path := filepath.Join(dir, infoFile)
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("open capture: %w in %s: make one with `agentzip capture`", ErrNotFound, dir)
	case err != nil:
		return nil, fmt.Errorf("open capture: %w", err)
	case units.Bytes(st.Size()) > maxInfo:
		return nil, fmt.Errorf("open capture %s: %w: %s has %d bytes", dir, ErrDamaged, infoFile, st.Size())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("open capture: %w", err)
	}
	info, err := parseInfo(data)
	if err != nil {
		return nil, fmt.Errorf("open capture %s: %w", dir, err)
	}
	s := &Set{dir: dir, info: info}
	sizes := map[string]int64{memoryFile: info.Memory.Length, rootFile: info.Root.Length}
	for i := range info.Siblings {
		sizes[siblingFile(i)] = 0
	}
	for _, g := range info.Gaps {
		sizes[siblingFile(g.Sibling)] += g.Length
	}
	for name, want := range sizes {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return nil, s.damaged(name, err)
		}
		if !st.Mode().IsRegular() || st.Size() != want {
			return nil, s.damaged(name, fmt.Errorf("it is %d bytes long, not %d", st.Size(), want))
		}
	}
	return s, nil
}

// Info describes the capture. The caller must not change what it refers to.
func (s *Set) Info() Info { return *s.info }

// First returns the set with only its first n siblings, for measurements of smaller cohorts.
func (s *Set) First(n int) *Set {
	info := *s.info
	info.Siblings = info.Siblings[:max(0, min(n, len(info.Siblings)))]
	info.Gaps = nil
	for _, g := range s.info.Gaps {
		if g.Sibling < len(info.Siblings) {
			info.Gaps = append(info.Gaps, g)
		}
	}
	return &Set{dir: s.dir, info: &info}
}

// damaged says which file of the capture is bad, and what to do.
func (s *Set) damaged(name string, err error) error {
	return fmt.Errorf("%w: %s: %w: capture again", ErrDamaged, filepath.Join(s.dir, name), err)
}

func (s *Set) open(name string) (*os.File, error) { return os.Open(filepath.Join(s.dir, name)) }

// Gaps calls f for each gap, in order of time over all siblings, until it fails; its error
// is returned as it is. What a Gap refers to is valid until f returns. Pages lie off the Go
// heap, in memory for the largest gap. Errors of the capture itself wrap ErrDamaged.
func (s *Set) Gaps(f func(g Gap) error) error {
	r, err := s.newGapReader()
	if err != nil {
		return fmt.Errorf("read capture %s: %w", s.dir, err)
	}
	defer r.close()
	for _, g := range s.info.Gaps {
		if err := r.read(g); err != nil {
			return s.damaged(siblingFile(g.Sibling), fmt.Errorf("the gap after call %d: %w", g.Call, err))
		}
		if err := f(r.gap); err != nil {
			return err
		}
	}
	return nil
}

// A gapReader reads gap after gap into the same memory.
type gapReader struct {
	frames  uint64
	files   []*os.File // by sibling
	private [][]uint64 // by sibling: a bit for each frame private in its gap before
	unpack  *unpacker
	pages   *hostmem.Mapping // for the largest gap; nil if there are no pages at all
	gap     Gap
}

func (s *Set) newGapReader() (_ *gapReader, err error) {
	r := &gapReader{frames: uint64(s.info.Frames())}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.unpack, err = newUnpacker(); err != nil {
		return nil, err
	}
	for i := range s.info.Siblings {
		file, err := s.open(siblingFile(i))
		if err != nil {
			return nil, err
		}
		r.files = append(r.files, file)
	}
	r.private = make([][]uint64, len(r.files))
	most := int64(0)
	for _, g := range s.info.Gaps {
		most = max(most, g.Changed)
	}
	if most > 0 {
		if r.pages, err = hostmem.MapAnonymous(units.Bytes(most) * units.PageSize); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *gapReader) close() {
	for _, f := range r.files {
		f.Close()
	}
	if r.unpack != nil {
		r.unpack.close()
	}
	if r.pages != nil {
		_ = r.pages.Close() // unmapping what was mapped does not fail
	}
}

// read reads the gap g into r.gap.
func (r *gapReader) read(g GapInfo) error {
	src := io.NewSectionReader(r.files[g.Sibling], g.Offset, g.Length)
	if err := r.unpack.begin(src, r.header(g)); err != nil {
		return err
	}
	return r.runs(g)
}

func (r *gapReader) header(g GapInfo) header {
	return header{kind: kindGap, frames: r.frames, sibling: uint64(g.Sibling), call: uint64(g.Call)}
}

// runs reads what follows the header.
func (r *gapReader) runs(g GapInfo) error {
	if r.private[g.Sibling] == nil {
		r.private[g.Sibling] = make([]uint64, (r.frames+63)/64)
	}
	r.gap = Gap{
		Sibling: g.Sibling, Call: g.Call, At: g.At,
		Frames: r.gap.Frames[:0], Changed: r.gap.Changed[:0], Gone: r.gap.Gone[:0],
	}
	for {
		o, start, n, err := r.unpack.record.run()
		if err != nil {
			return err
		}
		if o == opEnd {
			break
		}
		if err := r.run(g, o, start, n); err != nil {
			return err
		}
	}
	if int64(len(r.gap.Frames)) != g.Private || int64(len(r.gap.Changed)) != g.Changed || int64(len(r.gap.Gone)) != g.Gone {
		return fmt.Errorf("it has %d private pages, %d changed, %d gone, not %d, %d, %d",
			len(r.gap.Frames), len(r.gap.Changed), len(r.gap.Gone), g.Private, g.Changed, g.Gone)
	}
	known := 0
	for _, w := range r.private[g.Sibling] {
		known += bits.OnesCount64(w)
	}
	if known != len(r.gap.Frames) {
		return fmt.Errorf("it says nothing of %d frames that were private before", known-len(r.gap.Frames))
	}
	return nil
}

// run takes over one run of a gap.
func (r *gapReader) run(g GapInfo, o op, start, n uint64) error {
	private := r.private[g.Sibling]
	for f := start; f < start+n; f++ {
		word, bit := &private[f/64], uint64(1)<<(f%64)
		frame := units.Frame(f)
		switch {
		case o == opContent:
			at := int64(len(r.gap.Changed))
			if at == g.Changed {
				return fmt.Errorf("it has more than %d changed pages", g.Changed)
			}
			page := (*units.Page)(r.pages.Data[at*units.PageSize : (at+1)*units.PageSize])
			if err := r.unpack.record.page(page); err != nil {
				return err
			}
			r.gap.Changed = append(r.gap.Changed, Change{frame, page})
			r.gap.Frames = append(r.gap.Frames, frame)
			*word |= bit
		case *word&bit == 0:
			return fmt.Errorf("frame %d is unchanged or gone, but was not there before", f)
		case o == opSame:
			r.gap.Frames = append(r.gap.Frames, frame)
		default: // opGone
			r.gap.Gone = append(r.gap.Gone, frame)
			*word &^= bit
		}
	}
	return nil
}

// An unpacker reads records from zstd frames. One goroutine uses it.
type unpacker struct {
	zstd   *zstd.Decoder
	record *recordReader
}

func newUnpacker() (*unpacker, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(windowSize))
	if err != nil {
		return nil, fmt.Errorf("create decoder: %w", err)
	}
	return &unpacker{zstd: d, record: newRecordReader()}, nil
}

func (u *unpacker) begin(src io.Reader, want header) error {
	if err := u.zstd.Reset(src); err != nil {
		return err
	}
	return u.record.begin(u.zstd, want)
}

func (u *unpacker) close() { u.zstd.Close() }
