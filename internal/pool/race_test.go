package pool

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

// A book is what all goroutines of a test share: handles that may be stale.
type book struct {
	slots [512]atomic.Uint32
}

func (b *book) any(r *rand.Rand) *atomic.Uint32 { return &b.slots[r.IntN(len(b.slots))] }

// user puts entries, shares them through the book, reads its own and others', and
// releases all it has.
func user(t *testing.T, p *Pool, b *book, seed uint64, steps int) {
	r := rand.New(rand.NewPCG(30, seed))
	rd := p.NewReader()
	defer rd.Close()
	mine := map[Handle]codec.Encoded{} // put by this goroutine, one reference
	var order []Handle
	letGo := func(n int) {
		for ; n > 0 && len(order) > 0; n-- {
			i := r.IntN(len(order))
			h := order[i]
			rd.Pin()
			if v, err := rd.View(h); err != nil || !same(v, mine[h]) {
				t.Errorf("an entry changed: %v", err)
			}
			if _, _, err := p.Release(h); err != nil {
				t.Errorf("release: %v", err)
			}
			rd.Unpin()
			delete(mine, h)
			order[i] = order[len(order)-1]
			order = order[:len(order)-1]
		}
	}
	for range steps {
		switch r.IntN(8) {
		case 0, 1, 2:
			enc := entry(r, smallSize(r))
			h, err := p.Put(enc)
			if err != nil {
				if !errors.Is(err, ErrFull) {
					t.Error(err)
				}
				letGo(len(order) / 2)
				continue
			}
			mine[h] = enc
			order = append(order, h)
			b.any(r).Store(uint32(h))
		case 3, 4:
			letGo(1)
		case 5:
			h := Handle(b.any(r).Load()) // stale, most often
			if r.IntN(2) == 0 {
				h = Handle(r.Uint32())
				if r.IntN(2) == 0 {
					h %= 4096
				}
			}
			if !p.TryRef(h) {
				continue
			}
			rd.Pin()
			v, right := judge(t, rd, h)
			if !right {
				t.Errorf("a referenced entry fails its check: %+v", v)
			}
			was := bytes.Clone(v.Data)
			if _, _, err := p.Release(h); err != nil {
				t.Errorf("release of a tried reference: %v", err)
			}
			if !bytes.Equal(was, v.Data) {
				t.Error("a view changed before Unpin")
			}
			rd.Unpin()
		case 6:
			if len(order) > 0 {
				h := order[r.IntN(len(order))]
				if err := p.Ref(h); err != nil {
					t.Errorf("ref: %v", err)
				}
				if freed, _, err := p.Release(h); err != nil || freed && mine[h].Kind != 0 {
					t.Errorf("release beside a reference: freed %v, %v", freed, err)
				}
			}
		case 7:
			rd.Pin()
			if len(order) > 0 {
				h := order[r.IntN(len(order))]
				if v, right := judge(t, rd, h); !right || !same(v, mine[h]) {
					t.Error("an entry changed")
				}
			}
			rd.Unpin()
		}
	}
	letGo(len(order))
}

func storm(t *testing.T, p *Pool, steps int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var b book
	var users, helpers sync.WaitGroup
	for g := range uint64(3) {
		users.Go(func() { user(t, p, &b, g, steps) })
	}
	helpers.Go(func() {
		for ctx.Err() == nil {
			p.Compact(ctx, 256*units.KiB)
		}
	})
	helpers.Go(func() {
		r := rand.New(rand.NewPCG(31, 31))
		for ctx.Err() == nil {
			for range 1000 {
				if h := Handle(r.Uint32()) % 8192; p.TryRef(h) {
					if _, _, err := p.Release(h); err != nil {
						t.Error(err)
					}
				}
			}
			p.Trim()
			_ = p.Stats()
		}
	})
	users.Wait()
	cancel()
	helpers.Wait()
	p.Trim() // pages of the table that a TryRef has read back into being
	p.Compact(t.Context(), 0)
	if s := audit(t, p); s.Entries != 0 || s.Live != 0 || s.Resident != 0 {
		t.Errorf("after the storm: %+v", s)
	}
}

func TestManyUsersBesideCompact(t *testing.T) {
	storm(t, open(t, 2*units.MiB), 6000)
}

// The race detector does not watch the memory file, but it watches the heap.
func TestManyUsersBesideCompactInWatchedMemory(t *testing.T) {
	storm(t, onHeap(2*units.MiB, 64), 6000)
}

func TestReadersMayComeAndGoWhileEntriesMove(t *testing.T) {
	p := onHeap(0, 128)
	r := rand.New(rand.NewPCG(32, 32))
	want, hs := populate(t, p, r, 3000, smallSize)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for g := range uint64(3) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(33, g))
			for ctx.Err() == nil {
				rd := p.NewReader()
				for range 50 {
					rd.Pin()
					for range 4 {
						h := hs[r.IntN(1000)]
						if v, right := judge(t, rd, h); !right || !same(v, want[h]) {
							t.Error("an entry changed")
						}
					}
					rd.Unpin()
				}
				rd.Close()
			}
		})
	}
	rest := hs[1000:]
	moved := 0
	for range 10 {
		r.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
		for _, h := range rest[:len(rest)*2/3] {
			release(t, p, h)
		}
		n, _ := p.Compact(t.Context(), 0)
		moved += n
		for i := range len(rest) * 2 / 3 {
			rest[i] = put(t, p, entry(r, smallSize(r)))
		}
	}
	cancel()
	wg.Wait()
	if moved < 1000 {
		t.Errorf("%d entries moved under the readers", moved)
	}
	audit(t, p)
}
