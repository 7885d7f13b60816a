//go:build !race

package cohort

import (
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

const slow = 1

// Not under the race detector: its hook in unix.Pread moves the caller's page to the heap.
func TestStoreAndLoadAllocateNothing(t *testing.T) {
	m := newTemplate(t)
	for _, bc := range benchCases() {
		t.Run(bc.name, func(t *testing.T) {
			h, f, pages := bc.prepared(t, m)
			i := 0
			var err error
			store := func() {
				var st Stored
				if st, err = h.c.Store(h.w, f, pages[i%len(pages)], Hint{}); err == nil {
					err = h.c.Release(st.Ref)
				}
				i++
			}
			// Page after page goes into the sample of the dictionary at first: 1,000 of them.
			for range 3000 {
				store()
			}
			if n := testing.AllocsPerRun(200, store); n != 0 || err != nil {
				t.Errorf("Store: %v allocations, %v", n, err)
			}
			if bc.way == 0 {
				return
			}
			st := h.store(f, pages[0], Hint{})
			var dst units.Page
			if n := testing.AllocsPerRun(200, func() { err = h.c.Load(h.w, &dst, st.Ref) }); n != 0 || err != nil {
				t.Errorf("Load: %v allocations, %v", n, err)
			}
			if n := testing.AllocsPerRun(200, func() { err = errors.Join(h.c.Ref(st.Ref), h.c.Release(st.Ref)) }); n != 0 || err != nil {
				t.Errorf("Ref and Release: %v allocations, %v", n, err)
			}
		})
	}
}
