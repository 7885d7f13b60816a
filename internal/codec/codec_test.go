package codec

import (
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func TestWhatEncodeMakesDecodeReadsBack(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	dict := testDictionary(t)
	for _, s := range append(madePages(1, 4), realPages(t, 400)...) {
		for _, dc := range []*Dictionary{nil, dict} {
			checkRoundTrip(t, e, d, s, dc)
		}
	}
}

// checkRoundTrip returns the length of the encoding, a page if there is none.
func checkRoundTrip(t testing.TB, e *Encoder, d *Decoder, s sample, dict *Dictionary) int {
	t.Helper()
	page := *s.page
	enc, ok := e.Encode(s.page, s.template, dict)
	if page != *s.page {
		t.Fatalf("%s: Encode changed the page", s.name)
	}
	if !ok {
		return units.PageSize
	}
	if len(enc.Data) > DefaultLimit {
		t.Fatalf("%s: %d bytes of %v, over the limit", s.name, len(enc.Data), enc.Kind)
	}
	var got units.Page
	fill(got[:], 0xa5)
	if err := d.Decode(&got, enc, s.template, dict); err != nil {
		t.Fatalf("%s: decode %v: %v", s.name, enc.Kind, err)
	}
	if got != page {
		t.Fatalf("%s: %v decodes to another page with the same checksum", s.name, enc.Kind)
	}
	return len(enc.Data)
}

func TestEachClassOfPageGetsTheEncoderMadeForIt(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	want := map[string]struct {
		most int
		kind Kind
	}{
		"zeros, hole":           {0, KindRLE},
		"one byte, hole":        {12, KindRLE},
		"text, few changes":     {120, KindDelta},
		"heap, few changes":     {120, KindDelta},
		"random, few changes":   {120, KindDelta},
		"pointers, half freed":  {8, KindDelta},
		"text, hole":            {2800, KindZstd},
		"heap, other template":  {2000, KindZstd},
		"pointers, hole":        {2400, KindZstd},
		"random, hole":          {units.PageSize, 0}, // stays resident
		"zeros, other template": {0, KindRLE},
	}
	for _, s := range madePages(2, 3) {
		w, named := want[s.name]
		if !named {
			continue
		}
		n := checkRoundTrip(t, e, d, s, nil)
		enc, ok := e.Encode(s.page, s.template, nil)
		if n > w.most {
			t.Errorf("%s: %d bytes of %v, want at most %d", s.name, n, enc.Kind, w.most)
		}
		if ok != (w.kind != 0) || ok && enc.Kind != w.kind {
			t.Errorf("%s: kind %v (%d bytes), want %v", s.name, enc.Kind, n, w.kind)
		}
	}
}

func TestADictionaryMakesPagesOfItsKindSmaller(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	dict := testDictionary(t)
	var plain, with int
	for _, s := range madePages(99, 8) {
		if s.name != "text, hole" {
			continue
		}
		plain += checkRoundTrip(t, e, d, s, nil)
		with += checkRoundTrip(t, e, d, s, dict)
	}
	if with >= plain*9/10 {
		t.Errorf("with dictionary %d bytes, without %d: want 10%% less", with, plain)
	}
}

func TestDecodeRefusesDamage(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	dict := testDictionary(t)
	var got units.Page
	for _, s := range madePages(3, 2) {
		for _, dc := range []*Dictionary{nil, dict} {
			enc, ok := e.Encode(s.page, s.template, dc)
			if !ok {
				continue
			}
			data := append([]byte(nil), enc.Data...)
			check := func(what string, x Encoded) {
				t.Helper()
				if err := d.Decode(&got, x, s.template, dc); err == nil && got != *s.page {
					t.Fatalf("%s: %v with %s decodes to another page", s.name, enc.Kind, what)
				}
			}
			for i := range data {
				bad := append([]byte(nil), data...)
				bad[i] ^= 0x11
				check("a flipped byte", Encoded{enc.Kind, enc.Operand, enc.Sum, bad})
			}
			for i := range min(len(data), 64) {
				check("a lost end", Encoded{enc.Kind, enc.Operand, enc.Sum, data[:len(data)-1-i]})
			}
			if err := d.Decode(&got, Encoded{enc.Kind, enc.Operand, enc.Sum ^ 1, data}, s.template, dc); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s: a wrong checksum gives %v, want ErrCorrupt", s.name, err)
			}
		}
	}
	for _, enc := range []Encoded{{}, {Kind: 200}, {Kind: KindZstd}, {Kind: KindRLE, Data: make([]byte, units.PageSize)}} {
		if err := d.Decode(&got, enc, nil, nil); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v with %d bytes: %v, want ErrCorrupt", enc.Kind, len(enc.Data), err)
		}
	}
}

func TestDecodeWantsTheDictionaryThatThePageNames(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	dict := testDictionary(t)
	other, err := NewDictionary(dict.ID()+1, trained(t))
	if err != nil {
		t.Fatal(err)
	}
	var s sample
	for _, s = range madePages(4, 1) {
		if s.name == "heap, hole" {
			break
		}
	}
	enc, ok := e.Encode(s.page, nil, dict)
	if !ok || enc.Kind != KindZstdDict || enc.Dict() != dict.ID() {
		t.Fatalf("got kind %v dict %d, want zstd with dictionary %d", enc.Kind, enc.Dict(), dict.ID())
	}
	enc.Data = append([]byte(nil), enc.Data...)
	var got units.Page
	for name, dc := range map[string]*Dictionary{"none": nil, "another": other} {
		if err := d.Decode(&got, enc, nil, dc); !errors.Is(err, ErrDictionary) {
			t.Errorf("dictionary %s: %v, want ErrDictionary", name, err)
		}
	}
	if err := d.Decode(&got, enc, nil, dict); err != nil {
		t.Errorf("the right dictionary: %v", err)
	}

	was := live.Load()
	other.Close()
	other.Close()
	if got := live.Load(); got != was-1 {
		t.Errorf("%d live dictionaries after Close, want %d", got, was-1)
	}
	if enc, ok := e.Encode(s.page, nil, other); !ok || enc.Kind != KindZstd {
		t.Errorf("a closed dictionary: kind %v, want plain zstd", enc.Kind)
	}
}

func TestNewDictionaryRefusesWhatWasNotTrained(t *testing.T) {
	good := trained(t)
	broken := append([]byte(nil), good...)
	fill(broken[8:64], 0xff)
	for name, raw := range map[string][]byte{"nothing": nil, "text": make([]byte, 4096), "short": good[:100], "broken tables": broken} {
		if d, err := NewDictionary(7, raw); !errors.Is(err, ErrDictionary) {
			t.Errorf("%s: got %v, %v; want ErrDictionary", name, d, err)
		}
	}
	if _, err := NewDictionary(0, good); !errors.Is(err, ErrDictionary) {
		t.Errorf("id 0: %v, want ErrDictionary", err)
	}
}

func TestALimitIsKept(t *testing.T) {
	e := NewEncoder(Options{Limit: 100})
	defer e.Close()
	for _, s := range madePages(5, 2) {
		if enc, ok := e.Encode(s.page, s.template, nil); ok && len(enc.Data) > 100 {
			t.Errorf("%s: %d bytes, over the limit of 100", s.name, len(enc.Data))
		}
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	dict := testDictionary(t)
	var got units.Page
	for _, s := range madePages(6, 1) {
		for _, dc := range []*Dictionary{nil, dict} {
			n := testing.AllocsPerRun(20, func() {
				if enc, ok := e.Encode(s.page, s.template, dc); ok {
					if err := d.Decode(&got, enc, s.template, dc); err != nil {
						t.Fatal(err)
					}
				}
			})
			if n > allowedAllocs {
				t.Errorf("%s: %v allocations a page", s.name, n)
			}
		}
	}
}

func TestABaseMakesAnAlikePageSmall(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	r := newRand(21)
	base := textPage(r)
	page := *base
	copy(page[700:], base[690:3000]) // shifted text: runs see nothing of it
	enc, ok := e.BlockBase(&page, base)
	if !ok || enc.Kind != KindZstdBase || len(enc.Data) > 300 {
		t.Fatalf("a shifted copy takes %d bytes (%v)", len(enc.Data), ok)
	}
	enc.Sum = Checksum(&page)
	enc.Data = append([]byte(nil), enc.Data...)
	var got units.Page
	if err := d.Decode(&got, enc, base, nil); err != nil || got != page {
		t.Errorf("it does not come back: %v", err)
	}
	other := textPage(r)
	if err := d.Decode(&got, enc, other, nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("against another base: %v, want ErrCorrupt", err)
	}
	if err := d.Decode(&got, enc, nil, nil); !errors.Is(err, ErrBase) {
		t.Errorf("without a base: %v, want ErrBase", err)
	}
	if err := d.Decode(&got, Encoded{Kind: KindDelta}, nil, nil); !errors.Is(err, ErrBase) {
		t.Errorf("a delta without a base: %v, want ErrBase", err)
	}
}

// A guest chooses its pages. One that starts like a trained dictionary would be
// parsed as one by the decoder and taken as it is by the encoder.
func TestABaseThatLooksLikeADictionaryIsRefused(t *testing.T) {
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	var base units.Page
	copy(base[:], trained(t))
	page := base
	page[4000] ^= 1
	if enc, ok := e.BlockBase(&page, &base); ok {
		t.Errorf("encoded to %d bytes", len(enc.Data))
	}
	var got units.Page
	if err := d.Decode(&got, Encoded{Kind: KindZstdBase, Data: []byte{1, 2, 3}}, &base, nil); !errors.Is(err, ErrCorrupt) {
		t.Errorf("decoding against it: %v, want ErrCorrupt", err)
	}
}
