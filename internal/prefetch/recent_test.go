package prefetch

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/pager"
)

func TestPagesOfTheLastCallsArePredictedInAddressOrder(t *testing.T) {
	t.Parallel()
	r := NewRecent(100)
	r.Observe([]pager.Touch{{Frame: 3}, {Frame: 9}})
	r.Observe([]pager.Touch{{Frame: 5}, {Frame: 9, Write: true}})
	if diff := cmp.Diff([]pager.Touch{{Frame: 3}, {Frame: 5}, {Frame: 9, Write: true}}, r.Predict(nil)); diff != "" {
		t.Errorf("prediction (-want +got):\n%s", diff)
	}
}

func TestAPageIsForgottenAfterFourCallsWithoutATouch(t *testing.T) {
	t.Parallel()
	r := NewRecent(100)
	page := []pager.Touch{{Frame: 1}}
	r.Observe(page)
	for i := range keepCalls - 1 {
		if got := r.Predict(nil); !cmp.Equal(got, page) {
			t.Fatalf("after %d more calls: got %v, want %v", i, got, page)
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
	r.Observe([]pager.Touch{{Frame: 1}, {Frame: 2}, {Frame: 3}})
	r.Observe([]pager.Touch{{Frame: 8}, {Frame: 7}})
	want := []pager.Touch{{Frame: 100}, {Frame: 7}, {Frame: 8}}
	if diff := cmp.Diff(want, r.Predict([]pager.Touch{{Frame: 100}})); diff != "" {
		t.Errorf("prediction (-want +got):\n%s", diff)
	}
}
