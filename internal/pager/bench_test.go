package pager

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestmem"
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

// BenchmarkScout is what it takes to score all private pages without touching them: find them,
// read them, look at one in eight bytes, compare with the template. It is the cheapest scout
// there is, and the price of one look at a sandbox during a tool call (ADR 0012).
func BenchmarkScout(b *testing.B) {
	r := newRig(b, benchFrames, 1).serve()
	r.fillMixed()
	buf := make([]byte, BatchPages*units.PageSize)
	pages, scored := 0, 0
	score := func(runs []guestmem.Run, n int) {
		if err := r.guest.Read(buf[:n*units.PageSize], runs); err != nil {
			b.Fatal(err)
		}
		k := 0
		for _, run := range runs {
			for i := range run.Pages {
				page := buf[k*units.PageSize : (k+1)*units.PageSize]
				k++
				image := r.im.Page(run.Start + units.Frame(i))
				var counts [256]uint8
				equal, kinds := image != nil, 0
				for at := 0; at < len(page); at += 8 {
					equal = equal && page[at] == image[at]
					if counts[page[at]] == 0 {
						kinds++
					}
					counts[page[at]] = 1
				}
				if equal || kinds < 64 {
					scored++
				}
			}
		}
	}
	for b.Loop() {
		var runs []guestmem.Run
		n := 0
		err := r.guest.Scan(func(run guestmem.Run, _ bool) bool {
			for run.Pages > 0 {
				take := min(run.Pages, BatchPages-n)
				runs = append(runs, guestmem.Run{Start: run.Start, Pages: take})
				run.Start, run.Pages, n = run.Start+units.Frame(take), run.Pages-take, n+take
				pages += take
				if n == BatchPages {
					score(runs, n)
					runs, n = runs[:0], 0
				}
			}
			return true
		})
		if err != nil {
			b.Fatal(err)
		}
		if n > 0 {
			score(runs, n)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(pages), "ns/page")
	b.ReportMetric(float64(scored)/float64(pages), "easy")
}
