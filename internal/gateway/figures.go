package gateway

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/proxy"
)

// figures are the server's Prometheus metrics. Labels are bounded: states,
// methods, statuses; never ids or paths.
type figures struct {
	handler  http.Handler
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

func newFigures(fleet *lifecycle.Fleet, p *proxy.Proxy, more []prometheus.Collector) *figures {
	f := &figures{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "agentzip_control_requests_total", Help: "Requests of the control plane.",
		}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "agentzip_control_request_seconds", Help: "Duration of requests of the control plane.",
			Buckets:                        []float64{.001, .005, .02, .05, .15, .5, 1, 5, 20, 60},
			NativeHistogramBucketFactor:    1.1,
			NativeHistogramMaxBucketNumber: 100,
		}, []string{"method"}),
	}
	r := prometheus.NewRegistry()
	r.MustRegister(f.requests, f.seconds, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), sandboxes{fleet})
	r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "agentzip_data_requests_total", Help: "Requests that were passed on to a sandbox.",
	}, func() float64 { return float64(p.Served.Load()) }))
	r.MustRegister(more...)
	f.handler = promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 2})
	return f
}

func (f *figures) ServeHTTP(w http.ResponseWriter, r *http.Request) { f.handler.ServeHTTP(w, r) }

// count counts a request of the control plane.
func (f *figures) count(w http.ResponseWriter, r *http.Request, next http.Handler) {
	begin := time.Now()
	sw := &statusWriter{ResponseWriter: w, status: http.StatusOK}
	next.ServeHTTP(sw, r)
	method := "other"
	switch r.Method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch:
		method = r.Method
	}
	f.requests.WithLabelValues(method, strconv.Itoa(sw.status)).Inc()
	f.seconds.WithLabelValues(method).Observe(time.Since(begin).Seconds())
}

type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// sandboxes counts boxes by what clients see, at the time of the scrape.
type sandboxes struct{ fleet *lifecycle.Fleet }

var sandboxesDesc = prometheus.NewDesc("agentzip_sandboxes", "Sandboxes by state.", []string{"state"}, nil)

func (sandboxes) Describe(ch chan<- *prometheus.Desc) { ch <- sandboxesDesc }

func (s sandboxes) Collect(ch chan<- prometheus.Metric) {
	count := map[string]int{"running": 0, "paused": 0}
	for _, v := range s.fleet.List("") {
		count[v.Visible()]++
	}
	for state, n := range count {
		ch <- prometheus.MustNewConstMetric(sandboxesDesc, prometheus.GaugeValue, float64(n), state)
	}
}
