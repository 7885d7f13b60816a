package capture

import (
	"os"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

// BenchmarkGaps reads a real capture: AGENTZIP_CAPTURE names its folder.
func BenchmarkGaps(b *testing.B) {
	dir := os.Getenv("AGENTZIP_CAPTURE")
	if dir == "" {
		b.Skip("AGENTZIP_CAPTURE is not set: make one with `agentzip capture`")
	}
	s, err := Open(dir)
	if err != nil {
		b.Fatal(err)
	}
	pages := 0
	b.ReportAllocs()
	for b.Loop() {
		err := s.Gaps(func(g Gap) error {
			pages += len(g.Changed)
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(pages/b.N) * units.PageSize)
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(pages), "ns/page")
}
