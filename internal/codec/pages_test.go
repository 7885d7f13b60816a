package codec

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// A sample is a page with the template's page of the same frame (nil: hole).
type sample struct {
	name           string
	page, template *units.Page
}

// madePages returns pages that look like a guest's: each class of the run
// coder and of zstd, with and without a template. The same seed, the same pages.
func madePages(seed uint64, perClass int) []sample {
	r := rand.New(rand.NewPCG(seed, 1))
	classes := []struct {
		name string
		make func(r *rand.Rand) *units.Page
	}{
		{"zeros", func(*rand.Rand) *units.Page { return new(units.Page) }},
		{"one byte", func(r *rand.Rand) *units.Page {
			var p units.Page
			fill(p[:], byte(r.Uint32()))
			return &p
		}},
		{"pointers", pointerPage},
		{"page table", func(r *rand.Rand) *units.Page {
			var p units.Page
			base := r.Uint64()&0x3ffff000 | 0x8000000000000067
			for i := 0; i < units.PageSize; i += 8 {
				binary.LittleEndian.PutUint64(p[i:], base+uint64(i/8)<<12)
			}
			return &p
		}},
		{"text", textPage},
		{"heap", heapPage},
		{"random", func(r *rand.Rand) *units.Page {
			var p units.Page
			for i := 0; i < units.PageSize; i += 8 {
				binary.LittleEndian.PutUint64(p[i:], r.Uint64())
			}
			return &p
		}},
	}
	var out []sample
	for _, c := range classes {
		for range perClass {
			p := c.make(r)
			out = append(out, sample{c.name + ", hole", p, nil})
			q := *p
			for range 1 + r.IntN(12) { // counters, pointers
				binary.LittleEndian.PutUint32(q[r.IntN(units.PageSize/4)*4:], r.Uint32N(1<<20))
			}
			out = append(out, sample{c.name + ", few changes", &q, p})
			half := *p
			clear(half[units.PageSize/2:])
			out = append(out, sample{c.name + ", half freed", &half, p})
			out = append(out, sample{c.name + ", other template", p, c.make(r)})
		}
	}
	return out
}

func pointerPage(r *rand.Rand) *units.Page {
	var p units.Page
	base := uint64(0xffff888000000000) | r.Uint64()&0xffff000
	for i := 0; i < units.PageSize; i += 8 {
		if r.IntN(3) > 0 {
			binary.LittleEndian.PutUint64(p[i:], base+r.Uint64N(1<<16)&^7)
		}
	}
	return &p
}

// lines is what all text pages share, whatever their seed: a dictionary can
// know it, a page alone repeats little of it.
var lines = func() (lines [400]string) {
	r := rand.New(rand.NewPCG(7, 7))
	for i := range lines {
		l := make([]byte, 15+r.IntN(50))
		for k := range l {
			l[k] = "eeeaaatttoinshrdlucmfwyp_ .()="[r.IntN(30)]
		}
		lines[i] = string(l)
	}
	return lines
}()

func textPage(r *rand.Rand) *units.Page {
	var b bytes.Buffer
	for b.Len() < units.PageSize {
		fmt.Fprintf(&b, "%*s%s\n", 4*r.IntN(3), "", lines[r.IntN(len(lines))])
	}
	return (*units.Page)(b.Bytes())
}

// heapPage is a run of small objects: a header, a reference count, a type
// pointer, a size and some payload.
func heapPage(r *rand.Rand) *units.Page {
	var p units.Page
	types := [4]uint64{0x7f1200955d40, 0x7f1200955ee0, 0x7f12009560a0, 0x7f1200957a80}
	for i := 0; i+64 <= units.PageSize; i += 48 + 16*r.IntN(4) {
		binary.LittleEndian.PutUint64(p[i:], uint64(1+r.IntN(4)))
		binary.LittleEndian.PutUint64(p[i+8:], types[r.IntN(4)])
		binary.LittleEndian.PutUint64(p[i+16:], uint64(r.IntN(40)))
		binary.LittleEndian.PutUint64(p[i+24:], r.Uint64())
		copy(p[i+32:], "__name__\x00module\x00"[r.IntN(8):])
	}
	return &p
}

// realPages returns pages for benchmarks: those of the dump that
// AGENTZIP_PAGES names (records of a frame number in 8 bytes and a page; its
// template's memory in AGENTZIP_TEMPLATE, optional), or else pages of this
// process's own memory. Zero pages are left out: the pager never encodes them.
func realPages(tb testing.TB, most int) []sample {
	tb.Helper()
	if name := os.Getenv("AGENTZIP_PAGES"); name != "" {
		return dumpedPages(tb, name, os.Getenv("AGENTZIP_TEMPLATE"), most)
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		tb.Skipf("no real pages: %v", err)
	}
	defer maps.Close()
	mem, err := os.Open("/proc/self/mem")
	if err != nil {
		tb.Skipf("no real pages: %v", err)
	}
	defer mem.Close()
	var out []sample
	for s := bufio.NewScanner(maps); s.Scan() && len(out) < most; {
		var from, to int64
		var mode string
		if _, err := fmt.Sscanf(s.Text(), "%x-%x %s", &from, &to, &mode); err != nil || !strings.HasPrefix(mode, "r") || from < 0 {
			continue
		}
		for n := 0; from < to && n < most/4; from += units.PageSize {
			var p units.Page
			if _, err := mem.ReadAt(p[:], from); err != nil {
				break
			}
			if !IsZero(&p) {
				n++
				out = append(out, sample{page: &p})
			}
		}
	}
	return out
}

func dumpedPages(tb testing.TB, name, template string, most int) []sample {
	tb.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		tb.Fatal(err)
	}
	var t *os.File
	if template != "" {
		if t, err = os.Open(template); err != nil {
			tb.Fatal(err)
		}
		defer t.Close()
	}
	const record = 8 + units.PageSize
	step := max(1, len(b)/record/most)
	var out []sample
	for ; len(b) >= record; b = b[min(len(b), step*record):] {
		s := sample{page: (*units.Page)(b[8:record])}
		if IsZero(s.page) {
			continue
		}
		if t != nil {
			var p units.Page
			if _, err := t.ReadAt(p[:], int64(binary.LittleEndian.Uint64(b))*units.PageSize); err != nil {
				tb.Fatal(err)
			}
			if p == *s.page {
				continue // the pager drops it without encoding
			}
			if !IsZero(&p) {
				s.template = &p
			}
		}
		out = append(out, s)
	}
	return out
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }
