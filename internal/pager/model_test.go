package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

// A model is what guest memory must contain: a plain array. The lock of a frame is held
// over an access of the guest, so that an access and the model's change are one step. A page
// that was reported free may have become zeros or not: other is what it contains then, with
// the writes since. The first read decides.
type model struct {
	pages, other []units.Page
	locks        []sync.Mutex
}

func newModel(n int) *model {
	m := &model{pages: make([]units.Page, n), other: make([]units.Page, n), locks: make([]sync.Mutex, n)}
	for f := range m.pages {
		m.pages[f] = *guestmemtest.Base(units.Frame(f))
		m.other[f] = m.pages[f]
	}
	return m
}

// report reports frames free, of which nobody uses one meanwhile.
func (m *model) report(r *rig, c *guestmemtest.Channel, o op) error {
	end := min(int(o.Frame)+o.Pages, len(m.pages))
	for f := int(o.Frame); f < end; f++ { // in ascending order, as every report
		m.locks[f].Lock()
		defer m.locks[f].Unlock()
	}
	a, err := c.Discard(o.Frame, end-int(o.Frame))
	if err != nil || a.Bad != 0 {
		return fmt.Errorf("report: %w, errno %d", err, a.Bad)
	}
	for f := int(o.Frame); f < end; f++ {
		if m.pages[f] != m.other[f] { // undecided from an earlier report: a third content would be one too many
			got, err := c.Read(units.Frame(f), o.Kernel)
			if err != nil {
				return err
			}
			if *got != m.pages[f] && *got != m.other[f] && *got != (units.Page{}) {
				return fmt.Errorf("frame %d differs from the model after a report (state %v)", f, r.state(units.Frame(f)))
			}
			m.pages[f] = *got
			m.other[f] = *got
			continue
		}
		m.other[f] = units.Page{}
	}
	return nil
}

// An op is one step of one goroutine.
type op struct {
	Kind   string
	Frame  units.Frame
	Seed   uint64
	Kernel bool
	Frames []units.Frame
	Pages  int
	Micros int
}

var contentKinds = []string{"zero", "base", "delta", "text", "random"}

func content(kind string, f units.Frame, seed uint64) *units.Page {
	switch kind {
	case "base":
		return guestmemtest.Base(f)
	case "delta":
		return deltaPage(f, seed)
	case "text":
		return textPage(seed)
	case "random":
		return randomPage(seed)
	}
	return zeroPage()
}

func drawOp(t *rapid.T, frames int) op {
	kinds := append([]string{"read", "read", "read", "poke", "evict", "cancelled evict", "restore", "report"}, contentKinds...)
	o := op{Kind: rapid.SampledFrom(kinds).Draw(t, "kind")}
	switch o.Kind {
	case "evict":
	case "cancelled evict":
		o.Micros = rapid.IntRange(0, 3000).Draw(t, "micros")
	case "restore":
		o.Frames = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) units.Frame {
			return units.Frame(rapid.IntRange(0, frames).Draw(t, "frame")) // one past the end too
		}), 0, 80).Draw(t, "frames")
	default:
		o.Frame = units.Frame(rapid.IntRange(0, frames-1).Draw(t, "frame"))
		o.Seed = uint64(rapid.IntRange(1, 1<<20).Draw(t, "seed"))
		o.Kernel = rapid.Bool().Draw(t, "by the kernel")
		if o.Kind == "report" {
			o.Pages = rapid.SampledFrom([]int{1, 2, 8, 96}).Draw(t, "pages")
		}
	}
	return o
}

func (m *model) run(r *rig, c *guestmemtest.Channel, o op) error {
	switch o.Kind {
	case "evict", "cancelled evict":
		ctx, cancel := context.WithCancel(context.Background())
		if o.Kind == "cancelled evict" {
			time.AfterFunc(time.Duration(o.Micros)*time.Microsecond, cancel)
		}
		_, err := r.pager.Evict(ctx)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
		cancel()
		return err
	case "restore":
		_, err := r.pager.Restore(context.Background(), mixed(o.Frames), Needed)
		return err
	case "report":
		return m.report(r, c, o)
	}
	m.locks[o.Frame].Lock()
	defer m.locks[o.Frame].Unlock()
	want := &m.pages[o.Frame]
	switch o.Kind {
	case "read":
		got, err := c.Read(o.Frame, o.Kernel)
		if err != nil {
			return err
		}
		if *got != *want && *got != m.other[o.Frame] {
			return fmt.Errorf("frame %d differs from the model (state %v)", o.Frame, r.state(o.Frame))
		}
		*want, m.other[o.Frame] = *got, *got
		return nil
	case "poke":
		binary.NativeEndian.PutUint64(want[o.Seed%512*8:], o.Seed)
		binary.NativeEndian.PutUint64(m.other[o.Frame][o.Seed%512*8:], o.Seed)
		return c.Poke(o.Frame, int(o.Seed%512*8), o.Seed)
	}
	*want = *content(o.Kind, o.Frame, o.Seed)
	m.other[o.Frame] = *want
	return c.Write(o.Frame, want, o.Kernel)
}

func TestMemoryEqualsAPlainArrayWhateverHappens(t *testing.T) {
	const frames, threads = 96, 4
	server := runServer(t)
	rapid.Check(t, func(rt *rapid.T) {
		scripts := make([][]op, threads)
		for i := range scripts {
			scripts[i] = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) op { return drawOp(t, frames) }), 10, 60).Draw(rt, fmt.Sprintf("thread %d", i))
		}
		around := rapid.SampledFrom([]int{1, 4, 16, 64}).Draw(rt, "fault-around")
		r := newRig(t, frames, threads, func(o *Options) { o.FaultAround = around })
		defer r.close()
		r.server = server
		r.serve()
		m := newModel(frames)
		errs := make([]error, threads)
		var wg sync.WaitGroup
		for i, script := range scripts {
			wg.Go(func() {
				for k, o := range script {
					if err := m.run(r, r.vm.Channels[i], o); err != nil {
						errs[i] = fmt.Errorf("thread %d, step %d, %+v: %w", i, k, o, err)
						return
					}
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			rt.Fatal(err)
		}
		for range 2 { // as it is, and after everything was evicted
			for f := range units.Frame(frames) {
				if err := m.run(r, r.vm.Channels[0], op{Kind: "read", Frame: f}); err != nil {
					rt.Fatal(err)
				}
			}
			r.evict()
		}
		checkUsage(rt, r, m)
		if err := r.pager.Err(); err != nil {
			rt.Fatal(err)
		}
	})
}

// checkUsage compares the pager's account with its table, the pool and the kernel, while
// nothing runs and everything that can be is evicted.
func checkUsage(t *rapid.T, r *rig, m *model) {
	u, err := r.pager.Usage()
	if err != nil {
		t.Fatal(err)
	}
	handles, kept := 0, 0
	r.pager.table.each(func(_ units.Frame, e entry) bool {
		if e.hasRef() {
			handles++
		}
		if e.tag() == tagKept {
			kept++
		}
		return true
	})
	s := r.cohort.Stats().Pool
	// Fewer are shared than kept, but a base may outlive its page and stay for another: at most one for each.
	if u.Kept != handles || 2*int64(u.Kept) < s.Entries {
		t.Fatalf("usage %+v, but the table has %d handles and the pool %+v", u, handles, s)
	}
	if got := int(u.Resident / units.PageSize); got != kept || u.Swapped != 0 {
		t.Fatalf("usage %+v after eviction, want only the %d pages that do not shrink", u, kept)
	}
}
