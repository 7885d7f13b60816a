package library

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tb is what *testing.T and *rapid.T have in common.
type tb interface {
	Helper()
	Fatal(args ...any)
}

// made holds the pages of pageOf, which take long to make under the race detector.
var made sync.Map

// pageOf gives page number n, not to be written to: 0 is zeros, equal numbers are equal pages.
func pageOf(n uint64) *units.Page {
	if p, ok := made.Load(n); ok {
		return p.(*units.Page)
	}
	p := new(units.Page)
	if n != 0 {
		r := rand.New(rand.NewPCG(n, 1))
		for at := 0; at < len(p); at += 8 {
			binary.LittleEndian.PutUint64(p[at:], r.Uint64())
		}
	}
	made.Store(n, p)
	return p
}

// imageOf makes a sealed image of pages; the caller closes it.
func imageOf(t tb, pages []*units.Page) *guestmem.Image {
	t.Helper()
	im, err := guestmem.NewImage(units.Bytes(len(pages)) * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	for f, p := range pages {
		if *p == (units.Page{}) {
			continue
		}
		if _, err := im.File().WriteAt(p[:], units.Frame(f).Offset()); err != nil { //nolint:gosec // G115: small
			t.Fatal(err)
		}
	}
	if err := im.Seal(); err != nil {
		t.Fatal(err)
	}
	return im
}

// rootOf writes pages, and some bytes more, to a sparse file in dir; the caller closes it.
func rootOf(t tb, dir string, pages []*units.Page) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	for b, p := range pages {
		if *p == (units.Page{}) {
			continue
		}
		if _, err := f.WriteAt(p[:], int64(b)*units.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(int64(len(pages))*units.PageSize + 100); err != nil {
		t.Fatal(err)
	}
	return f
}

// A fixture is a small template.
type fixture struct {
	image  *guestmem.Image
	root   *os.File
	memory []*units.Page
	blocks []*units.Page
}

// newFixture makes a template of the pages with these numbers, closed with the test.
func newFixture(t testing.TB, memory, blocks []uint64) *fixture {
	t.Helper()
	f := &fixture{}
	for _, n := range memory {
		f.memory = append(f.memory, pageOf(n))
	}
	for _, n := range blocks {
		f.blocks = append(f.blocks, pageOf(n))
	}
	f.image, f.root = imageOf(t, f.memory), rootOf(t, t.TempDir(), f.blocks)
	t.Cleanup(func() {
		if err := f.image.Close(); err != nil {
			t.Error(err)
		}
		if err := f.root.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// small is a template with holes, zeros, duplicates within each part and between them.
func small(t testing.TB) *fixture {
	t.Helper()
	return newFixture(t, []uint64{1, 0, 2, 1, 3, 0, 0}, []uint64{0, 4, 2, 5, 5, 0, 6, 0})
}

func (f *fixture) build(t testing.TB) *Library {
	t.Helper()
	l, err := Build(t.Context(), f.image, f.root)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, l)
	return l
}

func closeAtEnd(t testing.TB, l *Library) {
	t.Helper()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}
