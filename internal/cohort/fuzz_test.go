package cohort

import (
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// A tape is fuzz input, read to its end and then zeros.
type tape struct{ in []byte }

func (t *tape) next() byte {
	if len(t.in) == 0 {
		return 0
	}
	b := t.in[0]
	t.in = t.in[1:]
	return b
}

func (t *tape) offset() int { return (int(t.next())<<8 | int(t.next())) % units.PageSize }

// page makes a page of one that was there, or of the template, and a few strokes.
func (t *tape) page(before []held) *units.Page {
	p := new(units.Page)
	switch from := t.next(); {
	case from < 60:
		if q := templatePage(units.Frame(from)); q != nil {
			*p = *q
		}
	case from < 80:
		*p = *rootBlock(int64(from))
	case from < 110:
		*p = *cached(int(from), units.Frame(from), uint64(t.next()))
	case from < 250 && len(before) > 0:
		*p = *before[int(from)%len(before)].page
	}
	for range t.next() % 12 {
		at, n := t.offset(), 1+int(t.next())*4
		dst := p[at:min(at+n, len(p))]
		switch t.next() % 5 {
		case 0:
			clear(dst)
		case 1:
			for i := range dst {
				dst[i] = t.next()
			}
		case 2:
			copy(dst, p[t.offset():])
		case 3:
			b := t.next()
			for i := range dst {
				dst[i] = b
			}
		case 4:
			copy(p[:], magic(new(units.Page))[:4])
		}
	}
	return p
}

// Whatever pages are stored, with what they have in common, each comes back, and nothing stays.
func FuzzStoreLoad(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("a page of the template and then some more of them"))
	for class := range byte(classes) {
		f.Add([]byte{0, 80 + class, 1, 2, 0, 9, 3, 1, 7, 7, 200, 1, 0, 200, 3, 1, 9, 9, 9, 200, 2, 4, 4, 0})
	}
	m := newTemplate(f)
	w := NewWorker()
	f.Cleanup(w.Close)
	f.Fuzz(func(t *testing.T, in []byte) {
		in = in[:min(len(in), 1<<12)]
		tape := &tape{in}
		o := Options{Isolation: Isolation(tape.next() >> 7), Limit: 2 * units.MiB, Without: WaySet(tape.next()) & Ways(WayPublic, WayShared, WayRLE, WayZstd)}
		c := m.cohort(t, o)
		h := &holder{t: t, c: c, w: w}
		for range 40 {
			switch op := tape.next(); {
			case op > 245 && len(h.pages) > 0:
				h.release(int(op) % len(h.pages))
			case op > 235:
				c.Compact(t.Context(), 0)
			default:
				st := h.store(units.Frame(op), tape.page(h.pages), Hint{Soon: op&1 == 0})
				checkStored(t, c, w, st)
				if st.Ref != 0 {
					h.load(len(h.pages) - 1)
				}
			}
			if len(tape.in) == 0 {
				break
			}
		}
		for i := range h.pages {
			h.load(i)
		}
		h.releaseAll()
		empty(t, c)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
