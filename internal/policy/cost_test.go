package policy

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestQuantilesAreRightWithinABucket(t *testing.T) {
	t.Parallel()
	var d Durations
	for i := range 1000 { // 1 to 10 s, in an order that decay does not favour
		d.Note(time.Second + time.Duration(i*7919%1000)*9*time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{0.1: 1900 * time.Millisecond, 0.5: 5500 * time.Millisecond, 0.9: 9100 * time.Millisecond} {
		got, ok := d.Quantile(q)
		if off := math.Abs(math.Log2(float64(got) / float64(want))); !ok || off > 0.5 {
			t.Errorf("quantile %.1f: got %v, want about %v", q, got, want)
		}
	}
}

func TestLaterDurationsCountMore(t *testing.T) {
	t.Parallel()
	var d Durations
	for range 1000 {
		d.Note(time.Second)
	}
	for range 100 { // 1.5 half-lives
		d.Note(time.Minute)
	}
	if got, _ := d.Quantile(0.5); got < 30*time.Second {
		t.Errorf("median %v, want that of the later ones", got)
	}
}

func TestWhatIsLeftOfAGapComesFromThoseThatWereAsLong(t *testing.T) {
	t.Parallel()
	var d Durations
	if _, ok := d.Left(0); ok {
		t.Error("something is known of nothing")
	}
	for range 90 {
		d.Note(100 * time.Millisecond)
	}
	for range 10 {
		d.Note(100 * time.Second)
	}
	if got, _ := d.Left(0); got > 200*time.Millisecond {
		t.Errorf("at the start %v are left, want about 100 ms", got)
	}
	if got, ok := d.Left(time.Second); !ok || got < 50*time.Second {
		t.Errorf("after a second %v are left, want about 100 s", got)
	}
	if _, ok := d.Left(time.Hour); ok {
		t.Error("a gap of an hour is known")
	}
}

func TestQuantilesStayFiniteForEver(t *testing.T) {
	t.Parallel()
	var d Durations
	for range 200_000 { // weights would be 1e1340
		d.Note(time.Second)
	}
	got, ok := d.Quantile(0.5)
	if !ok || got < 500*time.Millisecond || got > 2*time.Second {
		t.Errorf("got %v, %v, want about 1 s", got, ok)
	}
}

func TestQuantilesGrowWithTheirShare(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var d Durations
		for _, n := range rapid.SliceOfN(rapid.Int64Range(0, int64(48*time.Hour)), 1, 50).Draw(t, "durations") {
			d.Note(time.Duration(n))
		}
		a, b := rapid.Float64Range(0, 1).Draw(t, "a"), rapid.Float64Range(0, 1).Draw(t, "b")
		qa, _ := d.Quantile(min(a, b))
		qb, _ := d.Quantile(max(a, b))
		if qa > qb {
			t.Fatalf("quantile %v is %v, quantile %v is %v", min(a, b), qa, max(a, b), qb)
		}
	})
}

func TestWarmPagesAreCompressedWhenTheGapPaysThemBack(t *testing.T) {
	t.Parallel()
	burst, think := new(Durations), new(Durations)
	for range 50 {
		burst.Note(80 * time.Millisecond)
		think.Note(5 * time.Second)
	}
	half := new(Durations)
	for range 50 {
		half.Note(800 * time.Millisecond)
	}
	for _, c := range []struct {
		name    string
		gaps    *Durations
		elapsed time.Duration
		host    Level
		want    Temperature
	}{
		{"nothing is known: a model thinks for seconds", new(Durations), 50 * time.Millisecond, Normal, Warm},
		{"calls in a burst", burst, 50 * time.Millisecond, Normal, Cold},
		{"a burst that has ended", burst, 10 * time.Second, Normal, Warm},
		{"short gaps pay for dropping what is encoded", half, 50 * time.Millisecond, Normal, Clean},
		{"a model thinks", think, 50 * time.Millisecond, Normal, Warm},
		{"the host is short", burst, 50 * time.Millisecond, Tight, Warm},
	} {
		if got := DefaultCosts.Reach(c.gaps, c.elapsed, c.host); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}
