package capture

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/units"
)

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
