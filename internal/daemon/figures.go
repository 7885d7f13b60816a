package daemon

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
)

// callFigures are the Prometheus metrics of calls and of the host's memory.
type callFigures struct {
	stall      prometheus.Histogram
	faults     *prometheus.CounterVec
	prefetched prometheus.Counter
	wasted     prometheus.Counter
	level      prometheus.GaugeFunc
}

func newCallFigures(level func() policy.Level) *callFigures {
	return &callFigures{
		stall: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "agentzip_call_stall_seconds", Help: "Time for which faults held up the guest, per call.",
			Buckets:                        []float64{.0001, .0005, .001, .002, .005, .01, .02, .05, .1, .5, 2},
			NativeHistogramBucketFactor:    1.1,
			NativeHistogramMaxBucketNumber: 100,
		}),
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agentzip_call_faults_total", Help: "Faults that guests waited for in calls, by kind.",
		}, []string{"kind"}),
		prefetched: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "agentzip_prefetched_pages_total", Help: "Pages that were brought before guests asked for them, in calls.",
		}),
		wasted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "agentzip_wasted_pages_total", Help: "Of them, those that went again without a sign of use: an upper bound, reading leaves none.",
		}),
		level: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "agentzip_host_memory_level", Help: "How short the host is of memory: 0 normal, 1 compress harder, 2 take no new sandbox.",
		}, func() float64 { return float64(level()) }),
	}
}

// note adds what one call waited for.
func (f *callFigures) note(m sandbox.CallMemory) {
	f.stall.Observe(m.Stall.Seconds())
	for kind, n := range map[pager.Kind]uint64{
		pager.KindEvicted: m.Kinds.Evicted, pager.KindZero: m.Kinds.Zero,
		pager.KindTemplate: m.Kinds.Template, pager.KindProtected: m.Kinds.Protected,
	} {
		f.faults.WithLabelValues(kind.String()).Add(float64(n))
	}
	f.prefetched.Add(float64(m.Prefetched))
	f.wasted.Add(float64(m.Wasted))
}

// Collectors are the metrics of the backend, for the gateway to serve.
func (b *Backend) Collectors() []prometheus.Collector {
	f := b.figures
	return []prometheus.Collector{f.stall, f.faults, f.prefetched, f.wasted, f.level}
}
