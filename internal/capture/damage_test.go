package capture

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

var update = flag.Bool("update", false, "write the golden files again")

// The golden folder was written by the first version of format 1. It must be readable for
// as long as there is a format 1.
func TestTheGoldenCaptureIsRead(t *testing.T) {
	const dir = "testdata/golden"
	if *update {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		write(t, dir, small())
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(small(), replay(t, s, 2), wholePages); d != "" {
		t.Errorf("pages (-want +got):\n%s", d)
	}
	im, err := s.Image()
	if err != nil {
		t.Fatal(err)
	}
	defer im.Close()
	root, err := s.Root()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if *im.Page(3) != pageOf(3) || im.Resident() != 67*units.PageSize {
		t.Error("memory differs")
	}
}

// The bytes inside a zstd frame are the format; zstd's own may change with its version.
func TestTheBytesOfARecordAreThoseOfFormat1(t *testing.T) {
	var out bytes.Buffer
	r := newRecordWriter()
	if err := r.begin(&out, header{kind: kindGap, frames: 300, sibling: 2, call: 130}); err != nil {
		t.Fatal(err)
	}
	page := pageOf(1)
	for _, e := range []struct {
		op op
		f  units.Frame
	}{{opSame, 5}, {opSame, 6}, {opContent, 7}, {opContent, 8}, {opGone, 9}, {opContent, 298}} {
		if err := r.add(e.op, e.f, &page); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.end(); err != nil {
		t.Fatal(err)
	}
	got := strings.ReplaceAll(out.String(), string(page[:]), "<page>")
	want := "AZCAP1G\xac\x02\x02\x82\x01" + // frames 300, sibling 2, call 130
		"\x15\x02" + // skip 5, unchanged: 2
		"\x02\x02<page><page>" +
		"\x03\x01" + // gone: 1
		"\x82\x09\x01<page>" + // skip 288
		"\x00"
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("record (-want +got):\n%s", d)
	}
}

// copyDir copies the files of a capture.
func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "c")
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

// readAll reads everything there is in a capture.
func readAll(dir string) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	im, err := s.Image()
	if err != nil {
		return err
	}
	im.Close()
	root, err := s.Root()
	if err != nil {
		return err
	}
	root.Close()
	return s.Gaps(func(Gap) error { return nil })
}

func TestDamagedFilesAreNamed(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	write(t, good, small())
	for _, file := range []string{infoFile, memoryFile, rootFile, siblingFile(0), siblingFile(1)} {
		data, err := os.ReadFile(filepath.Join(good, file))
		if err != nil {
			t.Fatal(err)
		}
		damage := map[string][]byte{
			"cut short":       data[:len(data)/2],
			"empty":           {},
			"one byte longer": append(bytes.Clone(data), 'x'),
			"missing":         nil,
		}
		for name, content := range damage {
			if file == infoFile && name == "missing" {
				continue // no capture at all; tested elsewhere
			}
			dir := copyDir(t, good)
			path := filepath.Join(dir, file)
			if content == nil {
				err = os.Remove(path)
			} else {
				err = os.WriteFile(path, content, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			err := readAll(dir)
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), file) {
				t.Errorf("%s %s: %v", file, name, err)
			}
		}
	}
}

func TestFlippedBitsOfThePagesAreFound(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	write(t, good, small())
	dir := copyDir(t, good)
	for _, file := range []string{memoryFile, rootFile, siblingFile(0), siblingFile(1)} {
		path := filepath.Join(dir, file)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(data)*8; i += 1 + len(data)/8 { // some 60 places a file
			data[i/8] ^= 1 << (i % 8)
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := readAll(dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), file) {
				// A few bits of a zstd header mean nothing to a decoder: then nothing may differ.
				if s, oerr := Open(dir); err != nil || oerr != nil || cmp.Diff(small(), replay(t, s, 2), wholePages) != "" {
					t.Errorf("%s bit %d: %v", file, i, err)
				}
			}
			data[i/8] ^= 1 << (i % 8)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDescriptionsThatCannotBeAreRefused(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	write(t, good, small())
	for name, change := range map[string]func(*Info){
		"no memory":                   func(i *Info) { i.Memory.Size = 0 },
		"memory of half a page":       func(i *Info) { i.Memory.Size += 100 },
		"memory beyond all bounds":    func(i *Info) { i.Memory.Size = 1 << 60 },
		"a root image below nothing":  func(i *Info) { i.Root.Size = -1 },
		"more pages than there are":   func(i *Info) { i.Memory.Pages = testFrames + 1 },
		"no siblings":                 func(i *Info) { i.Siblings = nil },
		"a gap of nobody":             func(i *Info) { i.Gaps[0].Sibling = 2 },
		"a gap of nobody below":       func(i *Info) { i.Gaps[0].Sibling = -1 },
		"gaps out of order":           func(i *Info) { i.Gaps[3].At = 0 },
		"calls out of order":          func(i *Info) { i.Gaps[2].Call = 1 },
		"private pages beyond memory": func(i *Info) { i.Gaps[0].Private = testFrames + 1 },
		"more changed than private":   func(i *Info) { i.Gaps[0].Changed = 5 },
		"more gone than there were":   func(i *Info) { i.Gaps[0].Gone = 1 },
		"a gap at another place":      func(i *Info) { i.Gaps[2].Offset++ },
		"a gap of no length":          func(i *Info) { i.Gaps[0].Length = 0 },
		"a gap without end":           func(i *Info) { i.Gaps[5].Length = 1<<63 - 1 },
		"a long name":                 func(i *Info) { i.Siblings[0].Name = strings.Repeat("x", maxText+1) },
		"a long command":              func(i *Info) { i.Gaps[0].Command = strings.Repeat("x", maxText+1) },
		"fewer pages than the record": func(i *Info) { i.Gaps[0].Private, i.Gaps[0].Changed = 3, 3 },
		"more pages than the record":  func(i *Info) { i.Gaps[0].Private = 5 },
		"another call":                func(i *Info) { i.Gaps[0].Call = 0 },
		"another digest":              func(i *Info) { i.Root.Blocks = "00" },
		"fewer pages of memory":       func(i *Info) { i.Memory.Pages-- },
		"more memory":                 func(i *Info) { i.Memory.Size += units.PageSize },
	} {
		dir := copyDir(t, good)
		path := filepath.Join(dir, infoFile)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var info Info
		if err := json.Unmarshal(data, &info); err != nil {
			t.Fatal(err)
		}
		change(&info)
		if data, err = json.Marshal(info); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := readAll(dir); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOtherVersionsAreNamed(t *testing.T) {
	for text, want := range map[string]error{
		`{"format": 2, "new": true}`:  ErrFormat,
		`{}`:                          ErrFormat,
		`{"format": 1, "extra": 1}`:   ErrDamaged,
		`{"format": 1`:                ErrDamaged,
		`[]`:                          ErrDamaged,
		`{"format": 1, "gaps": "no"}`: ErrDamaged,
	} {
		_, err := parseInfo([]byte(text))
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", text, err, want)
		}
	}
}

// records of gaps that no Writer writes, with what is said of them. The gap is call 1 of
// sibling 0: nothing was there before.
func TestRecordsThatCannotBeAreRefused(t *testing.T) {
	const head = "AZCAP1G\x08\x00\x01" // 8 frames
	page := strings.Repeat("p", units.PageSize)
	for text, want := range map[string]string{
		"":                        "cut short",
		"AZCAP2G\x08\x00\x01\x00": "begins with",
		"AZCAP1M\x08\x00":         "begins with",
		"AZCAP1G\x09\x00\x01\x00": "of sibling",
		"AZCAP1G\x08\x01\x01\x00": "of sibling",
		"AZCAP1G\x08\x00\x02\x00": "of sibling",
		"AZCAP1G\x08\x00":         "cut short",
		head:                      "cut short",
		head + "\x00\x00":         "follows",
		head + "\x04\x01":         "no known kind",
		head + "\x02":             "cut short",
		head + "\x02\x00":         "does not fit",
		head + "\x02\x09":         "does not fit",
		head + "\x22\x01":         "does not fit",
		head + "\x1e\x02":         "does not fit",
		head + "\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x01": "does not fit",
		head + "\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01": "does not fit",
		head + "\x02\x01" + page[1:]:                          "cut short",
		head + "\x02\x02" + page:                              "more than 1 changed", // the description knows of one
		head + "\x01\x01\x00":                                 "not there before",
		head + "\x03\x01\x00":                                 "not there before",
		head + "\x00":                                         "it has 0 private",
		head + "\x02\x01" + page + "\x00":                     "",
	} {
		err := readRecord([]byte(text))
		switch {
		case want == "" && err != nil:
			t.Errorf("%q: %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

// readRecord reads plain bytes as the first gap of sibling 0 in a memory of 8 frames, with
// one changed page.
func readRecord(plain []byte) error {
	dir, err := os.MkdirTemp("", "agentzip-capture-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	p, err := newPacker()
	if err != nil {
		return err
	}
	var out bytes.Buffer
	p.zstd.Reset(&out)
	_, err = p.zstd.Write(plain)
	if err = errors.Join(err, p.zstd.Close(), os.WriteFile(filepath.Join(dir, siblingFile(0)), out.Bytes(), 0o600)); err != nil {
		return err
	}
	s := &Set{dir: dir, info: &Info{
		Memory: Content{Size: 8 * units.PageSize}, Siblings: make([]Sibling, 1),
		Gaps: []GapInfo{{Call: 1, Private: 1, Changed: 1, Length: int64(out.Len())}},
	}}
	return s.Gaps(func(Gap) error { return nil })
}

// FuzzRecord: no record of a gap makes a reader do more than return an error, and what it
// takes is a gap. The first byte says how many private, changed and gone pages the
// description knows of.
func FuzzRecord(f *testing.F) {
	page := strings.Repeat("p", units.PageSize)
	for _, s := range []string{
		"", "\x00AZCAP1G\x08\x00\x01\x00", "\x05AZCAP1G\x08\x00\x01\x02\x01" + page + "\x00",
		"\x11AZCAP1G\x08\x00\x01\x01\x01\x03\x01\x00", "\x05AZCAP1G\x08\x00\x01\x1e\x01" + page + "\x00",
	} {
		f.Add([]byte(s))
	}
	s := &Set{info: &Info{Memory: Content{Size: 8 * units.PageSize}, Gaps: []GapInfo{{Changed: 8}}}}
	r, err := s.newGapReader()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(r.close)
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return
		}
		g := GapInfo{Call: 1, Private: int64(data[0] & 3), Changed: int64(data[0] >> 2 & 3), Gone: int64(data[0] >> 4 & 3)}
		r.private = [][]uint64{{0b1010_1010}}
		if r.unpack.record.begin(bytes.NewReader(data[1:]), r.header(g)) != nil || r.runs(g) != nil {
			return
		}
		frames := uint64(0)
		for i, f := range r.gap.Frames {
			if f >= 8 || i > 0 && f <= r.gap.Frames[i-1] {
				t.Fatalf("frames %v", r.gap.Frames)
			}
			frames |= 1 << f
		}
		for _, f := range r.gap.Gone {
			if frames&(1<<f) != 0 || 0b1010_1010&(1<<f) == 0 {
				t.Fatalf("frame %d is gone, of %08b before and %08b now", f, 0b1010_1010, frames)
			}
		}
		if frames != r.private[0][0] || int64(len(r.gap.Frames)) != g.Private || int64(len(r.gap.Changed)) != g.Changed {
			t.Fatalf("frames %v, noted %08b, changed %d of %+v", r.gap.Frames, r.private[0][0], len(r.gap.Changed), g)
		}
	})
}

// FuzzInfo: a description that is accepted keeps to its bounds.
func FuzzInfo(f *testing.F) {
	data, err := os.ReadFile("testdata/golden/capture.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"format":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := parseInfo(data)
		if err != nil {
			if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		if info.Frames() <= 0 || info.Memory.Size > maxMemory || info.Bytes() < 0 {
			t.Fatalf("%d frames, %d bytes", info.Frames(), info.Bytes())
		}
		end := make([]int64, len(info.Siblings))
		for _, g := range info.Gaps {
			if g.Offset != end[g.Sibling] || g.Changed > int64(info.Frames()) || g.Changed < 0 {
				t.Fatalf("gap %+v", g)
			}
			end[g.Sibling] += g.Length
		}
	})
}
