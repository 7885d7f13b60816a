package codec

import (
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// The benchmarks run on real pages (see realPages); AGENTZIP_PAGES and
// AGENTZIP_TEMPLATE name a guest's. ns/page, and saved in percent of the pages.

func benchPages(b *testing.B) ([]sample, *Dictionary) {
	b.Helper()
	ss := realPages(b, 4000)
	var train []units.Page
	test := ss[:0:0]
	for i, s := range ss {
		if i%2 == 0 && len(train) < 1000 {
			train = append(train, *s.page)
		} else {
			test = append(test, s)
		}
	}
	raw, err := Train(train, 64<<10)
	if err != nil {
		b.Fatal(err)
	}
	dict, err := NewDictionary(1, raw)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(dict.Close)
	return test, dict
}

// report turns the figures of b into those of a page.
func report(b *testing.B, pages, bytes int) {
	b.Helper()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(pages), "ns/page")
	if bytes >= 0 {
		b.ReportMetric(100-100*float64(bytes)/float64(pages)/units.PageSize, "%saved")
	}
}

func BenchmarkEncode(b *testing.B) {
	ss, dict := benchPages(b)
	e := NewEncoder(Options{})
	defer e.Close()
	size := func(data []byte, ok bool) int {
		if !ok {
			return units.PageSize
		}
		return len(data)
	}
	for _, c := range []struct {
		name   string
		encode func(s *sample) int
	}{
		{"rle", func(s *sample) int {
			n := encodeRuns(&e.a, s.page, nil, MaxData)
			return size(e.a[:max(n, 0)], n >= 0)
		}},
		{"delta", func(s *sample) int {
			n := encodeRuns(&e.a, s.page, s.template, MaxData)
			return size(e.a[:max(n, 0)], n >= 0)
		}},
		{"zstd", func(s *sample) int {
			enc, ok := e.Block(s.page, nil)
			return size(enc.Data, ok)
		}},
		{"zstd-dict", func(s *sample) int {
			enc, ok := e.Block(s.page, dict)
			return size(enc.Data, ok)
		}},
		{"zstd-base", func(s *sample) int {
			base := s.template
			if base == nil {
				base = ss[0].page
			}
			enc, ok := e.BlockBase(s.page, base)
			return size(enc.Data, ok)
		}},
		{"checksum", func(s *sample) int {
			Checksum(s.page)
			return units.PageSize
		}},
		{"best", func(s *sample) int {
			enc, ok := e.Encode(s.page, s.template, dict)
			return size(enc.Data, ok)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			pages, bytes := 0, 0
			for b.Loop() {
				bytes += c.encode(&ss[pages%len(ss)])
				pages++
			}
			report(b, pages, bytes)
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	ss, dict := benchPages(b)
	e, d := NewEncoder(Options{}), NewDecoder()
	defer e.Close()
	defer d.Close()
	encoded := map[Kind][]Encoded{}
	templates := map[Kind][]*units.Page{}
	add := func(s sample, enc Encoded) {
		enc.Data = append([]byte(nil), enc.Data...)
		encoded[enc.Kind] = append(encoded[enc.Kind], enc)
		templates[enc.Kind] = append(templates[enc.Kind], s.template)
	}
	for _, s := range ss {
		if s.template != nil {
			if enc, ok := e.BlockBase(s.page, s.template); ok {
				enc.Sum = Checksum(s.page)
				add(s, enc)
			}
		}
		for _, dc := range []*Dictionary{nil, dict} {
			if enc, ok := e.Encode(s.page, s.template, dc); ok {
				add(s, enc)
			}
		}
	}
	for k := KindRLE; k <= KindZstdBase; k++ {
		b.Run(k.String(), func(b *testing.B) {
			if len(encoded[k]) == 0 {
				b.Skip("no such pages")
			}
			var dst units.Page
			pages := 0
			for b.Loop() {
				i := pages % len(encoded[k])
				if err := d.Decode(&dst, encoded[k][i], templates[k][i], dict); err != nil {
					b.Fatal(err)
				}
				pages++
			}
			report(b, pages, -1)
		})
	}
}
