package capture

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/units"
)

// writePoint fails a write of compressed bytes, as a full disk does.
var writePoint = fault.NewPoint("capture.write")

// packers is how many gaps are compressed at once. More would take the cores from the guests
// that still run, and 10 MB each.
const packers = 2

// Pages calls visit with frames and their content in ascending order and ends with its
// error. Content is valid until visit returns.
type Pages = func(visit func(units.Frame, *units.Page) error) error

// A Writer makes a capture. Call Template once, then Gap, then Commit or Abort.
type Writer struct {
	dir, tmp string           // immutable; the final and the present name
	lock     *os.File         // immutable; tmp, locked while this Writer lives
	started  time.Time        // immutable
	idle     chan *packer     // packers that nobody uses
	siblings []*siblingWriter // immutable; each owned by the goroutine that calls Gap for it

	mu     sync.Mutex
	info   Info  // guarded by mu
	failed error // guarded by mu; the first error: the capture cannot be completed
	closed bool  // guarded by mu
}

// A siblingWriter is what is known of one sibling's gap before.
type siblingWriter struct {
	file   *os.File
	offset int64
	before []kept // ascending
	now    []kept // scratch: what the gap under way found
	call   int
}

// kept is a private frame and its content in brief. 128 bits of SHA-256: a page that changed
// and looks unchanged would need a collision.
type kept struct {
	frame units.Frame
	sum   [16]byte
}

// A packer compresses one record at a time.
type packer struct {
	record *recordWriter
	zstd   *zstd.Encoder
}

func newPacker() (*packer, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(windowSize))
	if err != nil {
		return nil, fmt.Errorf("create encoder: %w", err)
	}
	return &packer{record: newRecordWriter(), zstd: enc}, nil
}

// windowSize is zstd's window: what writer and reader must each keep of a record.
const windowSize = 8 << 20

// Create begins a capture that will be the folder dir. Nothing may have that name yet
// (ErrExists). What an earlier process that died left beside it is removed.
func Create(dir string, info Info) (_ *Writer, err error) {
	if n := len(info.Siblings); n == 0 || n > maxSiblings {
		return nil, fmt.Errorf("create capture: %d siblings, want 1 to %d", n, maxSiblings)
	}
	dir = filepath.Clean(dir)
	if _, err := os.Lstat(dir); err == nil {
		return nil, fmt.Errorf("create capture: %s %w: remove it, or choose another name", dir, ErrExists)
	}
	sweep(dir)
	tmp, err := os.MkdirTemp(filepath.Dir(dir), tmpPrefix(dir)+"*")
	if err != nil {
		return nil, fmt.Errorf("create capture: %w", err)
	}
	w := &Writer{dir: dir, tmp: tmp, started: time.Now(), info: info, idle: make(chan *packer, packers)}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("create capture: %w", err), w.Abort())
		}
	}()
	w.info.Format, w.info.Created = Format, w.started.UTC()
	w.info.Gaps, w.info.Memory, w.info.Root = nil, Content{}, Content{}
	if w.lock, err = os.Open(tmp); err != nil {
		return nil, err
	}
	if err := unix.Flock(int(w.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s: %w", tmp, err)
	}
	for range packers {
		p, err := newPacker()
		if err != nil {
			return nil, err
		}
		w.idle <- p
	}
	for i := range info.Siblings {
		f, err := w.create(siblingFile(i))
		if err != nil {
			return nil, err
		}
		w.siblings = append(w.siblings, &siblingWriter{file: f})
	}
	return w, nil
}

func tmpPrefix(dir string) string { return "." + filepath.Base(dir) + ".tmp-" }

// sweep removes half-made captures of dir whose process is gone. What cannot be removed is
// left: it is in nobody's way.
func sweep(dir string) {
	left, err := filepath.Glob(filepath.Join(filepath.Dir(dir), tmpPrefix(dir)+"*"))
	if err != nil {
		return
	}
	for _, path := range left {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(path)
		}
		f.Close()
	}
}

func (w *Writer) create(name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(w.tmp, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
}

// Gap writes what a sibling holds after a call. g wants Sibling, Call, Command, Start, End
// and At; the result has the counts too. Calls of one sibling come in order, one at a time;
// pages is called before Gap returns. After an error the capture cannot be completed.
func (w *Writer) Gap(g GapInfo, pages Pages) (GapInfo, error) {
	g, err := w.gap(g, pages)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		if w.failed == nil {
			w.failed = err
		}
		return g, err
	}
	w.info.Gaps = append(w.info.Gaps, g)
	return g, nil
}

func (w *Writer) gap(g GapInfo, pages Pages) (GapInfo, error) {
	if err := w.usable(); err != nil {
		return g, err
	}
	if g.Sibling < 0 || g.Sibling >= len(w.siblings) {
		return g, fmt.Errorf("capture a gap: no sibling %d", g.Sibling)
	}
	s := w.siblings[g.Sibling]
	if g.Call <= s.call {
		return g, fmt.Errorf("capture a gap of sibling %d: call %d after call %d", g.Sibling, g.Call, s.call)
	}
	w.mu.Lock()
	frames := uint64(w.info.Frames())
	w.mu.Unlock()
	if frames == 0 {
		return g, errors.New("capture a gap: the template must be captured before")
	}
	g.Command = cut(g.Command)
	g.Private, g.Changed, g.Gone = 0, 0, 0
	p := <-w.idle
	defer func() { w.idle <- p }()
	out := &counter{w: s.file}
	h := header{kind: kindGap, frames: frames, sibling: uint64(g.Sibling), call: uint64(g.Call)}
	err := p.pack(out, h, func(r *recordWriter) error { return s.compare(r, &g, frames, pages) })
	if err != nil {
		return g, fmt.Errorf("capture the gap of sibling %d after call %d: %w", g.Sibling, g.Call, err)
	}
	g.Offset, g.Length = s.offset, out.n
	s.offset += out.n
	s.call = g.Call
	s.before, s.now = s.now, s.before
	return g, nil
}

// compare writes the runs of a gap: pages against those of the gap before.
func (s *siblingWriter) compare(r *recordWriter, g *GapInfo, frames uint64, pages Pages) error {
	s.now = s.now[:0]
	before := s.before
	goneUpTo := func(end uint64) error {
		for len(before) > 0 && uint64(before[0].frame) < end {
			if err := r.add(opGone, before[0].frame, nil); err != nil {
				return err
			}
			before = before[1:]
			g.Gone++
		}
		return nil
	}
	err := pages(func(f units.Frame, page *units.Page) error {
		if uint64(f) >= frames || len(s.now) > 0 && f <= s.now[len(s.now)-1].frame {
			return fmt.Errorf("frame %d of %d is out of order", f, frames)
		}
		if err := goneUpTo(uint64(f)); err != nil {
			return err
		}
		sum := sha256.Sum256(page[:])
		k := kept{frame: f, sum: [16]byte(sum[:16])}
		s.now = append(s.now, k)
		g.Private++
		same := len(before) > 0 && before[0] == k
		if len(before) > 0 && before[0].frame == f {
			before = before[1:]
		}
		if same {
			return r.add(opSame, f, nil)
		}
		g.Changed++
		return r.add(opContent, f, page)
	})
	if err != nil {
		return err
	}
	return goneUpTo(frames)
}

// pack writes one record as a zstd frame.
func (p *packer) pack(out io.Writer, h header, body func(*recordWriter) error) error {
	p.zstd.Reset(out)
	err := p.record.begin(p.zstd, h)
	if err == nil {
		err = body(p.record)
	}
	if err == nil {
		err = p.record.end()
	}
	if err != nil {
		p.zstd.Reset(nil) // drops what was not written
		return err
	}
	return p.zstd.Close()
}

// counter counts what reaches a file.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	if err := writePoint.Err(); err != nil {
		return 0, fmt.Errorf("write capture: %w", err)
	}
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// cut shortens a command to what Info holds.
func cut(s string) string {
	if len(s) <= maxText {
		return s
	}
	n := maxText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

func (w *Writer) usable() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.failed != nil:
		return w.failed
	case w.closed:
		return errors.New("the capture is closed")
	}
	return nil
}

// Commit completes the capture: its folder appears under its final name. After an error
// nothing of it is left.
func (w *Writer) Commit() (info Info, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("complete capture %s: %w", w.dir, err), w.Abort())
		}
	}()
	if err := w.usable(); err != nil {
		return Info{}, err
	}
	w.mu.Lock()
	w.info.Wall = time.Since(w.started)
	sortGaps(w.info.Gaps)
	info = w.info
	w.mu.Unlock()
	if err := info.check(); err != nil {
		return Info{}, err // without a template, say
	}
	data, err := json.MarshalIndent(info, "", " ")
	if err != nil {
		return Info{}, err
	}
	if err := w.writeFile(infoFile, append(data, '\n')); err != nil {
		return Info{}, err
	}
	for _, s := range w.siblings {
		if err := s.file.Sync(); err != nil {
			return Info{}, err
		}
	}
	if err := os.Chmod(w.tmp, 0o755); err != nil {
		return Info{}, err
	}
	if err := w.lock.Sync(); err != nil {
		return Info{}, err
	}
	err = unix.Renameat2(unix.AT_FDCWD, w.tmp, unix.AT_FDCWD, w.dir, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		return Info{}, fmt.Errorf("%s %w: somebody made it meanwhile", w.dir, ErrExists)
	}
	if err != nil {
		return Info{}, os.NewSyscallError("rename", err)
	}
	w.close()
	return info, nil
}

func (w *Writer) writeFile(name string, data []byte) error {
	f, err := w.create(name)
	if err != nil {
		return err
	}
	_, err = (&counter{w: f}).Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Abort removes what was written. After Commit it does nothing; it may be called again.
//
// Preconditions: no Gap is under way.
func (w *Writer) Abort() error {
	if !w.close() {
		return nil
	}
	if err := os.RemoveAll(w.tmp); err != nil {
		return fmt.Errorf("remove half-made capture: %w", err)
	}
	return nil
}

// close closes the files; false if it was done before.
func (w *Writer) close() bool {
	w.mu.Lock()
	first := !w.closed
	w.closed = true
	w.mu.Unlock()
	if !first {
		return false
	}
	for _, s := range w.siblings {
		s.file.Close()
	}
	if w.lock != nil {
		w.lock.Close()
	}
	return true
}
