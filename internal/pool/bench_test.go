package pool

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/codec"
)

// held puts n entries of a guest's sizes.
func held(b *testing.B, p *Pool, n int) (encs []codec.Encoded, hs []Handle) {
	b.Helper()
	r := rand.New(rand.NewPCG(9, 9))
	encs, hs = make([]codec.Encoded, 4096), make([]Handle, n)
	for i := range encs {
		encs[i] = entry(r, size(r))
	}
	for i := range hs {
		hs[i] = put(b, p, encs[i%len(encs)])
	}
	return encs, hs
}

// perPage reports the time of a page, by the clock and of the CPU: on a machine that does
// other things too only the latter says something.
func perPage(b *testing.B, pages int, took, cpu time.Duration) {
	b.Helper()
	b.ReportMetric(float64(took.Nanoseconds())/float64(pages), "ns/page")
	b.ReportMetric(float64(cpu.Nanoseconds())/float64(pages), "cpu-ns/page")
	b.ReportMetric(0, "ns/op")
}

func BenchmarkPutRelease(b *testing.B) {
	p := open(b, 0)
	encs, hs := held(b, p, 32768)
	n, cpu := 0, cpuTime(b)
	for b.Loop() {
		i := n % len(hs)
		_, _, _ = p.Release(hs[i])
		hs[i] = put(b, p, encs[(n*7)%len(encs)])
		n++
	}
	perPage(b, n, b.Elapsed(), cpuTime(b)-cpu)
}

func BenchmarkView(b *testing.B) {
	for name, stride := range map[string]int{"scattered": 7919, "one": 0} {
		b.Run(name, func(b *testing.B) {
			p := open(b, 0)
			_, hs := held(b, p, 32768)
			r := p.NewReader()
			defer r.Close()
			n, bytes, cpu := 0, 0, cpuTime(b)
			for b.Loop() {
				r.Pin()
				enc, err := r.View(hs[n*stride%len(hs)])
				if err != nil {
					b.Fatal(err)
				}
				bytes += len(enc.Data)
				r.Unpin()
				n++
			}
			if bytes < 0 {
				b.Fatal("nothing viewed")
			}
			perPage(b, n, b.Elapsed(), cpuTime(b)-cpu)
		})
	}
}

func BenchmarkRefRelease(b *testing.B) {
	p := open(b, 0)
	_, hs := held(b, p, 32768)
	n, cpu := 0, cpuTime(b)
	for b.Loop() {
		h := hs[n*7919%len(hs)]
		if !p.TryRef(h) {
			b.Fatal("an entry is gone")
		}
		_, _, _ = p.Release(h)
		n++
	}
	perPage(b, n, b.Elapsed(), cpuTime(b)-cpu)
}

// BenchmarkCompact releases a random half of 20,000 entries and reports the time
// for each entry that is moved, waiting and punching included.
func BenchmarkCompact(b *testing.B) {
	pages := 0
	var took, cpu time.Duration
	for b.Loop() {
		p, err := New(Options{})
		if err != nil {
			b.Fatal(err)
		}
		_, hs := held(b, p, 20000)
		rand.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
		for _, h := range hs[:len(hs)/2] {
			_, _, _ = p.Release(h)
		}
		start, used := time.Now(), cpuTime(b)
		moved, _ := p.Compact(b.Context(), 0)
		took += time.Since(start)
		cpu += cpuTime(b) - used
		pages += moved
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
	perPage(b, pages, took, cpu)
}
