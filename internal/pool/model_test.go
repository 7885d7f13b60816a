package pool

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// modelEntry is what a plain map knows of an entry.
type modelEntry struct {
	enc  codec.Encoded
	refs int
}

// A machine is a pool, and the map that it should be.
type machine struct {
	p       *Pool
	limit   units.Bytes
	entries map[Handle]*modelEntry
	order   []Handle // the keys of entries, so that draws repeat

	readers []*Reader
	pinned  []bool
	views   [][2]codec.Encoded // of all pinned readers: what View returned, and a copy of what it should be
	of      []int              // the reader of each view
}

func (m *machine) pick(t *rapid.T) (int, Handle) {
	if len(m.order) == 0 {
		t.Skip("empty")
	}
	i := rapid.IntRange(0, len(m.order)-1).Draw(t, "which")
	return i, m.order[i]
}

func (m *machine) put(t *rapid.T) {
	enc := codec.Encoded{
		Kind: codec.Kind(rapid.IntRange(1, codec.Kinds-1).Draw(t, "kind")),
		Sum:  rapid.Uint32().Draw(t, "sum"),
		Data: bytes.Repeat([]byte{rapid.Byte().Draw(t, "byte")}, rapid.OneOf(rapid.IntRange(0, 80), rapid.IntRange(0, codec.MaxData)).Draw(t, "length")),
	}
	if enc.Kind.HasOperand() {
		enc.Operand = rapid.Uint32().Draw(t, "operand")
	}
	h, err := m.p.Put(enc)
	switch {
	case errors.Is(err, ErrFull) && m.limit != 0:
		return
	case err != nil:
		t.Fatal(err)
	case m.entries[h] != nil:
		t.Fatalf("handle %#x is in use", h)
	}
	m.entries[h] = &modelEntry{enc, 1}
	m.order = append(m.order, h)
}

func (m *machine) release(t *rapid.T, i int) {
	h := m.order[i]
	e := m.entries[h]
	freed, was, err := m.p.Release(h)
	e.refs--
	want := e.enc
	want.Data = nil
	if err != nil || freed != (e.refs == 0) || freed && !same(was, want) {
		t.Fatalf("release with %d references left: freed %v, %+v (want %+v), %v", e.refs, freed, was, want, err)
	}
	if freed {
		delete(m.entries, h)
		m.order[i] = m.order[len(m.order)-1]
		m.order = m.order[:len(m.order)-1]
	}
}

func (m *machine) reader(t *rapid.T) int {
	return rapid.IntRange(0, len(m.readers)-1).Draw(t, "reader")
}

func (m *machine) unpin(t *rapid.T, r int) {
	var views [][2]codec.Encoded
	var of []int
	for i, v := range m.views {
		if m.of[i] == r {
			if !same(v[0], v[1]) {
				t.Fatal("a view changed while its reader was pinned")
			}
			continue
		}
		views, of = append(views, v), append(of, m.of[i])
	}
	m.views, m.of = views, of
	m.readers[r].Unpin()
	m.pinned[r] = false
}

func (m *machine) view(t *rapid.T, r int) {
	_, h := m.pick(t)
	v, err := m.readers[r].View(h)
	if err != nil || !same(v, m.entries[h].enc) {
		t.Fatalf("entry %#x is %+v, %v", h, v, err)
	}
	m.views, m.of = append(m.views, [2]codec.Encoded{v, m.entries[h].enc}), append(m.of, r)
}

// check compares everything that can be seen with the map and the kernel.
func (m *machine) check(t *rapid.T) {
	r := m.p.NewReader()
	r.Pin()
	var live units.Bytes
	for h, e := range m.entries {
		if v, err := r.View(h); err != nil || !same(v, e.enc) {
			t.Fatalf("entry %#x differs from the model: %v", h, err)
		}
		live += units.Bytes(len(e.enc.Data))
	}
	r.Unpin()
	r.Close()
	s := m.p.Stats()
	kernel, err := hostmem.Allocated(m.p.file)
	if err != nil {
		t.Fatal(err)
	}
	if s.Entries != int64(len(m.entries)) || s.Live != live || s.Resident != kernel {
		t.Fatalf("%d entries of %d bytes in %d, stats say %+v", len(m.entries), live, kernel, s)
	}
	if s.Live+s.Meta+s.Slack != s.Footprint || s.Slack < 0 || m.limit != 0 && s.Footprint > m.limit {
		t.Fatalf("accounts do not add up or exceed %v: %+v", m.limit, s)
	}
}

func TestPoolIsAMapWithReferences(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{
			limit:   rapid.SampledFrom([]units.Bytes{300 * units.KiB, 1 * units.MiB, 0}).Draw(t, "limit"),
			entries: map[Handle]*modelEntry{},
			pinned:  make([]bool, 2),
		}
		p, err := New(Options{Limit: m.limit})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		m.p = p
		m.readers = []*Reader{p.NewReader(), p.NewReader()}
		t.Repeat(map[string]func(*rapid.T){
			"put": m.put,
			"put many": func(t *rapid.T) {
				for range rapid.IntRange(1, 60).Draw(t, "n") {
					m.put(t)
				}
			},
			"ref": func(t *rapid.T) {
				_, h := m.pick(t)
				if err := p.Ref(h); err != nil {
					t.Fatal(err)
				}
				m.entries[h].refs++
			},
			"try any": func(t *rapid.T) {
				h := Handle(rapid.OneOf(rapid.Uint32Range(0, 3000), rapid.Uint32()).Draw(t, "handle"))
				if got := p.TryRef(h); got != (m.entries[h] != nil) {
					t.Fatalf("TryRef(%#x) is %v", h, got)
				} else if got {
					m.entries[h].refs++
				}
			},
			"release": func(t *rapid.T) {
				i, _ := m.pick(t)
				m.release(t, i)
			},
			"release many": func(t *rapid.T) {
				for range rapid.IntRange(1, 60).Draw(t, "n") {
					i, _ := m.pick(t)
					m.release(t, i)
				}
			},
			"pin and view": func(t *rapid.T) {
				r := m.reader(t)
				if !m.pinned[r] {
					m.readers[r].Pin()
					m.pinned[r] = true
				}
				m.view(t, r)
			},
			"unpin": func(t *rapid.T) {
				if r := m.reader(t); m.pinned[r] {
					m.unpin(t, r)
				}
			},
			"compact": func(t *rapid.T) {
				for r := range m.readers {
					if m.pinned[r] {
						m.unpin(t, r) // Compact waits for it
					}
				}
				p.Compact(t.Context(), units.Bytes(rapid.IntRange(0, 1<<18).Draw(t, "budget")))
			},
			"trim": func(*rapid.T) { p.Trim() },
			"":     m.check,
		})
	})
}
