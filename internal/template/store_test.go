package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

var testHost = HostFacts{QEMU: "7.2.22", CPU: "Some CPU 00000000"}

func testStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s.probe = func(context.Context) (HostFacts, error) { return testHost, nil }
	return s
}

// allFiles are those a build writes now.
var allFiles = append(slices.Clip(contentFiles), indexFile)

// addTemplate writes a small template as Build would; change edits the manifest before it is written.
func addTemplate(t *testing.T, s *Store, name string, change func(*Manifest)) {
	t.Helper()
	dir := s.folder(name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m := Manifest{
		Format: Format, Name: name, Created: time.Unix(1700000000, 5).UTC(), Input: "input", Host: testHost,
		Hardware: vmm.Hardware{Memory: 4 * units.MiB, VCPUs: 1, Accel: vmm.TCG, CPU: "max"}, Files: map[string]FileSums{},
	}
	for i, f := range allFiles {
		data := []byte(strings.Repeat(f, 5000)) // over several blocks
		if f == memoryFile || f == rootFile {
			data = make([]byte, smallFile+40<<10) // with a hole
			copy(data[5000:], f)
			copy(data[smallFile:], fmt.Sprint(i))
		}
		if err := os.WriteFile(filepath.Join(dir, f), data, 0o600); err != nil {
			t.Fatal(err)
		}
		sums, err := digestFile(t.Context(), filepath.Join(dir, f))
		if err != nil {
			t.Fatal(err)
		}
		m.Files[f] = sums
	}
	if change != nil {
		change(&m)
	}
	if err := m.write(dir); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, s *Store, name string) error {
	t.Helper()
	tmpl, err := s.Load(t.Context(), name)
	if err != nil {
		return err
	}
	return tmpl.Close()
}

func TestEveryKindOfDamageToEveryFileIsNamed(t *testing.T) {
	damages := map[string]func(path string) error{
		"one bit flipped": func(path string) error {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			data[len(data)/2] ^= 1
			return os.WriteFile(path, data, 0o600)
		},
		"one bit flipped and the old time set": func(path string) error {
			st, err := os.Stat(path)
			if err != nil {
				return err
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			var b [1]byte
			at := st.Size() * 2 / 3
			if _, err := f.ReadAt(b[:], at); err != nil {
				return err
			}
			b[0] ^= 0x10
			if _, err := f.WriteAt(b[:], at); err != nil {
				return err
			}
			return errors.Join(f.Close(), os.Chtimes(path, st.ModTime(), st.ModTime()))
		},
		"cut short": func(path string) error {
			st, err := os.Stat(path)
			if err != nil {
				return err
			}
			return os.Truncate(path, st.Size()-1)
		},
		"emptied": func(path string) error { return os.Truncate(path, 0) },
		"longer":  func(path string) error { return appendTo(path, "\n") },
		"deleted": os.Remove,
		"replaced by a link": func(path string) error {
			return errors.Join(os.Rename(path, path+".old"), os.Symlink(path+".old", path), os.Rename(path+".old", filepath.Join(filepath.Dir(filepath.Dir(path)), "elsewhere")))
		},
	}
	for _, file := range append([]string{manifestFile, sumFile}, allFiles...) {
		for what, damage := range damages {
			for _, seenBefore := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s, loaded before: %v", file, what, seenBefore), func(t *testing.T) {
					s := testStore(t)
					addTemplate(t, s, "x", nil)
					if seenBefore {
						if err := load(t, s, "x"); err != nil {
							t.Fatal(err)
						}
					}
					if err := damage(filepath.Join(s.folder("x"), file)); err != nil {
						t.Fatal(err)
					}
					err := load(t, s, "x")
					if !errors.Is(err, ErrDamaged) {
						t.Fatalf("got %v, want ErrDamaged", err)
					}
					if !strings.Contains(err.Error(), "manifest") && !strings.Contains(err.Error(), file) {
						t.Errorf("%q does not name %s", err, file)
					}
				})
			}
		}
	}
}

func appendTo(path, s string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(s)
	return errors.Join(err, f.Close())
}

func TestAnIntactTemplateLoadsAndHashesLargeFilesOnlyOnce(t *testing.T) {
	s := testStore(t)
	addTemplate(t, s, "x", nil)
	if err := load(t, s, "x"); err != nil {
		t.Fatal(err)
	}
	m, err := s.Inspect("x")
	if err != nil {
		t.Fatal(err)
	}
	remembered := s.readVerified(m)
	if len(remembered) != len(allFiles) {
		t.Errorf("%d files are remembered as verified, want %d", len(remembered), len(allFiles))
	}
	if err := load(t, s, "x"); err != nil {
		t.Errorf("second load: %v", err)
	}
}

func TestTemplatesThatDoNotFitAreRefusedWithTheReason(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Manifest)
		want   error
		words  string
	}{
		{"a future format", func(m *Manifest) { m.Format = 99 }, ErrFormat, "format 99"},
		{"another QEMU", func(m *Manifest) { m.Host.QEMU = "9.1.0" }, ErrOtherHost, "QEMU 9.1.0"},
		{"KVM on another CPU", func(m *Manifest) { m.Hardware.Accel, m.Host.CPU = vmm.KVM, "Other" }, ErrOtherHost, `"Other"`},
		{"the name of another", func(m *Manifest) { m.Name = "y" }, ErrDamaged, `"y"`},
		{"no root image in the manifest", func(m *Manifest) { delete(m.Files, rootFile) }, ErrDamaged, rootFile},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := testStore(t)
			addTemplate(t, s, "x", tt.change)
			err := load(t, s, "x")
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.words) {
				t.Errorf("got %v, want %v with %q in it", err, tt.want, tt.words)
			}
		})
	}
	t.Run("TCG on another CPU is fine", func(t *testing.T) {
		s := testStore(t)
		addTemplate(t, s, "x", func(m *Manifest) { m.Host.CPU = "Other" })
		if err := load(t, s, "x"); err != nil {
			t.Error(err)
		}
	})
	t.Run("a file that does not belong", func(t *testing.T) {
		s := testStore(t)
		addTemplate(t, s, "x", nil)
		if err := os.WriteFile(filepath.Join(s.folder("x"), "extra"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := load(t, s, "x"); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "extra") {
			t.Errorf("got %v, want ErrDamaged naming extra", err)
		}
	})
}

func TestNames(t *testing.T) {
	for name, good := range map[string]bool{
		"a": true, "tornado": true, "a-b_c.d": true, "0": true, strings.Repeat("a", 63): true,
		"": false, strings.Repeat("a", 64): false, ".": false, "..": false, ".tmp-x": false, "-x": false, "A": false, "a/b": false, "a b": false, "a~b": false, "ä": false, "a\n": false,
	} {
		if err := ValidName(name); (err == nil) != good || err != nil && !errors.Is(err, ErrBadName) {
			t.Errorf("%q: got %v, want good: %v", name, err, good)
		}
	}
}

func TestAWrongNameListsTheRightOnes(t *testing.T) {
	s := testStore(t)
	addTemplate(t, s, "one", nil)
	addTemplate(t, s, "two", nil)
	err := load(t, s, "tree")
	if !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "one, two") {
		t.Errorf("got %v, want ErrNotFound listing one, two", err)
	}
	if err := load(t, s, "tornado"); !strings.Contains(fmt.Sprint(err), "template build tornado") {
		t.Errorf("got %v, want how to build the built-in template", err)
	}
	if err := load(t, s, "../x"); !errors.Is(err, ErrBadName) {
		t.Errorf("got %v, want ErrBadName", err)
	}
}

func TestATemplateInUseIsNotRemoved(t *testing.T) {
	s := testStore(t)
	addTemplate(t, s, "x", nil)
	other, err := Open(s.dir) // another process, as far as locks go
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := s.Load(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Remove("x"); !errors.Is(err, ErrInUse) {
		t.Errorf("remove while loaded: got %v, want ErrInUse", err)
	}
	if err := load(t, s, "x"); err != nil {
		t.Errorf("a second load beside the first: %v", err)
	}
	if err := tmpl.Close(); err != nil {
		t.Fatal(err)
	}
	if err := other.Remove("x"); err != nil {
		t.Errorf("remove after close: %v", err)
	}
	if err := load(t, s, "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("load after remove: got %v, want ErrNotFound", err)
	}
	if left, err := os.ReadDir(s.templates()); err != nil || len(left) != 0 {
		t.Errorf("left in the store: %v, %v", left, err)
	}
}

func TestHalfWrittenTemplatesAreInvisibleAndSwept(t *testing.T) {
	s := testStore(t)
	addTemplate(t, s, "a", nil)
	for _, d := range []string{tempPrefix("a") + "1", tempPrefix("a-b") + "2"} {
		if err := os.MkdirAll(filepath.Join(s.templates(), d, "out"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	list, err := s.List()
	if err != nil || len(list) != 1 || list[0].Name != "a" || list[0].Err != nil {
		t.Fatalf("list: %+v, %v; want a alone", list, err)
	}
	building, err := tryLockFile(s.lockOf("a-b")) // somebody builds a-b
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if err := building.Close(); err != nil {
		t.Fatal(err)
	}
	var left []string
	entries, err := os.ReadDir(s.templates())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if diff := cmp.Diff([]string{tempPrefix("a-b") + "2", "a"}, left); diff != "" {
		t.Errorf("folders after sweep (-want +got):\n%s", diff)
	}
}

func TestTheDigestDoesNotDependOnHoles(t *testing.T) {
	dense, sparse := filepath.Join(t.TempDir(), "dense"), filepath.Join(t.TempDir(), "sparse")
	data := make([]byte, 3<<20+100)
	copy(data[2<<20+4090:], "across a block's edge")
	if err := os.WriteFile(dense, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(sparse)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("across a block's edge"), 2<<20+4090)
	if err := errors.Join(err, f.Truncate(int64(len(data))), f.Close()); err != nil {
		t.Fatal(err)
	}
	a, err := digestFile(t.Context(), dense)
	if err != nil {
		t.Fatal(err)
	}
	b, err := digestFile(t.Context(), sparse)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("digests (-dense +sparse):\n%s", diff)
	}
}
