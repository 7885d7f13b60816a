package template

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/units"
)

// A tiny is a build of two pages of memory and four blocks of root image, at the step that makes the index.
type tiny struct {
	build *build
	image *guestmem.Image
	root  *os.File
}

// newTiny fills its memory and root image with seed.
func newTiny(t *testing.T, seed byte) *tiny {
	t.Helper()
	b := &build{temp: t.TempDir()}
	b.spec.Hardware.Memory = 4 * units.PageSize
	if err := os.Mkdir(b.out(), 0o700); err != nil {
		t.Fatal(err)
	}
	memory, root := make([]byte, 4*units.PageSize), make([]byte, 4*units.PageSize)
	memory[units.PageSize], root[2*units.PageSize] = seed, seed+1
	if err := errors.Join(os.WriteFile(b.outFile(memoryFile), memory, 0o600), os.WriteFile(b.outFile(rootFile), root, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := b.writeIndex(t.Context()); err != nil {
		t.Fatal(err)
	}
	image, err := guestmem.LoadImage(b.outFile(memoryFile), b.spec.Hardware.Memory)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = image.Close() })
	f, err := os.Open(b.outFile(rootFile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return &tiny{b, image, f}
}

// template is what Load would make of it; files are those its manifest names.
func (y *tiny) template(files ...string) *Template {
	m := Manifest{Name: "tiny", Files: map[string]FileSums{}}
	for _, f := range files {
		m.Files[f] = FileSums{}
	}
	return &Template{Manifest: m, dir: y.build.out()}
}

func TestTheLibraryOfATemplateIsTheSameReadOrMadeAnew(t *testing.T) {
	y := newTiny(t, 1)
	var all []map[library.ID]uint32
	for name, tmpl := range map[string]*Template{"with an index": y.template(indexFile), "built before there was one": y.template()} {
		l, err := tmpl.OpenLibrary(t.Context(), y.image, y.root)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, maps.Collect(l.All))
		for want, content := range map[library.ID]byte{1: 1, 4 + 2: 2} {
			page := &units.Page{content}
			if id, ok := l.Find(page, codec.Checksum(page)); !ok || id != want {
				t.Errorf("%s: page of %d: found %v as %d, want as %d", name, content, ok, id, want)
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(all[0]) != 2 || !maps.Equal(all[0], all[1]) {
		t.Errorf("the two libraries have %v and %v", all[0], all[1])
	}
}

func TestAnIndexThatDoesNotBelongMakesTheTemplateDamaged(t *testing.T) {
	for name, breakIt := range map[string]func(y *tiny) error{
		"of another template": func(y *tiny) error {
			return os.Rename(newTiny(t, 3).build.outFile(indexFile), y.build.outFile(indexFile))
		},
		"cut short": func(y *tiny) error { return os.Truncate(y.build.outFile(indexFile), 70) },
	} {
		y := newTiny(t, 1)
		if err := breakIt(y); err != nil {
			t.Fatal(err)
		}
		l, err := y.template(indexFile).OpenLibrary(t.Context(), y.image, y.root)
		if err == nil {
			_ = l.Close()
		}
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: got %v, want ErrDamaged", name, err)
			continue
		}
		for _, w := range []string{"tiny", filepath.Base(indexFile), "template build"} {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", name, err, w)
			}
		}
	}
}

func TestATemplateFromBeforeTheIndexStillLoads(t *testing.T) {
	s := testStore(t)
	addTemplate(t, s, "old", func(m *Manifest) {
		delete(m.Files, indexFile)
		if err := os.Remove(filepath.Join(s.folder("old"), indexFile)); err != nil {
			t.Fatal(err)
		}
	})
	if err := load(t, s, "old"); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(s.folder("old"), indexFile), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := load(t, s, "old"); !errors.Is(err, ErrDamaged) {
		t.Errorf("with an index its manifest does not know: got %v, want ErrDamaged", err)
	}
}
