package pager

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// touchAll lets the guest touch n pages and returns the time its thread took.
func (r *rig) touchAll(f units.Frame, n int, write bool) time.Duration {
	r.t.Helper()
	a, err := r.vm.Channels[0].Touch(f, n, write)
	if err != nil {
		r.t.Fatal(err)
	}
	return time.Duration(a.Nanos)
}

const benchFrames = 4096

// fillMixed gives the guest private pages of which a tenth are text (zstd), a tenth deltas, and
// the rest zeros and runs, about as in a real guest (shared design, section 3).
func (r *rig) fillMixed() {
	for f := range units.Frame(benchFrames) {
		p := deltaPage(f, uint64(f))
		switch f % 10 {
		case 0, 1, 2, 3:
			p = zeroPage()
			p[8] = 1 // a run, not the zero page: it must be encoded
		case 4:
			p = textPage(uint64(f))
		}
		r.write(f, p)
	}
}

func BenchmarkBlockingRestore(b *testing.B) {
	for _, write := range []bool{false, true} {
		b.Run(map[bool]string{false: "read", true: "write"}[write], func(b *testing.B) {
			r := newRig(b, benchFrames, 1).serve()
			r.fillMixed()
			var spent time.Duration
			n := 0
			for b.Loop() {
				r.evict()
				spent += r.touchAll(0, benchFrames, write)
				n += benchFrames
			}
			s := r.pager.Stats()
			b.ReportMetric(float64(spent.Nanoseconds())/float64(n), "guest-ns/page")
			b.ReportMetric(float64(s.Blocking.P50().Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(s.Blocking.P99().Nanoseconds()), "p99-ns")
			r.unharmed()
		})
	}
}

func BenchmarkTemplateFault(b *testing.B) {
	for _, around := range []int{1, 4, 16, 64} {
		for _, kind := range []string{"page", "zero"} {
			for _, write := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/around=%dKiB/write=%v", kind, around*4, write), func(b *testing.B) {
					var spent, stall time.Duration
					var faults uint64
					n := 0
					for b.Loop() {
						r := newRig(b, benchFrames, 1, func(o *Options) { o.FaultAround = around }).serve()
						if kind == "zero" { // Zero all over
							for f := range units.Frame(benchFrames) {
								r.pager.mu.Lock()
								r.pager.table.store(f, entryZero)
								r.pager.mu.Unlock()
							}
						}
						spent += r.touchAll(0, benchFrames, write)
						faults += r.pager.Faults()
						stall += r.pager.Stall()
						n += benchFrames
						r.close()
					}
					b.ReportMetric(float64(spent.Nanoseconds())/float64(n), "guest-ns/page")
					b.ReportMetric(float64(faults)/float64(n), "faults/page")
					b.ReportMetric(float64(stall.Nanoseconds())/float64(n), "service-ns/page")
				})
			}
		}
	}
}

func BenchmarkEvict(b *testing.B) {
	for _, kind := range []string{"dirty", "clean"} {
		b.Run(kind, func(b *testing.B) {
			r := newRig(b, benchFrames, 1).serve()
			r.fillMixed()
			var spent time.Duration
			n := 0
			for b.Loop() {
				r.touchAll(0, benchFrames, kind == "dirty")
				res := r.evict()
				spent += res.Took
				n += res.Dropped
			}
			b.ReportMetric(float64(n)/spent.Seconds(), "pages/s")
			b.ReportMetric(float64(spent.Nanoseconds())/float64(n), "ns/page")
			held := r.pager.Stats().Held
			b.ReportMetric(float64(held.P50().Nanoseconds()), "held-p50-ns")
			b.ReportMetric(float64(held.P99().Nanoseconds()), "held-p99-ns")
		})
	}
}

func BenchmarkRestoreAhead(b *testing.B) {
	r := newRig(b, benchFrames, 1).serve()
	r.fillMixed()
	all := make([]units.Frame, benchFrames)
	for i := range all {
		all[i] = units.Frame(i)
	}
	var spent time.Duration
	n := 0
	for b.Loop() {
		r.evict()
		start := time.Now()
		got, err := r.pager.Restore(context.Background(), reads(all...), Needed)
		if err != nil {
			b.Fatal(err)
		}
		spent += time.Since(start)
		n += got.Evicted
	}
	s := r.pager.Stats()
	b.ReportMetric(float64(spent.Nanoseconds())/float64(n), "ns/page")
	b.ReportMetric(float64(s.Prefetched.P99().Nanoseconds()), "p99-ns")
}

func BenchmarkUsage(b *testing.B) {
	r := newRig(b, 1<<17, 1).serve() // 512 MiB
	r.fillMixed()
	for b.Loop() {
		if _, err := r.pager.Usage(); err != nil {
			b.Fatal(err)
		}
	}
}
