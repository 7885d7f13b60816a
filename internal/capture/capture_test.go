package capture

import (
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
	"pgregory.net/rapid"

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
