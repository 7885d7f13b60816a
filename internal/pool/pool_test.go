package pool

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

func newPool(tb testing.TB, limit units.Bytes) *Pool {
	tb.Helper()
	p, err := New(Options{Limit: limit})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

func put(tb testing.TB, p *Pool, enc codec.Encoded) Handle {
	tb.Helper()
	h, err := p.Put(enc)
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

// entry makes an entry of n bytes that no other has.
func entry(r *rand.Rand, n int) codec.Encoded {
	enc := codec.Encoded{Kind: codec.Kind(1 + r.IntN(4)), Sum: r.Uint32(), Data: make([]byte, n)}
	for i := 0; i < n; i += 8 {
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], r.Uint64())
		copy(enc.Data[i:], b[:])
	}
	if enc.Kind == codec.KindZstdDict {
		enc.Dict = codec.DictID(r.Uint32())
	}
	return enc
}

func same(a, b codec.Encoded) bool {
	return a.Kind == b.Kind && a.Dict == b.Dict && a.Sum == b.Sum && bytes.Equal(a.Data, b.Data)
}

// size draws a length like a guest's: a tenth below 20 B, half below 300 B, a
// tail to 3,600 B.
func size(r *rand.Rand) int {
	switch x := r.IntN(100); {
	case x < 10:
		return r.IntN(20)
	case x < 50:
		return 20 + r.IntN(280)
	case x < 80:
		return 300 + r.IntN(700)
	default:
		return 1000 + r.IntN(2600)
	}
}

// audit compares the accounts with the kernel's and with each other.
func audit(tb testing.TB, p *Pool) Stats {
	tb.Helper()
	s := p.Stats()
	kernel, err := hostmem.Allocated(p.file)
	if err != nil {
		tb.Fatal(err)
	}
	if s.Resident != kernel {
		tb.Errorf("Resident %d, the kernel says %d", s.Resident, kernel)
	}
	if got := units.Bytes(p.used.Load()); got != s.Footprint || got != p.Footprint() {
		tb.Errorf("%d bytes reserved, Footprint %d (Stats) and %d", got, s.Footprint, p.Footprint())
	}
	if s.Live+s.Meta+s.Slack != s.Footprint || s.Slack < 0 {
		tb.Errorf("Live + Meta + Slack is not Footprint: %+v", s)
	}
	return s
}

func TestWhatIsPutIsViewed(t *testing.T) {
	p := newPool(t, 0)
	r := rand.New(rand.NewPCG(1, 1))
	want := map[Handle]codec.Encoded{}
	for n := range codec.MaxData + 1 {
		enc := entry(r, n)
		h := put(t, p, enc)
		if _, twice := want[h]; twice || h == 0 || h >= 1<<29 {
			t.Fatalf("handle %#x for an entry of %d bytes", h, n)
		}
		want[h] = enc
	}
	for h, enc := range want {
		if got := p.View(h); !same(enc, got) {
			t.Fatalf("entry of %d bytes: %s", len(enc.Data), cmp.Diff(enc, got))
		}
	}
	audit(t, p)
	if _, err := p.Put(codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, codec.MaxData+1)}); err == nil {
		t.Error("an entry longer than a page was taken")
	}
}

func TestViewAliasesTheArena(t *testing.T) {
	p := newPool(t, 0)
	h := put(t, p, codec.Encoded{Kind: codec.KindZstd, Data: []byte("abc")})
	p.View(h).Data[1] ^= 1
	if got := string(p.View(h).Data); got != "acc" {
		t.Errorf("a byte flipped through View reads %q", got)
	}
	if v := p.View(h).Data; cap(v) != len(v) {
		t.Error("append to a view would write into a neighbour")
	}
}

func TestAnEntryLivesUntilItsLastReferenceIsGone(t *testing.T) {
	p := newPool(t, 0)
	h := put(t, p, codec.Encoded{Kind: codec.KindZstdDict, Dict: 77, Data: []byte("abc")})
	p.Ref(h)
	p.Ref(h)
	for range 2 {
		if freed, dict := p.Release(h); freed || dict != 0 {
			t.Fatalf("got freed %v and dictionary %d before the last release", freed, dict)
		}
	}
	if freed, dict := p.Release(h); !freed || dict != 77 {
		t.Errorf("the last release: freed %v, dictionary %d; want true, 77", freed, dict)
	}
	if s := audit(t, p); s.Entries != 0 || s.Live != 0 || s.Resident != 0 {
		t.Errorf("an empty pool holds %+v", s)
	}
}

func TestABadHandlePanics(t *testing.T) {
	p := newPool(t, 0)
	h := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 100)})
	other := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 100)})
	p.Release(other)
	put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 500)}) // the second segment
	big := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 1000)})
	p.Release(big)
	for _, c := range []struct {
		name string
		h    Handle
		want string
	}{
		{"none", 0, "out of range"},
		{"past the arena", 1 << 29, "out of range"},
		{"far past the arena", ^Handle(0), "out of range"},
		{"a segment never used", 1<<29 - 1, "never used"},
		{"the segment after the last", h + 3*segmentSize/granule, "free segment"},
		{"a segment given back", big, "free segment"},
		{"the middle of a slot", h + 1, "start of a slot"},
		{"a segment's head", h - 1 + segmentSize/granule, "start of a slot"},
		{"a free slot", other, "released"},
	} {
		for op, f := range map[string]func(){
			"View":    func() { p.View(c.h) },
			"Ref":     func() { p.Ref(c.h) },
			"Release": func() { p.Release(c.h) },
		} {
			got := func() (msg string) {
				defer func() { msg, _ = recover().(string) }()
				f()
				return "no panic"
			}()
			if !strings.Contains(got, c.want) {
				t.Errorf("%s of %s: %q, want %q", op, c.name, got, c.want)
			}
		}
	}
	if p.View(h).Kind != codec.KindRLE {
		t.Error("the good entry is gone")
	}
}

func TestAnOverwrittenHeaderIsFound(t *testing.T) {
	p := newPool(t, 0)
	h := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 100)})
	p.mem[int(h)*granule+offLength+1] |= 0x0f
	defer func() {
		if msg, _ := recover().(string); !strings.Contains(msg, "overwritten") {
			t.Errorf("got %q", msg)
		}
	}()
	p.View(h)
}

func TestTheLimitIsHardAndLiftsWhenEntriesGo(t *testing.T) {
	const limit = 3 * units.MiB
	p := newPool(t, limit)
	r := rand.New(rand.NewPCG(2, 2))
	var hs []Handle
	for {
		h, err := p.Put(entry(r, size(r)))
		if err != nil {
			if !errors.Is(err, ErrFull) {
				t.Fatalf("got %v, want ErrFull", err)
			}
			break
		}
		hs = append(hs, h)
		if f := p.Footprint(); f > limit {
			t.Fatalf("footprint %v is over the limit", f)
		}
	}
	s := audit(t, p)
	if s.Footprint < limit*9/10 {
		t.Errorf("full at %v of %v", s.Footprint, limit)
	}
	for _, h := range hs {
		p.Release(h)
	}
	if s := audit(t, p); s.Resident != 0 {
		t.Errorf("%v stay in memory after the last entry", s.Resident)
	}
	for range len(hs) / 2 {
		put(t, p, entry(r, size(r)))
	}
}

func TestSlackIsSmallOnAGuestsDistribution(t *testing.T) {
	p := newPool(t, 0)
	r := rand.New(rand.NewPCG(3, 3))
	for range 20000 {
		put(t, p, entry(r, size(r)))
	}
	s := audit(t, p)
	slack, meta := 100*float64(s.Slack)/float64(s.Footprint), 100*float64(s.Meta)/float64(s.Footprint)
	t.Logf("%d entries, live %v, slack %.2f%%, meta %.2f%%", s.Entries, s.Live, slack, meta)
	if slack > 4 || meta > 2.5 {
		t.Errorf("slack %.2f%%, meta %.2f%% of the footprint", slack, meta)
	}
}

func TestFreedSegmentsServeOtherClasses(t *testing.T) {
	p := newPool(t, 0)
	r := rand.New(rand.NewPCG(4, 4))
	for _, n := range []int{3000, 20, 600, 150, 3600} {
		var hs []Handle
		for live := 0; live < 4<<20; live += n {
			hs = append(hs, put(t, p, entry(r, n)))
		}
		if high := p.fresh * segmentSize; high > 9<<20 {
			t.Errorf("entries of %d bytes raised the arena to %d MiB", n, high>>20)
		}
		for _, i := range r.Perm(len(hs)) {
			p.Release(hs[i])
		}
		audit(t, p)
	}
}

func TestTrimReturnsFreePagesOfSparseSegments(t *testing.T) {
	p := newPool(t, 0)
	r := rand.New(rand.NewPCG(5, 5))
	kept := map[Handle]codec.Encoded{}
	var hs []Handle
	for range 8000 {
		enc := entry(r, size(r))
		h := put(t, p, enc)
		if r.IntN(40) == 0 {
			kept[h] = enc
		} else {
			hs = append(hs, h)
		}
	}
	for _, h := range hs {
		p.Release(h)
	}
	before := audit(t, p)
	freed := p.Trim()
	after := audit(t, p)
	if before.Resident-after.Resident != freed || freed < before.Resident/3 {
		t.Errorf("Trim says %v; resident went from %v to %v", freed, before.Resident, after.Resident)
	}
	for range 8000 {
		put(t, p, entry(r, size(r)))
	}
	audit(t, p)
	for h, want := range kept {
		if got := p.View(h); !same(want, got) {
			t.Fatalf("an entry changed: %s", cmp.Diff(want, got))
		}
	}
}

func TestARefusalToGrowStoresNothing(t *testing.T) {
	boom := errors.New("boom")
	for after := range 4 { // tables, a segment's first page, the entry's pages, a later entry's
		p := newPool(t, 0)
		before := p.Stats()
		if err := fault.Arm("pool.grow", after, boom); err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(6, 6))
		var err error
		for err == nil {
			_, err = p.Put(entry(r, 2000))
		}
		if !errors.Is(err, boom) {
			t.Fatalf("got %v", err)
		}
		now := audit(t, p)
		if now.Entries-before.Entries > 8 {
			t.Errorf("the fault came after %d entries", now.Entries-before.Entries)
		}
		put(t, p, entry(r, 2000))
		audit(t, p)
	}
}

func TestManyUsersAtOnce(t *testing.T) {
	p := newPool(t, 16*units.MiB)
	var shared []Handle
	r := rand.New(rand.NewPCG(7, 7))
	for range 64 {
		shared = append(shared, put(t, p, entry(r, size(r))))
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(8, uint64(g)))
			type held struct {
				h   Handle
				enc codec.Encoded
			}
			var mine []held
			drop := func(i int) {
				v := p.View(mine[i].h)
				if !bytes.Equal(v.Data, mine[i].enc.Data) || v.Sum != mine[i].enc.Sum || v.Dict != mine[i].enc.Dict {
					t.Error("an entry changed")
				}
				if freed, dict := p.Release(mine[i].h); !freed || dict != mine[i].enc.Dict {
					t.Error("an entry of one reference was not freed")
				}
				mine[i] = mine[len(mine)-1]
				mine = mine[:len(mine)-1]
			}
			for range 4000 {
				s := shared[r.IntN(len(shared))]
				p.Ref(s)
				_ = p.View(s)
				p.Release(s)
				if len(mine) > 0 && r.IntN(3) == 0 {
					drop(r.IntN(len(mine)))
					continue
				}
				enc := entry(r, size(r))
				h, err := p.Put(enc)
				if err != nil {
					for range len(mine) / 2 {
						drop(r.IntN(len(mine)))
					}
					p.Trim()
					continue
				}
				mine = append(mine, held{h, enc})
			}
			for len(mine) > 0 {
				drop(len(mine) - 1)
			}
		})
	}
	wg.Wait()
	if s := audit(t, p); s.Entries != int64(len(shared)) {
		t.Errorf("%d entries, want %d", s.Entries, len(shared))
	}
}

func TestPutAndReleaseDoNotAllocate(t *testing.T) {
	p := newPool(t, 0)
	enc := codec.Encoded{Kind: codec.KindZstd, Data: make([]byte, 400)}
	keep := put(t, p, enc)
	if n := testing.AllocsPerRun(100, func() {
		h := put(t, p, enc)
		p.Ref(h)
		_ = p.View(h)
		p.Release(h)
		p.Release(h)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	p.Release(keep)
}
