package codec

import (
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// guarded is a page between two walls that no decoder may touch.
type guarded struct {
	before [64]byte
	page   units.Page
	after  [64]byte
}

func newGuarded() *guarded {
	g := new(guarded)
	fill(g.before[:], 0xee)
	fill(g.after[:], 0xee)
	return g
}

func (g *guarded) check(t *testing.T) {
	t.Helper()
	if want := newGuarded(); g.before != want.before || g.after != want.after {
		t.Fatal("the decoder wrote outside the page")
	}
}

// fuzzDecoder runs Decode of kind on any bytes: an error or a page whose
// checksum is right, nothing else.
func fuzzDecoder(f *testing.F, kind Kind) {
	f.Helper()
	dict, template := testDictionary(f), textPage(newRand(12))
	e := NewEncoder(Options{Limit: MaxData})
	defer e.Close()
	for _, s := range madePages(11, 1) {
		if enc, ok := e.Encode(s.page, s.template, nil); ok && enc.Kind == kind {
			f.Add(append([]byte(nil), enc.Data...), enc.Sum)
		}
		if enc, ok := e.Encode(s.page, s.template, dict); ok && enc.Kind == kind {
			f.Add(append([]byte(nil), enc.Data...), enc.Sum)
		}
		if enc, ok := e.Block(s.page, nil); ok && kind == KindZstd {
			f.Add(append([]byte(nil), enc.Data...), Checksum(s.page))
		}
		if enc, ok := e.BlockBase(s.page, template); ok && kind == KindZstdBase {
			f.Add(append([]byte(nil), enc.Data...), Checksum(s.page))
		}
	}
	f.Add([]byte{}, uint32(0))
	f.Add([]byte{0xff, 0xff, 0x7f, 0xff, 0xff, 0x7f}, uint32(0))
	f.Add(make([]byte, units.PageSize+1), uint32(0))
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, data []byte, sum uint32) {
		enc := Encoded{Kind: kind, Sum: sum, Data: data}
		if kind == KindZstdDict {
			enc.Operand = uint32(dict.ID())
		}
		g := newGuarded()
		err := d.Decode(&g.page, enc, template, dict)
		g.check(t)
		switch {
		case err == nil && Checksum(&g.page) != sum:
			t.Fatal("accepted a page whose checksum differs")
		case err != nil && !errors.Is(err, ErrCorrupt):
			t.Fatalf("got %v, want ErrCorrupt", err)
		}
	})
}

func FuzzDecodeRLE(f *testing.F)      { fuzzDecoder(f, KindRLE) }
func FuzzDecodeDelta(f *testing.F)    { fuzzDecoder(f, KindDelta) }
func FuzzDecodeZstd(f *testing.F)     { fuzzDecoder(f, KindZstd) }
func FuzzDecodeZstdDict(f *testing.F) { fuzzDecoder(f, KindZstdDict) }
func FuzzDecodeZstdBase(f *testing.F) { fuzzDecoder(f, KindZstdBase) }

// FuzzRoundTrip builds a page and its template from the input, over and over,
// and wants back what it encoded from every encoder, not only from the winner.
func FuzzRoundTrip(f *testing.F) {
	for _, s := range madePages(13, 1) {
		t := []byte{}
		if s.template != nil {
			t = s.template[:]
		}
		f.Add(s.page[:], t, uint16(len(t)))
	}
	f.Add([]byte("abcdefgh"), []byte("abcdefg"), uint16(3))
	f.Add([]byte{0}, []byte{1}, uint16(4095))
	dict := testDictionary(f)
	e, d := NewEncoder(Options{Limit: MaxData}), NewDecoder()
	f.Fuzz(func(t *testing.T, page, template []byte, at uint16) {
		s := sample{name: "fuzzed", page: repeated(page)}
		if len(template) > 0 {
			s.template = repeated(template)
			if n := int(at) % units.PageSize; n > 0 { // share a part with the page
				copy(s.template[n:], s.page[n:])
			}
		}
		for _, dc := range []*Dictionary{nil, dict} {
			if enc, ok := e.Encode(s.page, s.template, dc); ok {
				var got units.Page
				if err := d.Decode(&got, enc, s.template, dc); err != nil || got != *s.page {
					t.Fatalf("%v does not come back: %v", enc.Kind, err)
				}
			}
		}
		if s.template != nil {
			if enc, ok := e.BlockBase(s.page, s.template); ok {
				enc.Sum = Checksum(s.page)
				var got units.Page
				if err := d.Decode(&got, enc, s.template, nil); err != nil || got != *s.page {
					t.Fatalf("a block with a base does not come back: %v", err)
				}
			}
		}
		for _, base := range []*units.Page{nil, s.template} {
			var buf runBuffer
			n := encodeRuns(&buf, s.page, base, maxRuns)
			g := newGuarded()
			if n < 0 || !decodeRuns(&g.page, buf[:n], base) || g.page != *s.page {
				t.Fatalf("runs of %d bytes do not come back", n)
			}
			g.check(t)
		}
	})
}

// repeated fills a page with b over and over.
func repeated(b []byte) *units.Page {
	var p units.Page
	for n := 0; len(b) > 0 && n < len(p); {
		n += copy(p[n:], b)
	}
	return &p
}
