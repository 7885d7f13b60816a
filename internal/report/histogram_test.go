package report

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestQuantilesAreNearestRank(t *testing.T) {
	t.Parallel()
	var d []time.Duration
	for i := 100; i >= 1; i-- {
		d = append(d, time.Duration(i))
	}
	for _, c := range []struct {
		name string
		d    []time.Duration
		want Quantiles
	}{
		{"a hundred values", d, Quantiles{Count: 100, Total: 5050, P50: 50, P95: 95, P99: 99, Max: 100}},
		{"three values", []time.Duration{3, 1, 2}, Quantiles{Count: 3, Total: 6, P50: 2, P95: 3, P99: 3, Max: 3}},
		{"one value", []time.Duration{9}, Quantiles{Count: 1, Total: 9, P50: 9, P95: 9, P99: 9, Max: 9}},
		{"none", nil, Quantiles{}},
	} {
		if diff := cmp.Diff(c.want, QuantilesOf(c.d)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

// histogramOf puts durations into buckets of a power of two.
func histogramOf(d []time.Duration) Histogram {
	var h Histogram
	for _, x := range d {
		le := time.Duration(1)
		for le < x {
			le *= 2
		}
		h.Merge(Histogram{Total: x, Max: x, Buckets: []Bucket{{LE: le, Count: 1}}})
	}
	return h
}

func TestAMergedHistogramIsThatOfAllDurations(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		durations := rapid.SliceOf(rapid.Custom(func(t *rapid.T) time.Duration { return time.Duration(rapid.IntRange(1, 1000).Draw(t, "d")) }))
		a, b := durations.Draw(t, "a"), durations.Draw(t, "b")
		merged := histogramOf(a)
		merged.Merge(histogramOf(b))
		all := append(append([]time.Duration(nil), a...), b...)
		if diff := cmp.Diff(histogramOf(all), merged); diff != "" {
			t.Fatalf("merged (-want +got):\n%s", diff)
		}
		for _, q := range []float64{0.01, 0.5, 0.99, 1} {
			exact := exactQuantile(all, q)
			if got := merged.Quantile(q); got < exact || got > 2*exact {
				t.Fatalf("quantile %g: got %d, want %d to twice as much", q, got, exact)
			}
		}
		if diff := cmp.Diff(histogramOf(b).Buckets, merged.Since(histogramOf(a)).Buckets); len(b) > 0 && diff != "" {
			t.Fatalf("what came since a (-want +got):\n%s", diff)
		}
	})
}

func exactQuantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := append([]time.Duration(nil), d...)
	QuantilesOf(s) // sorts
	return s[max(0, int(q*float64(len(s))+0.9999999)-1)]
}

func TestHistogramsOfDifferentBucketsMerge(t *testing.T) {
	t.Parallel()
	h := Histogram{Total: 30, Max: 10, Buckets: []Bucket{{10, 3}}}
	h.Merge(Histogram{Total: 36, Max: 16, Buckets: []Bucket{{7, 1}, {10, 1}, {20, 1}}})
	want := Histogram{Total: 66, Max: 16, Buckets: []Bucket{{7, 1}, {10, 4}, {20, 1}}}
	if diff := cmp.Diff(want, h); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if got := h.Quantile(1); got != 16 {
		t.Errorf("the longest: got %d, want 16, the maximum, not the bound of its bucket", got)
	}
	if got := h.Above(10); got != 1 {
		t.Errorf("above 10: got %d, want 1", got)
	}
}

func TestAHistogramSurvivesJSON(t *testing.T) {
	t.Parallel()
	h := Histogram{Total: 66, Max: 16, Buckets: []Bucket{{7, 1}, {10, 4}}}
	data, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"total_ns":66,"max_ns":16,"buckets":[[7,1],[10,4]]}`; string(data) != want {
		t.Errorf("got %s, want %s", data, want)
	}
	var back Histogram
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(h, back); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

func TestAPrefetcherIsJudgedByWhatItHeldOut(t *testing.T) {
	t.Parallel()
	p := Prefetcher{Restored: 1000, HeldOut: 50, Missed: 40, Faults: 200}
	if a, ok := p.Accuracy(); !ok || a != 0.8 {
		t.Errorf("accuracy: got %g %v, want 0.8", a, ok)
	}
	if c, ok := p.Coverage(); !ok || c != 0.8 {
		t.Errorf("coverage: got %g %v, want 800 of 1000 touched pages", c, ok)
	}
	p.HeldOut = minHeldOut - 1
	if _, ok := p.Coverage(); ok {
		t.Error("too few held out, and yet a coverage")
	}
}
