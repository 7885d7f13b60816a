package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

type entry struct {
	name string
	kind byte
	link string
	data string
	mode int64
	size int64 // when it should lie
}

func file(name, data string) entry {
	return entry{name: name, kind: tar.TypeReg, data: data, mode: 0o644}
}
func dir(name string) entry { return entry{name: name, kind: tar.TypeDir, mode: 0o755} }
func symlink(name, target string) entry {
	return entry{name: name, kind: tar.TypeSymlink, link: target}
}

func hardlink(name, target string) entry {
	return entry{name: name, kind: tar.TypeLink, link: target}
}

func makeTar(tb testing.TB, entries ...entry) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		size := int64(len(e.data))
		if e.size != 0 {
			size = e.size
		}
		hdr := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: size, Format: tar.FormatPAX}
		if err := w.WriteHeader(hdr); err != nil {
			tb.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil && len(entries) > 0 && entries[len(entries)-1].size == 0 {
		tb.Fatal(err)
	}
	return append(b.Bytes(), make([]byte, 1024)...)
}

func newTestTree(t *testing.T) (*Tree, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: owners are kept")
	}
	outside := t.TempDir()
	tree, err := NewTree(filepath.Join(outside, "tree"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tree.Close() })
	return tree, outside
}

// listing describes a tree: "name", "name/" for folders, "name -> target" for links.
func listing(t *testing.T, top string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == top {
			return err
		}
		rel, err := filepath.Rel(top, p)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir():
			rel += "/"
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			rel += " -> " + target
		default:
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			rel += "=" + string(data)
		}
		list = append(list, rel)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestHostileArchivesAreRefusedAndWriteNothingOutside(t *testing.T) {
	small := Limits{Bytes: 64 * units.KiB, Files: 20}
	many := make([]entry, 30)
	for i := range many {
		many[i] = file("f"+strings.Repeat("x", i), "")
	}
	tests := []struct {
		name    string
		entries []entry
		want    error
	}{
		{"a name that climbs out", []entry{file("../evil", "x")}, ErrUnsafe},
		{"a name that climbs out after going in", []entry{file("a/../../evil", "x")}, ErrUnsafe},
		{"a hard link to a file outside", []entry{hardlink("passwd", "../../../../etc/passwd")}, ErrUnsafe},
		{"a hard link to an absolute file that the image lacks", []entry{hardlink("x", "/etc/hostname")}, ErrUnsafe},
		{"a hard link to a folder", []entry{dir("d"), hardlink("x", "d")}, ErrUnsafe},
		{"a block device", []entry{{name: "disk", kind: tar.TypeBlock}}, ErrUnsafe},
		{"a character device in a folder called like dev", []entry{{name: "device/mem", kind: tar.TypeChar}}, ErrUnsafe},
		{"a file that claims a terabyte", []entry{{name: "big", kind: tar.TypeReg, size: 1 << 40}}, ErrTooLarge},
		{"files that are too much together", []entry{file("a", strings.Repeat("a", 40<<10)), file("b", strings.Repeat("b", 40<<10))}, ErrTooLarge},
		{"too many files", many, ErrTooLarge},
		{"a loop of links in a folder name", []entry{symlink("a", "b"), symlink("b", "a"), file("a/x", "x")}, ErrUnsafe},
		{"a removal mark for the parent", []entry{file("a/.wh...", "")}, ErrUnsafe},
		{"a removal mark without a name", []entry{file("a/.wh.", "")}, ErrUnsafe},
		{"a root that is a link", []entry{symlink(".", "/")}, ErrUnsafe},
		{"an unknown kind of entry", []entry{{name: "x", kind: 'Z'}}, ErrUnsafe},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tree, outside := newTestTree(t)
			data := makeTar(t, tt.entries...)
			err := newUnpacker(tree, small, true).apply(t.Context(), bytes.NewReader(data))
			if !errors.Is(err, tt.want) {
				t.Errorf("got error %v, want %v", err, tt.want)
			}
			if got := listing(t, outside); !allBelow(got, "tree/") {
				t.Errorf("something was written outside the tree: %q", got)
			}
		})
	}
}

func allBelow(list []string, prefix string) bool {
	return !slices.ContainsFunc(list, func(s string) bool { return !strings.HasPrefix(s, prefix) })
}

func TestLinksAreFollowedInsideTheTreeOnly(t *testing.T) {
	tree, outside := newTestTree(t)
	data := makeTar(t,
		symlink("abs", "/etc"), file("abs/one", "1"), // an absolute target starts at the tree's root
		symlink("up", "../../../../.."), file("up/two", "2"), // ".." stops at the root
		symlink("bin", "usr/bin"), file("bin/sh", "sh"),
		symlink("leaf", "/outside"), file("leaf", "replaced"), // a link in the last part is replaced, not followed
		symlink("gone", "/nowhere"), hardlink("linked", "bin/sh"),
	)
	if err := newUnpacker(tree, DefaultLimits, true).apply(t.Context(), bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"tree/", "tree/abs -> /etc", "tree/bin -> usr/bin", "tree/etc/", "tree/etc/one=1", "tree/gone -> /nowhere", "tree/leaf=replaced",
		"tree/linked=sh", "tree/two=2", "tree/up -> ../../../../..", "tree/usr/", "tree/usr/bin/", "tree/usr/bin/sh=sh",
	}
	if diff := cmp.Diff(want, listing(t, outside)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

func TestLaterLayersReplaceAndRemoveWhatEarlierOnesMade(t *testing.T) {
	tree, outside := newTestTree(t)
	layers := [][]entry{
		{dir("a"), file("a/keep", "1"), file("a/drop", "1"), dir("b"), file("b/old", "1"), dir("b/sub"), file("b/sub/x", "1"), file("c", "1"), symlink("l", "a")},
		{
			file("a/.wh.drop", ""), file("b/new", "2"), file("b/.wh..wh..opq", ""), // the mark comes after what it must spare
			dir("c"), file("c/now-a-folder", "2"), dir("l"), file("l/not-in-a", "2"), file("a/.wh..wh.plnk", ""), file("new/.wh.never", ""),
		},
	}
	u := newUnpacker(tree, DefaultLimits, true)
	for _, l := range layers {
		if err := u.apply(t.Context(), bytes.NewReader(makeTar(t, l...))); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"tree/", "tree/a/", "tree/a/keep=1", "tree/b/", "tree/b/new=2", "tree/c/", "tree/c/now-a-folder=2", "tree/l/", "tree/l/not-in-a=2",
	}
	if diff := cmp.Diff(want, listing(t, outside)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

func TestOwnersAndSpecialBitsAreKept(t *testing.T) {
	tree, _ := newTestTree(t)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Name: "su", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 7, Gid: 8},
		{Name: "tmp", Typeflag: tar.TypeDir, Mode: 0o1777},
		{Name: "dev/null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := newUnpacker(tree, DefaultLimits, false).apply(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	su, err := tree.Lstat("su")
	if err != nil {
		t.Fatal(err)
	}
	if want := 0o755 | fs.ModeSetuid; su.Mode() != want {
		t.Errorf("mode of su: got %v, want %v", su.Mode(), want)
	}
	if tmp, err := tree.Lstat("tmp"); err != nil || tmp.Mode()&fs.ModeSticky == 0 {
		t.Errorf("tmp: %v, %v; want the sticky bit", tmp, err)
	}
	if tree.Exists("dev/null") {
		t.Error("a device node was made below dev")
	}
}

func TestUnpackingStopsWithItsContext(t *testing.T) {
	tree, _ := newTestTree(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := newUnpacker(tree, DefaultLimits, false).apply(ctx, bytes.NewReader(makeTar(t, file("a", "a"))))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func FuzzUnpack(f *testing.F) {
	if os.Geteuid() != 0 {
		f.Skip("needs root")
	}
	f.Add(makeTar(f, file("a/b", "x"), symlink("l", "/a"), file("l/c", "y"), hardlink("h", "a/b"), file(".wh.a", "")))
	f.Add(makeTar(f, file("../x", "x")))
	f.Fuzz(func(t *testing.T, data []byte) {
		tree, outside := newTestTree(t)
		_ = newUnpacker(tree, Limits{Bytes: units.MiB, Files: 100}, true).apply(t.Context(), bytes.NewReader(data))
		entries, err := os.ReadDir(outside)
		if err != nil || len(entries) != 1 {
			t.Fatalf("outside the tree: %v, %v", entries, err)
		}
	})
}
