package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A held is what a sibling holds at one gap.
type held map[units.Frame]units.Page

func (h held) pages(visit func(units.Frame, *units.Page) error) error {
	for _, f := range slices.Sorted(maps.Keys(h)) {
		p := h[f]
		if err := visit(f, &p); err != nil {
			return err
		}
	}
	return nil
}

// pageOf is a page that depends on n.
func pageOf(n int) (p units.Page) {
	copy(p[:], strings.Repeat(fmt.Sprintf("content %d; ", n), 200))
	return p
}

const testFrames = 200

// testTemplate makes a template: every third page of memory has content, and a root image
// that ends within a page.
func testTemplate(t testing.TB) (*guestmem.Image, *os.File) {
	t.Helper()
	im, err := guestmem.NewImage(testFrames * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { im.Close() })
	for f := 0; f < testFrames; f += 3 {
		p := pageOf(f)
		if _, err := im.File().WriteAt(p[:], units.Frame(f).Offset()); err != nil {
			t.Fatal(err)
		}
	}
	if err := im.Seal(); err != nil {
		t.Fatal(err)
	}
	root, err := os.Create(filepath.Join(t.TempDir(), "root"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	if _, err := root.WriteAt([]byte("the end"), 300*units.PageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := root.WriteAt([]byte("a block"), 7*units.PageSize+100); err != nil {
		t.Fatal(err)
	}
	return im, root
}

func testInfo(siblings int) Info {
	i := Info{Tool: "test", Source: "none", Template: Template{Name: "t", Digest: "d"}, Machine: Machine{CPU: "c", Cores: 2}}
	for k := range siblings {
		i.Siblings = append(i.Siblings, Sibling{Name: fmt.Sprintf("s%d", k+1), Trajectory: "x"})
	}
	return i
}

// history is what each sibling held, gap by gap.
type history [][]held

// small is the capture of the golden folder and of the tests of damage.
func small() history {
	a, b := pageOf(1001), pageOf(1002)
	return history{
		{{1: a, 2: a, 3: b, 90: {}}, {1: a, 3: a, 4: b, 90: {}}, {}, {199: b}},
		{{}, {0: b}},
	}
}

// write captures h into dir. Gaps of all siblings take turns, a millisecond apart.
func write(t testing.TB, dir string, h history) Info {
	t.Helper()
	w, err := Create(dir, testInfo(len(h)))
	if err != nil {
		t.Fatal(err)
	}
	im, root := testTemplate(t)
	if err := w.Template(t.Context(), im, root); err != nil {
		t.Fatal(err)
	}
	at := time.Duration(0)
	for call := 1; ; call++ {
		some := false
		for s, gaps := range h {
			if call > len(gaps) {
				continue
			}
			some, at = true, at+time.Millisecond
			if _, err := w.Gap(GapInfo{Sibling: s, Call: call, Command: "true", Start: at - 500, End: at - 100, At: at}, gaps[call-1].pages); err != nil {
				t.Fatal(err)
			}
		}
		if !some {
			break
		}
	}
	info, err := w.Commit()
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// replay reads a capture back by applying its changes, and checks each gap on the way.
func replay(t interface{ Fatalf(string, ...any) }, s *Set, siblings int) history {
	got := make(history, siblings)
	now := make([]held, siblings)
	last := time.Duration(-1)
	err := s.Gaps(func(g Gap) error {
		if g.At < last {
			t.Fatalf("a gap at %v after one at %v", g.At, last)
		}
		last = g.At
		if now[g.Sibling] == nil {
			now[g.Sibling] = held{}
		}
		h := now[g.Sibling]
		for _, f := range g.Gone {
			if _, ok := h[f]; !ok {
				t.Fatalf("frame %d is gone, but was not there", f)
			}
			delete(h, f)
		}
		for _, c := range g.Changed {
			if old, ok := h[c.Frame]; ok && old == *c.Page {
				t.Fatalf("frame %d has not changed", c.Frame)
			}
			h[c.Frame] = *c.Page
		}
		if d := cmp.Diff(slices.Sorted(maps.Keys(h)), g.Frames, cmp.Transformer("none", func(f []units.Frame) []units.Frame { return append([]units.Frame{}, f...) })); d != "" {
			t.Fatalf("private frames (-want +got):\n%s", d)
		}
		got[g.Sibling] = append(got[g.Sibling], maps.Clone(h))
		return nil
	})
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return got
}

func TestWhatIsWrittenIsReadBack(t *testing.T) {
	parent := t.TempDir()
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		page := rapid.Custom(func(t *rapid.T) units.Page {
			if k := rapid.IntRange(0, 5).Draw(t, "page"); k > 0 {
				return pageOf(k)
			}
			return units.Page{}
		})
		frames := rapid.OneOf(rapid.Uint32Range(0, testFrames-1), rapid.Uint32Range(0, 7), rapid.Just(uint32(testFrames-1)))
		h := make(history, rapid.IntRange(1, 3).Draw(rt, "siblings"))
		for i := range h {
			for range rapid.IntRange(0, 4).Draw(rt, "gaps") {
				g := held{}
				for f, p := range rapid.MapOfN(frames, page, 0, 100).Draw(rt, "pages") {
					g[units.Frame(f)] = p
				}
				h[i] = append(h[i], g)
			}
		}
		n++
		dir := filepath.Join(parent, fmt.Sprint(n))
		wrote := write(t, dir, h)
		s, err := Open(dir)
		if err != nil {
			rt.Fatal(err)
		}
		if d := cmp.Diff(wrote, s.Info(), equateEmpty); d != "" {
			rt.Fatalf("info (-written +read):\n%s", d)
		}
		if d := cmp.Diff(h, replay(rt, s, len(h)), wholePages); d != "" {
			rt.Fatalf("pages (-written +read):\n%s", d)
		}
		if d := cmp.Diff(h[:1], replay(rt, s.First(1), 1), wholePages); d != "" {
			rt.Fatalf("pages of the first sibling (-written +read):\n%s", d)
		}
		os.RemoveAll(dir)
	})
}

// wholePages compares pages as such: byte by byte takes most of a test's time.
var wholePages = cmp.Comparer(func(a, b units.Page) bool { return a == b })

var equateEmpty = cmp.Transformer("empty", func(g []GapInfo) []GapInfo { return append([]GapInfo{}, g...) })

func TestTheTemplateIsReadBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	write(t, dir, small())
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	im, root := testTemplate(t)
	got, err := s.Image()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	for f := range units.Frame(testFrames) {
		a, b := im.Page(f), got.Page(f)
		if (a == nil) != (b == nil) || a != nil && *a != *b {
			t.Fatalf("frame %d of memory differs", f)
		}
	}
	gotRoot, err := s.Root()
	if err != nil {
		t.Fatal(err)
	}
	defer gotRoot.Close()
	const size = 300*units.PageSize + 7
	a, b := make([]byte, size+1), make([]byte, size+1)
	n, _ := root.ReadAt(a, 0)
	m, _ := gotRoot.ReadAt(b, 0)
	if n != size || m != size || string(a) != string(b) {
		t.Fatalf("root image differs: %d and %d bytes", n, m)
	}
	if _, err := gotRoot.WriteAt([]byte{1}, 0); err == nil {
		t.Error("the root image can be changed")
	}
}

func TestGapsEndsWithTheErrorOfItsCaller(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	write(t, dir, small())
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	stop := errors.New("enough")
	calls := 0
	if err := s.Gaps(func(Gap) error { calls++; return stop }); !errors.Is(err, stop) || errors.Is(err, ErrDamaged) || calls != 1 {
		t.Errorf("got %v after %d gaps", err, calls)
	}
}

// left lists what is in a folder.
func left(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestAFullDiskLeavesNothing(t *testing.T) {
	// Creating writes nothing; the template is two frames of zstd, a gap of small() one, capture.json the last.
	for after := range 9 {
		parent := t.TempDir()
		w, err := Create(filepath.Join(parent, "c"), testInfo(2))
		if err != nil {
			t.Fatal(err)
		}
		if err := fault.Arm("capture.write", after, unix.ENOSPC); err != nil {
			t.Fatal(err)
		}
		im, root := testTemplate(t)
		err = w.Template(t.Context(), im, root)
		for i := 1; i <= 4 && err == nil; i++ {
			_, err = w.Gap(GapInfo{Call: i, At: time.Duration(i)}, small()[0][i-1].pages)
		}
		if err == nil {
			_, err = w.Commit()
		} else if _, cerr := w.Commit(); cerr == nil {
			t.Fatalf("after %d writes: committed in spite of %v", after, err)
		}
		if after < 7 && !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("after %d writes: %v, want ENOSPC", after, err)
		}
		fault.Disarm("capture.write")
		if err != nil && len(left(t, parent)) != 0 {
			t.Fatalf("after %d writes %v is left", after, left(t, parent))
		}
	}
}

func TestARealFullDiskIsNamed(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("mount a small tmpfs: %v (root is needed)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	w, err := Create(filepath.Join(dir, "c"), testInfo(1))
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Gap(GapInfo{Call: 1}, func(visit func(units.Frame, *units.Page) error) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "template must be captured before") {
		t.Errorf("a gap before the template: %v", err)
	}
	if err := w.Abort(); err != nil || len(left(t, dir)) != 0 {
		t.Fatalf("abort: %v, left %v", err, left(t, dir))
	}
	if w, err = Create(filepath.Join(dir, "c"), testInfo(1)); err != nil {
		t.Fatal(err)
	}
	im, root := testTemplate(t)
	if err := w.Template(t.Context(), im, root); err != nil {
		t.Fatal(err)
	}
	_, err = w.Gap(GapInfo{Call: 1}, noise)
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("got %v, want no space left on device", err)
	}
	if _, err := w.Commit(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("commit: %v, want the first error", err)
	}
	if len(left(t, dir)) != 0 {
		t.Errorf("left %v", left(t, dir))
	}
}

// noise are pages that do not shrink.
func noise(visit func(units.Frame, *units.Page) error) error {
	x := uint64(88172645463325252)
	var p units.Page
	for f := range units.Frame(testFrames) {
		for i := range p {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			p[i] = byte(x)
		}
		if err := visit(f, &p); err != nil {
			return err
		}
	}
	return nil
}

func TestACaptureAppearsWholeOrNotAtAll(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "c")
	w, err := Create(dir, testInfo(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "agentzip capture") {
		t.Errorf("open too early: %v", err)
	}
	im, root := testTemplate(t)
	if err := w.Template(t.Context(), im, root); err != nil {
		t.Fatal(err)
	}
	// Another one of the same name leaves the first one's files alone, and loses.
	other, err := Create(dir, testInfo(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Template(t.Context(), im, root); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(); err != nil {
		t.Fatal(err)
	}
	if _, err := other.Commit(); !errors.Is(err, ErrExists) {
		t.Errorf("the second of a name: %v, want ErrExists", err)
	}
	if err := w.Abort(); err != nil {
		t.Error(err)
	}
	if _, err := w.Gap(GapInfo{Call: 1}, held{}.pages); err == nil {
		t.Error("a gap was taken after Commit")
	}
	if d := cmp.Diff([]string{"c"}, left(t, parent)); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
	if _, err := Create(dir, testInfo(1)); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("a name that is taken: %v", err)
	}
	if _, err := Open(dir); err != nil {
		t.Error(err)
	}
}

func TestWhatADeadProcessLeftIsSwept(t *testing.T) {
	parent := t.TempDir()
	for _, name := range []string{".c.tmp-123", ".d.tmp-123", ".c.tmpfile"} {
		if err := os.Mkdir(filepath.Join(parent, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w, err := Create(filepath.Join(parent, "c"), testInfo(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Abort(); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{".c.tmpfile", ".d.tmp-123"}, left(t, parent)); d != "" {
		t.Errorf("left (-want +got):\n%s", d)
	}
}

func TestATemplateIsNotWrittenToItsEndWhenInterrupted(t *testing.T) {
	w, err := Create(filepath.Join(t.TempDir(), "c"), testInfo(1))
	if err != nil {
		t.Fatal(err)
	}
	interrupted := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(interrupted)
	im, root := testTemplate(t)
	if err := w.Template(ctx, im, root); !errors.Is(err, interrupted) {
		t.Errorf("got %v, want the interruption", err)
	}
	if _, err := w.Commit(); err == nil {
		t.Error("a capture without a template was completed")
	}
}

func TestMisuseOfAWriterIsRefused(t *testing.T) {
	for name, try := range map[string]func(w *Writer) error{
		"a sibling that does not exist": func(w *Writer) error {
			_, err := w.Gap(GapInfo{Sibling: 2, Call: 1}, held{}.pages)
			return err
		},
		"a call out of order": func(w *Writer) error {
			_, err := w.Gap(GapInfo{Call: 2}, held{}.pages)
			_, err2 := w.Gap(GapInfo{Call: 2}, held{}.pages)
			return errors.Join(err2, err)
		},
		"a frame beyond the end": func(w *Writer) error {
			_, err := w.Gap(GapInfo{Call: 1}, held{testFrames: {}}.pages)
			return err
		},
		"frames out of order": func(w *Writer) error {
			_, err := w.Gap(GapInfo{Call: 1}, func(visit func(units.Frame, *units.Page) error) error {
				return errors.Join(visit(3, &units.Page{}), visit(3, &units.Page{}))
			})
			return err
		},
	} {
		w, err := Create(filepath.Join(t.TempDir(), "c"), testInfo(2))
		if err != nil {
			t.Fatal(err)
		}
		im, root := testTemplate(t)
		if err := w.Template(t.Context(), im, root); err != nil {
			t.Fatal(err)
		}
		if err := try(w); err == nil {
			t.Errorf("%s was accepted", name)
		}
		if _, err := w.Commit(); err == nil {
			t.Errorf("%s: the capture was completed", name)
		}
	}
	if _, err := Create(filepath.Join(t.TempDir(), "c"), Info{}); err == nil {
		t.Error("a capture of nobody was begun")
	}
}

func TestLongCommandsAreCutBetweenCharacters(t *testing.T) {
	long := strings.Repeat("a", maxText-1) + "äöü"
	if got := cut(long); got != strings.Repeat("a", maxText-1) {
		t.Errorf("got %d bytes ending in %q", len(got), got[len(got)-4:])
	}
}

func TestTheDescriptionIsJSONForOthersToo(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	write(t, dir, small())
	data, err := os.ReadFile(filepath.Join(dir, "capture.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Gaps []struct{ Sibling, Call, Private, Changed, Gone int }
	}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(got.Gaps)
	want := "[{0 1 4 4 0} {1 1 0 0 0} {0 2 4 2 1} {1 2 1 1 0} {0 3 0 0 4} {0 4 1 1 0}]"
	if text != want {
		t.Errorf("gaps %s, want %s", text, want)
	}
}
