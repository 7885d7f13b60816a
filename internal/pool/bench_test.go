package pool

import (
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
)

func BenchmarkPutRelease(b *testing.B) {
	p := newPool(b, 0)
	r := rand.New(rand.NewPCG(9, 9))
	encs := make([]codec.Encoded, 4096)
	for i := range encs {
		encs[i] = entry(r, size(r))
	}
	hs := make([]Handle, 32768)
	for i := range hs {
		hs[i] = put(b, p, encs[i%len(encs)])
	}
	n := 0
	for b.Loop() {
		i := n % len(hs)
		p.Release(hs[i])
		hs[i] = put(b, p, encs[(n*7)%len(encs)])
		n++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/page")
	b.ReportMetric(0, "ns/op")
}

func BenchmarkView(b *testing.B) {
	p := newPool(b, 0)
	r := rand.New(rand.NewPCG(9, 9))
	hs := make([]Handle, 32768)
	for i := range hs {
		hs[i] = put(b, p, entry(r, size(r)))
	}
	n, bytes := 0, 0
	for b.Loop() {
		bytes += len(p.View(hs[n%len(hs)]).Data)
		n++
	}
	if bytes == 0 {
		b.Fatal("nothing viewed")
	}
}
