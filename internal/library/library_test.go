package library

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/units"
)

// forge returns a page other than p with the same checksum: it changes 8 bytes of it. A
// CRC is linear, so some of the differences that single bits make add up to none.
func forge(p *units.Page) *units.Page {
	type vector struct {
		diff uint32 // of the checksum
		bits uint64 // of the page that make it
	}
	flip := func(n uint64) *units.Page {
		q := *p
		for i := range 64 {
			q[100+i/8] ^= byte(n >> i & 1 << (i % 8))
		}
		return &q
	}
	var basis [32]vector
	for i := range 64 {
		v := vector{codec.Checksum(flip(1<<i)) ^ codec.Checksum(p), 1 << i}
		for b := 31; b >= 0 && v.diff != 0; b-- {
			switch {
			case v.diff>>b&1 == 0:
			case basis[b].diff == 0:
				basis[b], v = v, vector{}
			default:
				v.diff, v.bits = v.diff^basis[b].diff, v.bits^basis[b].bits
			}
		}
		if v.diff == 0 && v.bits != 0 {
			return flip(v.bits)
		}
	}
	panic("33 vectors of 32 bits are dependent")
}

// first returns the ID that Find must give for a page: the lowest with its content.
func (f *fixture) first(page *units.Page) (ID, bool) {
	if *page == (units.Page{}) {
		return 0, false
	}
	for i, p := range f.pages() {
		if *p == *page {
			return ID(i), true //nolint:gosec // G115: small
		}
	}
	return 0, false
}

// check compares what the library says of a page with what the pages say.
func (f *fixture) check(l *Library, page *units.Page) error {
	id, ok := l.Find(page, codec.Checksum(page))
	wantID, want := f.first(page)
	if ok != want || id != wantID {
		return fmt.Errorf("found %v as %#x, want %v as %#x", ok, id, want, wantID)
	}
	var got units.Page
	if !ok {
		return nil
	}
	if err := l.Read(&got, id); err != nil {
		return err
	}
	if got != *page {
		return fmt.Errorf("page %#x reads as another one", id)
	}
	return nil
}

func TestEveryPublicPageIsFoundAndReadsEqualAndNoOtherIsFound(t *testing.T) {
	collide := []*units.Page{pageOf(1), forge(pageOf(1))}
	pages := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) *units.Page {
		if n := rapid.Uint64Range(0, 24).Draw(t, "page"); n > 1 {
			return pageOf(n - 2)
		} else {
			return collide[n]
		}
	}), 1, 40)
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		f := &fixture{memory: pages.Draw(t, "memory"), blocks: pages.Draw(t, "root")}
		f.image, f.root = imageOf(t, f.memory), rootOf(t, dir, f.blocks)
		defer f.image.Close()
		defer f.root.Close()
		built, err := Build(t.Context(), f.image, f.root)
		if err != nil {
			t.Fatal(err)
		}
		defer built.Close()
		path := filepath.Join(dir, "index")
		if err := built.WriteIndex(path); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(path)
		opened, err := Open(t.Context(), path, f.image, f.root)
		if err != nil {
			t.Fatal(err)
		}
		defer opened.Close()
		for name, l := range map[string]*Library{"built": built, "opened": opened} {
			for n := range uint64(30) {
				if err := f.check(l, pageOf(n)); err != nil {
					t.Fatalf("%s: page %d: %v", name, n, err)
				}
			}
			for i, p := range collide {
				if err := f.check(l, p); err != nil {
					t.Fatalf("%s: page %d of one checksum: %v", name, i, err)
				}
			}
			distinct := map[units.Page]bool{{}: true}
			for _, p := range f.pages() {
				distinct[*p] = true
			}
			if l.Pages() != len(distinct)-1 {
				t.Fatalf("%s: %d pages, want %d", name, l.Pages(), len(distinct)-1)
			}
		}
	})
}

func TestAnEqualChecksumIsNotBelieved(t *testing.T) {
	f := small(t)
	l := f.build(t)
	for _, n := range []uint64{1, 4} { // of memory, of root
		page, other := pageOf(n), forge(pageOf(n))
		if *page == *other || codec.Checksum(page) != codec.Checksum(other) {
			t.Fatal("the test's pages do not collide")
		}
		if _, ok := l.Find(page, codec.Checksum(page)); !ok {
			t.Errorf("page %d is not found", n)
		}
		if id, ok := l.Find(other, codec.Checksum(other)); ok {
			t.Errorf("page %d with 8 other bytes is found as %#x", n, id)
		}
	}
}

// damage changes the template's root image under the library.
func TestAPageThatIsNotWhatItWasIsRefused(t *testing.T) {
	const block = 1 // page number 4
	tests := []struct {
		name   string
		damage func(f *fixture) error
		words  string
	}{
		{"one bit flipped", func(f *fixture) error {
			_, err := f.root.WriteAt([]byte{f.blocks[block][77] ^ 1}, block*units.PageSize+77)
			return err
		}, "checksum"},
		{"zeroed", func(f *fixture) error {
			_, err := f.root.WriteAt(make([]byte, units.PageSize), block*units.PageSize)
			return err
		}, "checksum"},
		{"replaced by another public page", func(f *fixture) error {
			_, err := f.root.WriteAt(f.blocks[3][:], block*units.PageSize)
			return err
		}, "checksum"},
		{"file truncated within it", func(f *fixture) error { return f.root.Truncate(block*units.PageSize + 9) }, "truncated"},
		{"file emptied", func(f *fixture) error { return f.root.Truncate(0) }, "truncated"},
		{"disk broken", func(*fixture) error { return fault.Arm("library.read", 0, unix.EIO) }, "input/output error"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := small(t)
			l := f.build(t)
			page := pageOf(4)
			id, ok := l.Find(page, codec.Checksum(page))
			if !ok {
				t.Fatal("not found before the damage")
			}
			if err := tt.damage(f); err != nil {
				t.Fatal(err)
			}
			var got units.Page
			err := l.Read(&got, id)
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("got %v, want ErrDamaged", err)
			}
			for _, w := range []string{tt.words, "block 1", f.root.Name(), "template build"} {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
			if tt.name == "disk broken" {
				if err := fault.Arm("library.read", 0, unix.EIO); err != nil {
					t.Fatal(err)
				}
			}
			if _, ok := l.Find(page, codec.Checksum(page)); ok {
				t.Error("still found")
			}
			if err := f.check(l, pageOf(2)); err != nil {
				t.Errorf("a page of memory: %v", err)
			}
		})
	}
}

func TestIDsThatFindNeverGaveAreRefused(t *testing.T) {
	l := small(t).build(t)
	var page units.Page
	for name, id := range map[string]ID{
		"a hole of the memory":         1,
		"the copy of a frame":          3,
		"a block of zeros":             7,
		"the copy of a block":          7 + 4,
		"a block that is in memory":    7 + 2,
		"one behind the last":          7 + 8,
		"the largest a page table has": MaxPages - 1,
		"the largest of its type":      ^ID(0),
	} {
		if err := l.Read(&page, id); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: got %v, want ErrDamaged", name, err)
		}
	}
}

func TestABlockThatLeftThePageCacheIsReadBack(t *testing.T) {
	f := small(t)
	l := f.build(t)
	cached := func() bool {
		_, err := unix.Preadv2(int(f.root.Fd()), [][]byte{make([]byte, units.PageSize)}, units.PageSize, unix.RWF_NOWAIT)
		return err == nil
	}
	for range 3 {
		if err := f.root.Sync(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fadvise(int(f.root.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if cached() {
			t.Skip("this file system keeps its pages in memory")
		}
		if err := f.check(l, pageOf(4)); err != nil {
			t.Fatal(err)
		}
		if !cached() {
			t.Error("the page was not read from the file")
		}
	}
}

func TestTheLibraryDoesNotNeedTheCallersFile(t *testing.T) {
	f := small(t)
	again, err := os.Open(f.root.Name())
	if err != nil {
		t.Fatal(err)
	}
	l, err := Build(t.Context(), f.image, again)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, l)
	if err := errors.Join(again.Close(), os.Remove(f.root.Name())); err != nil {
		t.Fatal(err)
	}
	if err := f.check(l, pageOf(6)); err != nil {
		t.Error(err)
	}
}

func TestTemplateGivesTheFramesPageOrNil(t *testing.T) {
	f := small(t)
	l := f.build(t)
	for frame, want := range append(f.memory, new(units.Page), new(units.Page)) {
		got := l.Template(units.Frame(frame)) //nolint:gosec // G115: small
		if zero := *want == (units.Page{}); zero != (got == nil) || !zero && *got != *want {
			t.Errorf("frame %d: got another page", frame)
		}
	}
}

func TestWhatIsNoTemplateIsRefused(t *testing.T) {
	f := small(t)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if l, err := Build(t.Context(), f.image, dir); err == nil {
		l.Close()
		t.Error("a folder is taken for a root image")
	}
	huge, err := os.Create(filepath.Join(t.TempDir(), "huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer huge.Close()
	if err := huge.Truncate(MaxPages * units.PageSize); err != nil {
		t.Skip(err)
	}
	if l, err := Build(t.Context(), f.image, huge); err == nil || !strings.Contains(err.Error(), "the most") {
		l.Close()
		t.Errorf("got %v, want that there are too many pages", err)
	}
}

func TestAnyGoroutineMayFindAndRead(t *testing.T) {
	f := small(t)
	l := f.build(t)
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			for i := range uint64(500) {
				if err := f.check(l, pageOf((g+i)%9)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestTheTableAgreesWithAPlainSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		idBits := rapid.UintRange(1, 18).Draw(t, "idBits")
		sum := rapid.OneOf(
			rapid.Uint32(),
			rapid.SampledFrom([]uint32{0, 1, 1<<31 - 1, 1 << 31, ^uint32(0) - 1, ^uint32(0)}),
			rapid.Uint32Range(0x77000000, 0x77000040), // many in one bucket
		)
		id := rapid.Custom(func(t *rapid.T) ID { return ID(rapid.Uint32Range(0, 1<<idBits-1).Draw(t, "id")) })
		set := map[record]bool{}
		for range rapid.IntRange(0, 300).Draw(t, "records") {
			set[record{sum.Draw(t, "sum"), id.Draw(t, "id")}] = true
		}
		table, err := newTable(sorted(set), idBits)
		if err != nil {
			t.Fatal(err)
		}
		defer table.close()
		var got []record
		for id, sum := range table.all {
			got = append(got, record{sum, id})
		}
		if !equalRecords(got, sorted(set)) {
			t.Fatalf("got %v, want %v", got, sorted(set))
		}
		for range 100 {
			r := record{sum.Draw(t, "sum"), id.Draw(t, "id")}
			if !set[r] {
				set[r] = false
			}
		}
		for r, want := range set {
			if got := table.has(r.sum, r.id); got != want {
				t.Fatalf("has %v: %v, want %v", r, got, want)
			}
		}
	})
}

func TestTheWholeLibraryTakesFiveBytesAPage(t *testing.T) {
	var pages []*units.Page
	for n := range uint64(6000) {
		pages = append(pages, pageOf(n+1))
	}
	f := &fixture{image: imageOf(t, pages[:2000]), root: rootOf(t, t.TempDir(), pages[2000:])}
	defer f.image.Close()
	defer f.root.Close()
	l := f.build(t)
	if got := float64(l.Size()) / float64(l.Pages()); got > 5.2 {
		t.Errorf("%v for %d pages: %.2f bytes a page", l.Size(), l.Pages(), got)
	}
	var out bytes.Buffer
	if err := l.writeTo(&out); err != nil {
		t.Fatal(err)
	}
	if got, want := out.Len(), headerBytes+sectionBytes+6000*recordBytes+trailerBytes; got != want {
		t.Errorf("the file has %d bytes, want %d", got, want)
	}
}
