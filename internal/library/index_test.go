package library

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

var update = flag.Bool("update", false, "write the golden file anew")

func sorted(set map[record]bool) []record {
	return slices.SortedFunc(maps.Keys(set), func(a, b record) int {
		if a.before(b) {
			return -1
		}
		return 1
	})
}

func equalRecords(a, b []record) bool { return slices.Equal(a, b) }

// indexOf returns the bytes of a library's index.
func indexOf(t testing.TB, l *Library) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := l.writeTo(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// repair sets size and checksum of an index right, after a test changed it.
func repair(index []byte) []byte {
	if len(index) < headerBytes+trailerBytes {
		return index
	}
	index = slices.Clone(index)
	binary.LittleEndian.PutUint64(index[16:], uint64(len(index)))
	sum := sha256.Sum256(index[:len(index)-trailerBytes])
	copy(index[len(index)-trailerBytes:], sum[:])
	return index
}

// open opens an index of these bytes and closes it again.
func (f *fixture) open(t testing.TB, index []byte) error {
	t.Helper()
	path := filepath.Join(t.TempDir(), "index")
	if err := os.WriteFile(path, index, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := Open(t.Context(), path, f.image, f.root)
	if err != nil {
		return err
	}
	return l.Close()
}

func TestTheFileIsTheGoldenOne(t *testing.T) {
	got := indexOf(t, small(t).build(t))
	path := filepath.Join("testdata", "index.v1")
	if *update {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the format changed: raise formatVersion, and read the old one or say how to go on (-golden +now):\n%s", diff)
	}
}

func TestEveryFlippedBitOfAnIndexIsNoticed(t *testing.T) {
	f := small(t)
	index := indexOf(t, f.build(t))
	if err := f.open(t, index); err != nil {
		t.Fatal(err)
	}
	s, err := newSource(f.image, f.root)
	if err != nil {
		t.Fatal(err)
	}
	defer s.root.Close()
	for bit := range len(index) * 8 {
		bad := slices.Clone(index)
		bad[bit/8] ^= 1 << (bit % 8)
		_, _, err := s.readIndex(bytes.NewReader(bad), int64(len(bad)))
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrFormat) && !errors.Is(err, ErrMismatch) {
			t.Fatalf("bit %d: got %v", bit, err)
		}
		if !strings.Contains(err.Error(), "template build") {
			t.Errorf("bit %d: %q does not say what to do", bit, err)
		}
	}
}

func TestAnIndexOfAnotherLengthIsNoticed(t *testing.T) {
	f := small(t)
	index := indexOf(t, f.build(t))
	for n := range index {
		if err := f.open(t, index[:n]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("cut to %d bytes: got %v, want ErrDamaged", n, err)
		}
	}
	if err := f.open(t, append(slices.Clip(index), 0)); !errors.Is(err, ErrDamaged) {
		t.Errorf("one byte longer: got %v, want ErrDamaged", err)
	}
	// The file shrinks between its stat and its reading.
	s, err := newSource(f.image, f.root)
	if err != nil {
		t.Fatal(err)
	}
	defer s.root.Close()
	for n := range index {
		if _, _, err := s.readIndex(bytes.NewReader(index[:n]), int64(len(index))); !errors.Is(err, ErrDamaged) {
			t.Fatalf("shrunk to %d bytes: got %v, want ErrDamaged", n, err)
		}
	}
}

// section makes a section's bytes.
func section(name string, payload []byte) []byte {
	s := append([]byte(name), 0, 0, 0, 0)
	return append(binary.LittleEndian.AppendUint64(s, uint64(len(payload))), payload...)
}

func TestIndexesThatDoNotFitAreRefusedWithTheReason(t *testing.T) {
	f := small(t)
	whole := indexOf(t, f.build(t))
	header, records := whole[:headerBytes], whole[headerBytes+sectionBytes:len(whole)-trailerBytes]
	join := func(sections ...[]byte) []byte {
		index := slices.Concat(header, slices.Concat(sections...), make([]byte, trailerBytes))
		binary.LittleEndian.PutUint32(index[12:], uint32(len(sections))) //nolint:gosec // G115: small
		return repair(index)
	}
	change := func(at int, to ...byte) []byte {
		index := slices.Clone(whole)
		copy(index[at:], to)
		return repair(index)
	}
	sums := section(sumsType, records)
	firstRecord := headerBytes + sectionBytes
	for _, tt := range []struct {
		name  string
		index []byte
		want  error // nil: it is accepted
		words string
	}{
		{"the same, put together anew", join(sums), nil, ""},
		{"an unknown section that may be skipped, before", join(section("xtra", make([]byte, 9999)), sums), nil, ""},
		{"an unknown section that may be skipped, behind", join(sums, section("xtra", nil)), nil, ""},
		{"an unknown section that may not be skipped", join(sums, section("MORE", []byte("x"))), ErrFormat, `"MORE"`},
		{"a section twice", join(sums, sums), ErrDamaged, "twice"},
		{"no list of pages", join(), ErrDamaged, "missing"},
		{"a newer version", change(8, 2), ErrFormat, "version 2"},
		{"another magic", change(0, 'X'), ErrDamaged, "no index"},
		{"more sections than there are", change(12, 2), ErrDamaged, "ends within"},
		{"a million sections", change(12, 0, 0, 16), ErrDamaged, "1048576 sections"},
		{"fewer sections than there are", change(12, 0), ErrDamaged, "follow the last section"},
		{"more frames", change(24, 8), ErrMismatch, "8 pages of memory"},
		{"fewer blocks", change(28, 7), ErrMismatch, "7 blocks"},
		{"another memory", change(32, 1, 2, 3), ErrMismatch, "memory image"},
		{"a section head with something in it", change(headerBytes+4, 1), ErrDamaged, "malformed"},
		{"a section longer than the file", change(headerBytes+8, 255, 255, 255, 255, 255, 255, 255, 255), ErrDamaged, "only"},
		{"half a record", join(section(sumsType, records[:recordBytes/2])), ErrDamaged, "fit no list"},
		{"more records than pages", join(section(sumsType, make([]byte, 16*recordBytes))), ErrDamaged, "fit no list"},
		{"a record twice", join(section(sumsType, slices.Concat(records[:recordBytes], records))), ErrDamaged, "out of order"},
		{"records in another order", join(section(sumsType, slices.Concat(records[recordBytes:], records[:recordBytes]))), ErrDamaged, "out of order"},
		{"a page that is not there", change(firstRecord+4, 15), ErrDamaged, "names 0xf"},
		{"a page that is a hole", change(firstRecord+4, 1), ErrDamaged, "names 0x1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := f.open(t, tt.index)
			if !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			if tt.want == nil {
				return
			}
			for _, w := range []string{tt.words, "template build"} {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
}

func TestTheIndexOfAnotherTemplateIsRefused(t *testing.T) {
	f := small(t)
	index := indexOf(t, f.build(t))
	for name, other := range map[string]*fixture{
		"one page of memory":     newFixture(t, []uint64{1, 0, 2, 1, 7, 0, 0}, []uint64{0, 4, 2, 5, 5, 0, 6, 0}),
		"a copy in memory":       newFixture(t, []uint64{1, 0, 2, 2, 3, 0, 0}, []uint64{0, 4, 2, 5, 5, 0, 6, 0}),
		"one block of the root":  newFixture(t, []uint64{1, 0, 2, 1, 3, 0, 0}, []uint64{0, 4, 2, 5, 5, 0, 7, 0}),
		"the length of the root": newFixture(t, []uint64{1, 0, 2, 1, 3, 0, 0}, []uint64{0, 4, 2, 5, 5, 0, 6}),
	} {
		if err := other.open(t, index); !errors.Is(err, ErrMismatch) {
			t.Errorf("another %s: got %v, want ErrMismatch", name, err)
		}
	}
}

func TestAnIndexIsNeverOverwritten(t *testing.T) {
	l := small(t).build(t)
	path := filepath.Join(t.TempDir(), "index")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.WriteIndex(path); !errors.Is(err, os.ErrExist) {
		t.Errorf("got %v, want that the file exists", err)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "mine" {
		t.Errorf("the file there is now %q, %v", data, err)
	}
}

func TestAMissingIndexIsNotCalledDamaged(t *testing.T) {
	f := small(t)
	_, err := Open(t.Context(), filepath.Join(t.TempDir(), "index"), f.image, f.root)
	if !errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrDamaged) {
		t.Errorf("got %v, want os.ErrNotExist alone", err)
	}
}

// FuzzOpen feeds the loader bytes, with size and checksum set right so that they are no
// defence, and uses what comes of it.
func FuzzOpen(f *testing.F) {
	fix := small(f)
	index := indexOf(f, fix.build(f))
	f.Add(index)
	f.Add(index[:headerBytes+trailerBytes])
	f.Add(slices.Concat(index[:len(index)-trailerBytes], section("xtra", []byte("x")), index[len(index)-trailerBytes:]))
	s, err := newSource(fix.image, fix.root)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.root.Close() })
	f.Fuzz(func(t *testing.T, index []byte) {
		index = repair(index)
		digest, records, err := s.readIndex(bytes.NewReader(index), int64(len(index)))
		if err != nil {
			if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrMismatch) && !errors.Is(err, ErrFormat) {
				t.Fatalf("unnamed error: %v", err)
			}
			return
		}
		_ = s.checkRoot(records)
		l, err := s.library(records, digest)
		if err != nil {
			t.Fatal(err)
		}
		defer l.table.close()
		var page units.Page
		n := 0
		for id, sum := range l.All {
			_ = l.Read(&page, id)
			for i := range uint64(7) {
				if got, ok := l.Find(pageOf(i), sum); ok && *fix.pages()[got] != *pageOf(i) {
					t.Fatalf("page %d is found as %#x", i, got)
				}
			}
			n++
		}
		if n != len(records) {
			t.Fatalf("%d records of %d are in the table", n, len(records))
		}
	})
}

func (f *fixture) pages() []*units.Page { return slices.Concat(f.memory, f.blocks) }
