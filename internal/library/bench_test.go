package library

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// benchLibrary is the library of a real template if AGENTZIP_BENCH_TEMPLATE names its
// folder, else of a root image made of this test's own binary and an image made of half of it.
func benchLibrary(b *testing.B) *Library {
	b.Helper()
	image, root := benchTemplate(b)
	b.Cleanup(func() {
		if err := image.Close(); err != nil {
			b.Error(err)
		}
		if err := root.Close(); err != nil {
			b.Error(err)
		}
	})
	l, err := Build(b.Context(), image, root)
	if err != nil {
		b.Fatal(err)
	}
	closeAtEnd(b, l)
	return l
}

func benchTemplate(b *testing.B) (*guestmem.Image, *os.File) {
	b.Helper()
	if dir := os.Getenv("AGENTZIP_BENCH_TEMPLATE"); dir != "" {
		info, err := os.Stat(filepath.Join(dir, "memory.img"))
		if err != nil {
			b.Fatal(err)
		}
		image, err := guestmem.LoadImage(filepath.Join(dir, "memory.img"), units.Bytes(info.Size()))
		if err != nil {
			b.Fatal(err)
		}
		root, err := os.Open(filepath.Join(dir, "root.ext4"))
		if err != nil {
			b.Fatal(err)
		}
		return image, root
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err != nil {
		b.Fatal(err)
	}
	var pages []*units.Page
	for ; len(data) >= units.PageSize; data = data[units.PageSize:] {
		pages = append(pages, (*units.Page)(data))
	}
	return imageOf(b, pages[:len(pages)/2]), rootOf(b, b.TempDir(), pages)
}

// sample returns about n pages that Find knows, with checksums and IDs, of the memory or the root image,
// in no order that helps a cache.
func sample(b *testing.B, l *Library, n int, ofRoot bool) (pages []units.Page, sums []uint32, ids []ID) {
	b.Helper()
	var all []ID
	for id := range l.All {
		if (uint32(id) >= l.frames) == ofRoot {
			all = append(all, id)
		}
	}
	for i := 0; i < len(all); i += max(1, len(all)/n) {
		var p units.Page
		if err := l.Read(&p, all[i]); err != nil {
			b.Fatal(err)
		}
		pages, sums, ids = append(pages, p), append(sums, codec.Checksum(&p)), append(ids, all[i])
	}
	return pages, sums, ids
}

// measure runs op with rising i and reports the median and the 99th percentile over runs of
// batch calls: the mean of a busy machine says more about its neighbours.
func measure(b *testing.B, batch int, op func(i int) bool) {
	b.Helper()
	took := make([]time.Duration, 0, 1<<20)
	begin := time.Now()
	for i := 0; b.Loop(); i++ {
		if !op(i) {
			b.Fatal("wrong answer")
		}
		if i%batch == batch-1 {
			if now := time.Now(); len(took) < cap(took) {
				took, begin = append(took, now.Sub(begin)), now
			}
		}
	}
	if len(took) > 0 {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2])/float64(batch), "p50-ns")
		b.ReportMetric(float64(took[len(took)*99/100])/float64(batch), "p99-ns")
	}
}

func BenchmarkFind(b *testing.B) {
	l := benchLibrary(b)
	b.Run("miss", func(b *testing.B) {
		page := pageOf(1 << 40)
		measure(b, 256, func(i int) bool {
			_, ok := l.Find(page, uint32(i)*0x9e3779b1) //nolint:gosec // G115: any sums
			return !ok
		})
	})
	for name, ofRoot := range map[string]bool{"hit-memory": false, "hit-root": true} {
		pages, sums, _ := sample(b, l, 4096, ofRoot)
		b.Run(name, func(b *testing.B) {
			measure(b, 1, func(i int) bool {
				_, ok := l.Find(&pages[i%len(pages)], sums[i%len(pages)])
				return ok
			})
		})
	}
}

func BenchmarkRead(b *testing.B) {
	l := benchLibrary(b)
	for name, ofRoot := range map[string]bool{"memory": false, "root": true} {
		_, _, ids := sample(b, l, 4096, ofRoot)
		b.Run(name, func(b *testing.B) {
			var dst units.Page
			measure(b, 1, func(i int) bool { return l.Read(&dst, ids[i%len(ids)]) == nil })
		})
	}
}

func BenchmarkBuild(b *testing.B) {
	image, root := benchTemplate(b)
	defer image.Close()
	defer root.Close()
	for b.Loop() {
		l, err := Build(b.Context(), image, root)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(l.Size()), "B")
		b.ReportMetric(float64(l.Size())/float64(l.Pages()), "B/page")
		b.ReportMetric(float64(l.Pages()), "pages")
		l.Close()
	}
}

func BenchmarkOpen(b *testing.B) {
	image, root := benchTemplate(b)
	defer image.Close()
	defer root.Close()
	path := filepath.Join(b.TempDir(), "index")
	l, err := Build(b.Context(), image, root)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	if err := l.WriteIndex(path); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		l, err := Open(b.Context(), path, image, root)
		if err != nil {
			b.Fatal(err)
		}
		l.Close()
	}
}
