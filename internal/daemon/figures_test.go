package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/policy"
	"github.com/agentzip/agentzip/internal/sandbox"
)

func TestWhatCallsWaitedForIsInTheMetrics(t *testing.T) {
	t.Parallel()
	f := newCallFigures(func() policy.Level { return policy.Tight })
	for range 2 {
		f.note(sandbox.CallMemory{Stall: 3 * time.Millisecond, Prefetched: 70, Wasted: 5, Kinds: pager.Counts{Evicted: 10, Protected: 2}})
	}
	r := prometheus.NewRegistry()
	r.MustRegister((&Backend{figures: f}).Collectors()...)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			name := family.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetHistogram().GetSampleSum()
		}
	}
	want := map[string]float64{
		"agentzip_call_stall_seconds": 0.006, "agentzip_call_faults_total evicted": 20, "agentzip_call_faults_total protected": 4,
		"agentzip_call_faults_total zero": 0, "agentzip_call_faults_total template": 0,
		"agentzip_prefetched_pages_total": 140, "agentzip_wasted_pages_total": 10, "agentzip_host_memory_level": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
