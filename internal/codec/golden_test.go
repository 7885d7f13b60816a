package codec

import (
	"encoding/base64"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/agentzip/agentzip/internal/units"
)

var update = flag.Bool("update", false, "write this build's golden encodings")

// A golden is an encoding that a build once wrote to its pool.
type golden struct {
	Name string
	Kind string
	Sum  uint32
	Data string // base64
}

// goldens were written by a cgo and by a !cgo build (-update); each build must
// read both. The pages are goldenPages(), the dictionary testdata/dictionary.
const (
	goldenCgo   = "encoded-cgo.json"
	goldenNocgo = "encoded-nocgo.json"
)

// goldenBase is the seed of the page that golden blocks have as prefix.
const goldenBase = 79

func goldenPages() []sample {
	var out []sample
	for _, s := range madePages(77, 1) {
		if s.name != "random, hole" {
			out = append(out, s)
		}
	}
	return out
}

func goldenDictionary(t *testing.T) (*Dictionary, []byte) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "dictionary"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewDictionary(9, raw)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d, raw
}

func TestPagesOfBothBuildsAreRead(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	dict, _ := goldenDictionary(t)
	d := NewDecoder()
	defer d.Close()
	pages := map[string]sample{}
	for _, s := range goldenPages() {
		pages[s.name] = s
	}
	for _, file := range []string{goldenCgo, goldenNocgo} {
		kinds := map[Kind]int{}
		for _, g := range readGolden(t, file) {
			s := pages[g.Name]
			enc := g.encoded(t, dict)
			kinds[enc.Kind]++
			var got units.Page
			base := s.template
			if enc.Kind == KindZstdBase {
				base = textPage(newRand(goldenBase))
			}
			if err := d.Decode(&got, enc, base, dict); err != nil {
				t.Errorf("%s: %s of %s: %v", file, g.Kind, g.Name, err)
			} else if got != *s.page {
				t.Errorf("%s: %s of %s decodes to another page", file, g.Kind, g.Name)
			}
		}
		for k := KindRLE; k <= KindZstdBase; k++ {
			if kinds[k] == 0 {
				t.Errorf("%s holds no %v", file, k)
			}
		}
	}
}

// In a cgo build too, klauspost/compress reads what this build writes, so the
// builds agree on more than the committed pages.
func TestTheOtherLibraryReadsWhatThisBuildWrites(t *testing.T) {
	dict, raw := goldenDictionary(t)
	inner := uint32(raw[4]) | uint32(raw[5])<<8 | uint32(raw[6])<<16 | uint32(raw[7])<<24
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderDicts(raw))
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	e := NewEncoder(Options{})
	defer e.Close()
	read := 0
	for _, s := range append(madePages(78, 3), realPages(t, 300)...) {
		for _, dc := range []*Dictionary{nil, dict} {
			enc, ok := e.Block(s.page, dc)
			if !ok {
				continue
			}
			id := uint32(0)
			if enc.Kind == KindZstdDict {
				id = inner
			}
			got, err := dec.DecodeAll(appendFrame(nil, enc.Data, id), nil)
			if err != nil || string(got) != string(s.page[:]) {
				t.Fatalf("%s: %v: %v, %d bytes", s.name, enc.Kind, err, len(got))
			}
			read++
		}
	}
	if read < 100 {
		t.Errorf("only %d blocks compared", read)
	}
}

func (g golden) encoded(t *testing.T, dict *Dictionary) Encoded {
	t.Helper()
	data, err := base64.StdEncoding.DecodeString(g.Data)
	if err != nil {
		t.Fatal(err)
	}
	enc := Encoded{Sum: g.Sum, Data: data}
	for k := KindRLE; k <= KindZstdBase; k++ {
		if k.String() == g.Kind {
			enc.Kind = k
		}
	}
	if enc.Kind == KindZstdDict {
		enc.Operand = uint32(dict.ID())
	}
	return enc
}

func readGolden(t *testing.T, file string) []golden {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	var gs []golden
	if err := json.Unmarshal(b, &gs); err != nil {
		t.Fatal(err)
	}
	return gs
}

// writeGolden replaces this build's file; the cgo build also the dictionary, so
// run it first.
func writeGolden(t *testing.T) {
	t.Helper()
	file := goldenNocgo
	if builtWithCgo {
		file = goldenCgo
		if err := os.WriteFile(filepath.Join("testdata", "dictionary"), trained(t), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dict, _ := goldenDictionary(t)
	e := NewEncoder(Options{})
	defer e.Close()
	var gs []golden
	for _, s := range goldenPages() {
		if enc, ok := e.BlockBase(s.page, textPage(newRand(goldenBase))); ok {
			gs = append(gs, golden{s.name, enc.Kind.String(), Checksum(s.page), base64.StdEncoding.EncodeToString(enc.Data)})
		}
		for _, dc := range []*Dictionary{nil, dict} {
			enc, ok := e.Encode(s.page, s.template, dc)
			if ok && (dc == nil || enc.Kind == KindZstdDict) {
				gs = append(gs, golden{s.name, enc.Kind.String(), enc.Sum, base64.StdEncoding.EncodeToString(enc.Data)})
			}
		}
	}
	b, err := json.MarshalIndent(gs, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join("testdata", file), append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}
