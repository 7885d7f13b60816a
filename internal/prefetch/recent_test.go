package prefetch

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

func TestPagesOfTheLastCallsArePredictedInAddressOrder(t *testing.T) {
	t.Parallel()
	r := NewRecent(100)
	r.Observe([]units.Frame{9, 3, 9})
	r.Observe([]units.Frame{5})
	if diff := cmp.Diff([]units.Frame{3, 5, 9}, r.Predict(nil)); diff != "" {
		t.Errorf("prediction (-want +got):\n%s", diff)
	}
}

func TestAPageIsForgottenAfterFourCallsWithoutATouch(t *testing.T) {
	t.Parallel()
	r := NewRecent(100)
	r.Observe([]units.Frame{1})
	for i := range keepCalls - 1 {
		if got := r.Predict(nil); !cmp.Equal(got, []units.Frame{1}) {
			t.Fatalf("after %d more calls: got %v, want [1]", i, got)
		}
		r.Observe(nil)
	}
	r.Observe(nil)
	if got := r.Predict(nil); len(got) != 0 {
		t.Errorf("got %v, want nothing", got)
	}
}

func TestAboveTheLimitTheMostRecentWin(t *testing.T) {
	t.Parallel()
	r := NewRecent(2)
	r.Observe([]units.Frame{1, 2, 3})
	r.Observe([]units.Frame{8, 7})
	want := []units.Frame{100, 7, 8}
	if diff := cmp.Diff(want, r.Predict([]units.Frame{100})); diff != "" {
		t.Errorf("prediction (-want +got):\n%s", diff)
	}
}
