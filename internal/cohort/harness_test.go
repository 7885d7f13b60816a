package cohort

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/units"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if given := flag.Lookup("rapid.checks"); given != nil && given.Value.String() == given.DefValue {
		_ = given.Value.Set(strconv.Itoa(150 / slow))
	}
	goleak.VerifyTestMain(m)
}

// tb is what *testing.T and *rapid.T have in common.
type tb interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Fatal(args ...any)
}

const (
	frames = 96 // of the template; every sixth is a hole
	blocks = 64 // of the root image
)

// A template is what the cohorts of a test have in common.
type template struct {
	library *library.Library
	image   *guestmem.Image
	root    *os.File
}

// newTemplate makes a template of templatePage and rootBlock, closed with the test.
func newTemplate(t testing.TB) *template {
	t.Helper()
	im, err := guestmem.NewImage(frames * units.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.Create(filepath.Join(t.TempDir(), "root"))
	if err != nil {
		t.Fatal(err)
	}
	for f := range units.Frame(frames) {
		if p := templatePage(f); p != nil {
			if _, err := im.File().WriteAt(p[:], f.Offset()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for b := range int64(blocks) {
		if _, err := root.WriteAt(rootBlock(b)[:], b*units.PageSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := im.Seal(); err != nil {
		t.Fatal(err)
	}
	l, err := library.Build(context.Background(), im, root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(l.Close(), im.Close(), root.Close()); err != nil {
			t.Error(err)
		}
	})
	return &template{l, im, root}
}

// cohort makes a cohort that its caller closes.
func (m *template) cohort(t tb, o Options) *Cohort {
	t.Helper()
	o.Library = m.library
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// open makes a cohort that is closed with the test, and a worker.
func (m *template) open(t testing.TB, o Options) (*Cohort, *Worker) {
	t.Helper()
	c, w := m.cohort(t, o), NewWorker()
	t.Cleanup(func() {
		w.Close()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, w
}

// trainable are options with which a small test gets its dictionary.
func trainable() dictionary.Options {
	return dictionary.Options{DictSize: 8 << 10, Samples: 1, AtStake: func() units.Bytes { return units.GiB }}
}

// trainOnTexts gives the cohort a dictionary: what the samples are is a matter of luck, but
// of texts any will do. The texts stay, as blocks without it.
func trainOnTexts(h *holder) {
	h.t.Helper()
	for n := range uint64(600) {
		h.store(5, text(1_000_000+n), Hint{})
	}
	if err := h.c.Train(context.Background()); err != nil {
		h.t.Fatal(err)
	}
}

// Content. All of it follows from its arguments.

func words(seed, kind uint64) *units.Page {
	p, r := new(units.Page), rand.New(rand.NewPCG(seed, kind))
	for i := 0; i < units.PageSize; i += 8 {
		binary.LittleEndian.PutUint64(p[i:], r.Uint64())
	}
	return p
}

// structs is a page as a kernel's or an interpreter's heap has it: pointers, counters, zeros.
func structs(seed uint64) *units.Page {
	p, r := new(units.Page), rand.New(rand.NewPCG(seed, 2))
	for i := 0; i < units.PageSize; i += 8 {
		v := uint64(0)
		switch r.IntN(4) {
		case 0:
			v = 0xffff888000000000 | r.Uint64N(1<<28)<<3
		case 1:
			v = r.Uint64N(1 << 12)
		case 2:
			v = r.Uint64N(1 << 32)
		}
		binary.LittleEndian.PutUint64(p[i:], v)
	}
	return p
}

func text(seed uint64) *units.Page {
	p, r := new(units.Page), rand.New(rand.NewPCG(seed, 3))
	lexicon := [...]string{"the ", "return ", "self.", "import ", "def ", "None\n", "    ", "if ", "= ", "page", "(x)", ":\n", "error ", "0x7f"}
	for at := 0; at < len(p); {
		at += copy(p[at:], lexicon[r.IntN(len(lexicon))])
		if r.IntN(8) == 0 && at < len(p) {
			p[at] = byte('a' + r.IntN(26))
			at++
		}
	}
	return p
}

// templatePage is the content of a frame, nil for a hole.
func templatePage(f units.Frame) *units.Page {
	switch {
	case f%6 == 5 || f >= frames:
		return nil
	case f%6 == 4:
		return magic(text(1<<32 | uint64(f)))
	case f%2 == 0:
		return text(1<<32 | uint64(f))
	}
	return structs(1<<32 | uint64(f))
}

func rootBlock(b int64) *units.Page { return text(2<<32 | uint64(b)) }

// magic makes a page begin like a trained dictionary: no prefix for Zstandard.
func magic(p *units.Page) *units.Page {
	binary.LittleEndian.PutUint32(p[:], 0xEC30A437)
	return p
}

// near returns a copy of p with n words changed, all of them within a part of the page if
// close is set.
func near(p *units.Page, seed uint64, n int, local bool) *units.Page {
	q, r := *p, rand.New(rand.NewPCG(seed, 4))
	from, span := 0, units.PageSize/8
	if local {
		span = 64
		from = r.IntN(units.PageSize/8 - span)
	}
	for range n {
		binary.LittleEndian.PutUint64(q[(from+r.IntN(span))*8:], r.Uint64())
	}
	return &q
}

// shifted moves the content of p by n bytes.
func shifted(p *units.Page, n int) *units.Page {
	q := new(units.Page)
	copy(q[n:], p[:])
	return q
}

const classes = 15

// content is page number n of a class: of few pages, so that sandboxes store equal ones.
func content(class int, f units.Frame, n uint64) *units.Page {
	family := structs(3<<32 | n%5)
	switch class % classes {
	case 0:
		return near(new(units.Page), n, 1+int(n%40), n%2 == 0)
	case 1:
		return text(n)
	case 2:
		if p := templatePage(f); p != nil {
			return near(p, n, 1+int(n%60), n%2 == 0)
		}
		return near(new(units.Page), n, 3, true)
	case 3:
		return near(templatePage(units.Frame(n%16)*6), n, 10, false)
	case 4:
		return templatePage(units.Frame(n%16)*6 + 1)
	case 5:
		return rootBlock(int64(n % blocks))
	case 6:
		return near(rootBlock(int64(n%blocks)), n, 10, false)
	case 7:
		return near(family, n, 1+int(n%50), n%3 == 0)
	case 8:
		return family
	case 9:
		return words(n, 5)
	case 10:
		return shifted(family, 8*(1+int(n%64)))
	case 11:
		return structs(n)
	case 12:
		p := words(n, 6)
		clear(p[1024+n%2048:])
		return p
	case 13:
		return magic(near(family, n%3, 4, true))
	default:
		return magic(near(words(n%3, 7), n, 12, false))
	}
}

var contents sync.Map // made ones: making takes as long as storing, under the race detector

func cached(class int, f units.Frame, n uint64) *units.Page {
	type key struct {
		class int
		f     units.Frame
		n     uint64
	}
	if class%classes != 2 {
		f = 0
	}
	k := key{class, f, n}
	if p, ok := contents.Load(k); ok {
		return p.(*units.Page)
	}
	p := content(class, f, n)
	contents.Store(k, p)
	return p
}

// A holder has references, as a sandbox has them: the model.
type holder struct {
	t      tb
	c      *Cohort
	w      *Worker
	pages  []held
	report func(error) bool // whether an error of Store is one the test expects
}

type held struct {
	ref  Ref
	page *units.Page
}

// store keeps a page and what comes of it.
func (h *holder) store(f units.Frame, page *units.Page, hint Hint) Stored {
	h.t.Helper()
	before := *page
	st, err := h.c.Store(h.w, f, page, hint)
	if *page != before {
		h.t.Fatalf("Store changed the page")
	}
	if err != nil {
		if h.report == nil || !h.report(err) {
			h.t.Fatalf("store a page of frame %d: %v", f, err)
		}
		return Stored{}
	}
	if st.Ref != 0 {
		h.pages = append(h.pages, held{st.Ref, page})
	}
	return st
}

// load compares the i-th page with the model.
func (h *holder) load(i int) {
	h.t.Helper()
	var dst units.Page
	p := h.pages[i]
	if err := h.c.Load(h.w, &dst, p.ref); err != nil {
		if h.report == nil || !h.report(err) {
			h.t.Fatalf("load %#x: %v", p.ref, err)
		}
		return
	}
	if dst != *p.page {
		way, n, err := h.c.Way(h.w, p.ref)
		h.t.Fatalf("ref %#x, kept as %v in %d bytes (%v), is another page than was stored", p.ref, way, n, err)
	}
}

// release gives the i-th reference back.
func (h *holder) release(i int) {
	h.t.Helper()
	if err := h.c.Release(h.pages[i].ref); err != nil {
		h.t.Fatalf("release %#x: %v", h.pages[i].ref, err)
	}
	h.pages[i] = h.pages[len(h.pages)-1]
	h.pages = h.pages[:len(h.pages)-1]
}

func (h *holder) releaseAll() {
	h.t.Helper()
	for len(h.pages) > 0 {
		h.release(len(h.pages) - 1)
	}
}

// empty checks that a cohort whose references were all given back keeps nothing.
func empty(t tb, c *Cohort) {
	t.Helper()
	c.Compact(context.Background(), 0)
	s := c.Stats()
	if s.Pool.Entries != 0 || s.Pool.Live != 0 {
		t.Errorf("%d entries of %v are left", s.Pool.Entries, s.Pool.Live)
	}
	if s.Dictionary.Pages != 0 {
		t.Errorf("%d pages hold a dictionary that are not there", s.Dictionary.Pages)
	}
	if len(s.Dictionary.IDs) > 1 {
		t.Errorf("dictionaries %v are alive, no page needs one", s.Dictionary.IDs)
	}
	// The baseline: the segments that are open, up to the page they are filled to, and the tables.
	if s.Pool.Resident > restResident {
		t.Errorf("%v of the empty pool are in memory, want at most %v", s.Pool.Resident, restResident)
	}
	if n := c.plain.Load(); n != 0 {
		t.Errorf("%d entries without a base are counted in an empty pool", n)
	}
}

const restResident = 64 * units.KiB

// checkStored checks what Store says against what is there.
func checkStored(t tb, c *Cohort, w *Worker, st Stored) {
	t.Helper()
	if st.Ref == 0 {
		return
	}
	way, n, err := c.Way(w, st.Ref)
	if err != nil {
		t.Fatalf("way of %#x: %v", st.Ref, err)
	}
	if st.Way != WayShared && (way != st.Way || n != st.Size) || st.Way == WayShared && st.Size != 0 {
		t.Fatalf("stored as %v in %d bytes, kept as %v in %d", st.Way, st.Size, way, n)
	}
	if st.Ref.Public() != (st.Way == WayPublic) || st.Ref>>RefBits != 0 {
		t.Fatalf("ref %#x is kept as %v", st.Ref, st.Way)
	}
}

// audit walks the entries that refs name: a base has no base, and every operand's reference
// is counted. It returns how many references the pool must have by that.
func audit(t tb, c *Cohort, refs []Ref) {
	t.Helper()
	reader := c.pool.NewReader()
	defer reader.Close()
	reader.Pin()
	defer reader.Unpin()
	seen := map[Ref]codec.Encoded{}
	for _, r := range refs {
		for !r.Public() {
			if _, ok := seen[r]; ok {
				break
			}
			enc, err := view(reader, r.handle())
			if err != nil {
				t.Fatalf("view %#x: %v", r, err)
			}
			seen[r] = enc
			if !enc.Kind.HasBase() {
				break
			}
			r = Ref(enc.Operand)
			if !r.Public() {
				base, err := view(reader, r.handle())
				if err != nil || base.Kind.HasBase() {
					t.Fatalf("base %#x of a page: %v, %v", r, base.Kind, err)
				}
			}
		}
	}
	pages := int64(0)
	for _, enc := range seen {
		if enc.Dict() != 0 {
			pages++
		}
	}
	s := c.Stats()
	if s.Pool.Entries != int64(len(seen)) {
		t.Fatalf("the pool has %d entries, what is held needs %d", s.Pool.Entries, len(seen))
	}
	if s.Dictionary.Pages != pages {
		t.Fatalf("%d pages are said to need a dictionary, %d do", s.Dictionary.Pages, pages)
	}
}
