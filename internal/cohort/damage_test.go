package cohort

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// A poolFile is the memory of a cohort's pool, to damage it behind its back: the handle table,
// then the arena (package pool says how).
type poolFile struct{ f *os.File }

const (
	arenaAt = int64(pool.MaxHandle+1) * 8
	unit    = 2
)

// damageable makes a cohort and opens its pool's memory. Other tests must not make pools meanwhile.
func damageable(t *testing.T, m *template, o Options) (*Cohort, *Worker, *poolFile) {
	t.Helper()
	pools := func() map[string]bool {
		found := map[string]bool{}
		fds, err := filepath.Glob("/proc/self/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			if to, err := os.Readlink(fd); err == nil && strings.Contains(to, "agentzip-pool") {
				found[fd] = true
			}
		}
		return found
	}
	before := pools()
	c, w := m.open(t, o)
	for fd := range pools() {
		if before[fd] {
			continue
		}
		f, err := os.OpenFile(fd, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return c, w, &poolFile{f}
	}
	t.Fatal("the pool's memory file was not found")
	return nil, nil, nil
}

// flip changes a bit of the file.
func (p *poolFile) flip(t *testing.T, at int64, bit int) {
	t.Helper()
	var b [1]byte
	if _, err := p.f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1 << bit
	if _, err := p.f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// A part of the file: [at, at+n).
type part struct {
	at int64
	n  int
}

// parts returns where the word, the header and the data of an entry lie.
func (p *poolFile) parts(t *testing.T, r Ref, enc codec.Encoded) (word, header, data part) {
	t.Helper()
	var b [8]byte
	if _, err := p.f.ReadAt(b[:], int64(r)*8); err != nil {
		t.Fatal(err)
	}
	at := arenaAt + int64(binary.LittleEndian.Uint64(b[:])>>32&(1<<31-1))*unit
	head := 6
	if enc.Kind.HasOperand() {
		head = 10
	}
	return part{int64(r) * 8, 8}, part{at, head}, part{at + int64(head), len(enc.Data)}
}

// bits returns the bits of a part, a sample of them if there are many.
func (q part) bits(r *rand.Rand, most int) (bits [][2]int64) {
	for i := range q.n * 8 {
		if q.n*8 <= most || r.IntN(q.n*8) < most {
			bits = append(bits, [2]int64{q.at + int64(i/8), int64(i % 8)})
		}
	}
	return bits
}

func viewed(t *testing.T, c *Cohort, r Ref) codec.Encoded {
	t.Helper()
	reader := c.pool.NewReader()
	defer reader.Close()
	reader.Pin()
	defer reader.Unpin()
	enc, err := view(reader, r.handle())
	if err != nil {
		t.Fatal(err)
	}
	return enc
}

// populate stores pages of all classes and returns them by ref.
func populate(h *holder, n uint64) map[Ref]*units.Page {
	h.t.Helper()
	pages := map[Ref]*units.Page{}
	for i := range n {
		for class := range classes {
			f := units.Frame(i) % frames
			p := cached(class, f, i)
			if st := h.store(f, p, Hint{}); st.Ref != 0 {
				pages[st.Ref] = p
			}
		}
	}
	return pages
}

func TestAFlippedBitIsNeverReadAsAPageAndIsNamed(t *testing.T) {
	m := newTemplate(t)
	c, w, file := damageable(t, m, Options{Dictionary: trainable()})
	h := &holder{t: t, c: c, w: w}
	trainOnTexts(h)
	for n := range uint64(40) { // with the dictionary
		h.store(1, cached(1, 1, 1000+n), Hint{})
	}
	populate(h, 60)
	pages := map[Ref]*units.Page{}
	for _, p := range h.pages {
		pages[p.ref] = p.page
	}
	r := rand.New(rand.NewPCG(1, 1))
	flips, harmless, kinds := 0, 0, map[string]int{}
	check := func(name string, parts part, most int, bad Ref, victim Ref) {
		for _, b := range parts.bits(r, most) {
			file.flip(t, b[0], int(b[1]))
			var dst units.Page
			err := c.Load(w, &dst, victim)
			var d *Damage
			flips++
			switch {
			case err == nil && dst != *pages[victim]:
				t.Fatalf("%s of entry %d, bit %v: a wrong page was read", name, bad, b)
			case err == nil:
				harmless++
			case !errors.As(err, &d) || !IsDamage(err) || IsMissing(err):
				t.Fatalf("%s of entry %d: %v is no damage of the pool", name, bad, err)
			case d.Ref != bad:
				t.Fatalf("%s of entry %d, bit %v: %v is blamed: %v", name, bad, b, d.Ref, err)
			}
			kinds[name]++
			file.flip(t, b[0], int(b[1]))
		}
	}
	byKind := map[string]int{}
	for ref := range pages {
		if ref.Public() {
			continue
		}
		enc := viewed(t, c, ref)
		name := enc.Kind.String()
		base := Ref(0)
		if enc.Kind.HasBase() && !Ref(enc.Operand).Public() {
			base = Ref(enc.Operand)
			name += " on an entry"
		}
		if byKind[name]++; byKind[name] > 12/min(slow, 3) {
			continue
		}
		word, header, data := file.parts(t, ref, enc)
		check("word of "+name, word, 1000, ref, ref)
		check("header of "+name, header, 1000, ref, ref)
		check("data of "+name, data, 200, ref, ref)
		if base != 0 {
			word, header, data := file.parts(t, base, viewed(t, c, base))
			check("word of the base of "+name, word, 1000, base, ref)
			check("header of the base of "+name, header, 1000, base, ref)
			check("data of the base of "+name, data, 100, base, ref)
		}
	}
	t.Log(kinds)
	for _, kind := range []string{"rle", "delta", "delta on an entry", "zstd", "zstd-dict", "zstd-base", "zstd-base on an entry"} {
		if byKind[kind] == 0 {
			t.Errorf("no entry is kept as %s", kind)
		}
	}
	if harmless*100 > flips*5 { // unused bits at the end of a block, for instance
		t.Errorf("%d of %d flips changed no page", harmless, flips)
	}
	for ref, p := range pages { // all of it was put right again
		var dst units.Page
		if err := c.Load(w, &dst, ref); err != nil || dst != *p {
			t.Fatalf("%#x: %v", ref, err)
		}
	}
}

// The operand of an entry is what its release gives back. That must never be the
// reference of another page: its entry would go, its handle be given out again, and the
// holder would read another's page with a checksum that is right.
func TestTheReleaseOfADamagedEntryHarmsNoOtherPage(t *testing.T) {
	m := newTemplate(t)
	o := Options{Dictionary: trainable()}
	r := rand.New(rand.NewPCG(2, 2))
	probe, w, file := damageable(t, m, o)
	n := uint64(5)
	bits := 0
	for ref := range populate(&holder{t: t, c: probe, w: w}, n) {
		if !ref.Public() {
			_, header, _ := file.parts(t, ref, viewed(t, probe, ref))
			bits = max(bits, header.n*8)
		}
	}
	leaks, named := 0, 0
	for bit := 0; bit < bits; bit += 1 + slow/3 {
		c, w, file := damageable(t, m, o)
		h := &holder{t: t, c: c, w: w}
		pages := populate(h, n)
		var with []Ref // entries against an entry, or with an operand at least
		for _, p := range h.pages {
			if !p.ref.Public() && viewed(t, c, p.ref).Kind.HasOperand() {
				with = append(with, p.ref)
			}
		}
		bad := with[r.IntN(len(with))]
		_, header, _ := file.parts(t, bad, viewed(t, c, bad))
		file.flip(t, header.at+int64(bit/8), bit%8)
		isNamed := false // as a page that is damaged, with what then happens to its holders
		h.pages = slices.DeleteFunc(h.pages, func(p held) bool {
			if p.ref != bad {
				return false
			}
			err := c.Release(bad)
			if err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatalf("release of a damaged entry: %v", err)
			}
			if err != nil {
				leaks++
			}
			var d *Damage
			isNamed = isNamed || errors.As(err, &d)
			return true
		})
		// Handles that were freed by mistake are given out again here.
		for n := range uint64(40) {
			if st := h.store(1, structs(77_000+n), Hint{}); isNamed && st.Ref == bad {
				t.Fatalf("bit %d of the header: ref %d is said to be damaged, and is given out again", bit, bad)
			}
		}
		if isNamed {
			named++
		}
		for i := range h.pages {
			var dst units.Page
			if err := c.Load(w, &dst, h.pages[i].ref); err != nil || dst != *h.pages[i].page {
				t.Fatalf("bit %d of the header of %d (%v): entry %d is wrong after its release: %v", bit, bad, pages[bad] != nil, h.pages[i].ref, err)
			}
		}
	}
	if named == 0 || named == leaks {
		t.Errorf("of %d flips that were noticed %d named a page: want some in the header that cannot be freed, some in the operand", leaks, named)
	}
}

// A fakeMember holds refs.
type fakeMember struct {
	refs []Ref
	fail chan error
}

func (m *fakeMember) Refers(damaged func(Ref) bool) bool {
	return slices.ContainsFunc(m.refs, damaged)
}

func (m *fakeMember) Fail(err error) { m.fail <- err }

func TestDamageEndsTheMembersThatReferToItAndNoOther(t *testing.T) {
	m := newTemplate(t)
	c, w, file := damageable(t, m, Options{})
	h := &holder{t: t, c: c, w: w}
	family := structs(1)
	base := h.store(1, family, Hint{})
	onBase := h.store(1, near(family, 1, 5, true), Hint{})
	alsoOnBase := h.store(1, near(family, 2, 5, true), Hint{})
	alone := h.store(1, text(5), Hint{})
	root := h.store(1, rootBlock(3), Hint{})
	for _, st := range []Stored{onBase, alsoOnBase} {
		if Ref(viewed(t, c, st.Ref).Operand) != base.Ref {
			t.Fatalf("%+v is not kept against %+v", st, base)
		}
	}
	if !root.Ref.Public() {
		t.Fatal("a root block is not public")
	}
	for _, tt := range []struct {
		name          string
		damaged, met  Ref
		public        bool
		refers, spare [][]Ref
	}{
		{"an entry", alone.Ref, alone.Ref, false, [][]Ref{{root.Ref, alone.Ref}}, [][]Ref{{base.Ref}, {onBase.Ref, root.Ref}, {}}},
		{"a base", base.Ref, onBase.Ref, false, [][]Ref{{base.Ref}, {alone.Ref, alsoOnBase.Ref}, {onBase.Ref}}, [][]Ref{{alone.Ref}, {root.Ref}}},
		{"an entry against a base", onBase.Ref, onBase.Ref, false, [][]Ref{{onBase.Ref}}, [][]Ref{{base.Ref, alsoOnBase.Ref, alone.Ref}}},
		{"a public page", root.Ref, root.Ref, true, [][]Ref{{alone.Ref, root.Ref}}, [][]Ref{{alone.Ref, base.Ref, onBase.Ref}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			undo := func() {}
			if tt.public {
				old := rootBlock(3)
				if _, err := m.root.WriteAt([]byte{old[9] ^ 1}, 3*units.PageSize+9); err != nil {
					t.Fatal(err)
				}
				undo = func() {
					if _, err := m.root.WriteAt(old[:], 3*units.PageSize); err != nil {
						t.Fatal(err)
					}
				}
			} else {
				_, _, data := file.parts(t, tt.damaged, viewed(t, c, tt.damaged))
				file.flip(t, data.at+int64(data.n/2), 3)
				undo = func() { file.flip(t, data.at+int64(data.n/2), 3) }
			}
			defer func() { undo() }()
			var dst units.Page
			err := c.Load(w, &dst, tt.met)
			if err == nil {
				t.Fatal("damage was not found")
			}
			if IsMissing(err) != tt.public {
				t.Errorf("%v: is the template blamed? %v", err, IsMissing(err))
			}
			var all []*fakeMember
			join := func(refs []Ref) *fakeMember {
				f := &fakeMember{refs, make(chan error, 9)}
				all = append(all, f)
				c.Join(f)
				return f
			}
			finder := join([]Ref{tt.met})
			var refers, spare []*fakeMember
			for _, refs := range tt.refers {
				refers = append(refers, join(refs))
			}
			for _, refs := range tt.spare {
				spare = append(spare, join(refs))
			}
			gone := join(tt.refers[0])
			c.Leave(gone)
			c.ReportDamage(fmt.Errorf("frame 7: %w", err), finder)
			for i, f := range refers {
				select {
				case got := <-f.fail:
					if !strings.Contains(got.Error(), "sibling") || !errors.Is(got, ErrDamaged) {
						t.Errorf("reason %q does not say that a sibling met the damage", got)
					}
				case <-time.After(10 * time.Second):
					t.Errorf("member %d, which refers to it, was not ended", i)
				}
			}
			c.reports.Wait()
			for _, f := range append(spare, finder, gone) {
				if len(f.fail) != 0 {
					t.Errorf("a member with refs %v was ended: %v", f.refs, <-f.fail)
				}
			}
			for _, f := range all {
				c.Leave(f)
			}
		})
	}
	c.ReportDamage(errors.New("something else"), nil)
	c.reports.Wait()
}

// slowMember is asked while its cohort is closed.
type slowMember struct{ asked, goOn chan struct{} }

func (m slowMember) Refers(damaged func(Ref) bool) bool {
	close(m.asked)
	<-m.goOn
	for r := range Ref(5000) {
		damaged(r + 1)
	}
	return false
}
func (slowMember) Fail(error) {}

func TestCloseWaitsForReportsOfDamage(t *testing.T) {
	m := newTemplate(t)
	c := m.cohort(t, Options{})
	s := slowMember{make(chan struct{}), make(chan struct{})}
	c.Join(s)
	c.ReportDamage(&Damage{3, pool.ErrDamaged}, nil)
	<-s.asked
	c.Leave(s)
	closed := make(chan error)
	go func() { closed <- c.Close() }()
	select {
	case <-closed:
		t.Error("Close did not wait: the report looks into memory that is unmapped")
	case <-time.After(50 * time.Millisecond):
	}
	close(s.goOn)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// Store meets damage, too: what it compares with, and the bases it considers.
func TestStoreGoesRoundDamageAndReportsIt(t *testing.T) {
	m := newTemplate(t)
	c, w, file := damageable(t, m, Options{})
	h := &holder{t: t, c: c, w: w}
	family := structs(1)
	first := h.store(1, family, Hint{})
	f := &fakeMember{[]Ref{first.Ref}, make(chan error, 9)}
	c.Join(f)
	defer c.Leave(f)
	_, _, data := file.parts(t, first.Ref, viewed(t, c, first.Ref))
	file.flip(t, data.at+int64(data.n/2), 0)
	for name, p := range map[string]*units.Page{"the same page": family, "a similar page": near(family, 1, 5, true)} {
		st := h.store(1, p, Hint{})
		if st.Ref == first.Ref || !st.Ref.Public() && Ref(viewed(t, c, st.Ref).Operand) == first.Ref {
			t.Errorf("%s refers to a damaged entry", name)
		}
		h.load(len(h.pages) - 1)
	}
	c.reports.Wait()
	if len(f.fail) == 0 {
		t.Error("the holder of the damaged entry was not told")
	}
	file.flip(t, data.at+int64(data.n/2), 0)
	h.releaseAll()
	empty(t, c)
}

func TestAPageWithAllReferencesThatCanBeCountedIsStoredAgain(t *testing.T) {
	m := newTemplate(t)
	c, w := m.open(t, Options{})
	h := &holder{t: t, c: c, w: w}
	p := text(1)
	first := h.store(1, p, Hint{})
	for range pool.MaxRefs - 1 {
		if err := c.Ref(first.Ref); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Ref(first.Ref); !errors.Is(err, ErrShared) || IsDamage(err) {
		t.Errorf("one reference too many: %v, want ErrShared, which is no damage", err)
	}
	second := h.store(1, p, Hint{})
	if second.Way == WayShared || second.Ref == first.Ref {
		t.Fatalf("stored as %+v", second)
	}
	if third := h.store(1, p, Hint{}); third.Ref != second.Ref {
		t.Errorf("the third is %+v, want one more of %+v", third, second)
	}
	near := h.store(1, near(p, 3, 4, true), Hint{}) // a base nobody can refer to any more
	if near.Ref != 0 && Ref(viewed(t, c, near.Ref).Operand) == first.Ref {
		t.Error("a page is kept against a base without a reference")
	}
	for i := range h.pages {
		h.load(i)
	}
	for range pool.MaxRefs - 1 {
		if err := c.Release(first.Ref); err != nil {
			t.Fatal(err)
		}
	}
	h.releaseAll()
	empty(t, c)
}

// A worker outlives cohorts, and serves many.
func TestAWorkerOutlivesItsCohorts(t *testing.T) {
	m := newTemplate(t)
	w := NewWorker()
	for n := range uint64(20) {
		c := m.cohort(t, Options{})
		h := &holder{t: t, c: c, w: w}
		h.store(1, text(n), Hint{})
		h.load(0)
		h.releaseAll()
		if n%2 == 0 {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		defer func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}()
	}
	if n := len(w.readers); n > 11 {
		t.Errorf("the worker has %d readers, 10 cohorts are open", n)
	}
	w.Close()
}
