package link

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

func TestMarksAreDistinctAndDoNotOverlapThemselves(t *testing.T) {
	t.Parallel()
	marks := []Mark{Hello(), Welcome(), Reset()}
	for i, m := range marks {
		for j, other := range marks {
			if i != j && m == other {
				t.Errorf("marks %d and %d are equal", i, j)
			}
		}
		// Every inner occurrence of the first byte would need a real KMP table;
		// the scanner relies on there being no border in any matched prefix.
		for n := 2; n <= MarkSize; n++ {
			for b := 1; b < n; b++ {
				if bytes.Equal(m[:b], m[n-b:n]) {
					t.Errorf("mark %d: the first %d bytes have a border of %d", i, n, b)
				}
			}
		}
	}
}

func TestScannerFindsAMarkHoweverTheStreamIsCut(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		mark := Hello()
		// Noise that likes to look like the start of a mark.
		piece := rapid.OneOf(
			rapid.SliceOfN(rapid.Byte(), 0, 40),
			rapid.Map(rapid.IntRange(0, MarkSize-1), func(n int) []byte { return append([]byte(nil), mark[:n]...) }),
		)
		var noise []byte
		for _, p := range rapid.SliceOfN(piece, 0, 6).Draw(t, "noise") {
			noise = append(noise, p...)
		}
		stream := append(append(append([]byte(nil), noise...), mark[:]...), 'x', 'y')
		want := bytes.Index(stream, mark[:]) + MarkSize

		s := NewScanner(mark)
		base := 0
		for rest := stream; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "cut")
			at, found := s.Feed(rest[:n])
			if found {
				if base+at != want {
					t.Fatalf("found at %d, want %d", base+at, want)
				}
				return
			}
			base += n
			rest = rest[n:]
		}
		t.Fatalf("not found in %x", stream)
	})
}
