package pool

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

func open(tb testing.TB, limit units.Bytes) *Pool {
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

// onHeap makes a pool in memory that the race detector watches: giving memory back
// writes to it, so a reader that could still see it is a reported race.
func onHeap(limit units.Bytes, segments int) *Pool {
	p := newPool(limit, make([]byte, 64*units.PageSize), make([]byte, segments*segmentSize))
	p.punch = func(mem []byte, at, n int64) error {
		if &mem[0] == &p.arena[0] {
			clear(mem[at : at+n])
			return nil
		}
		for ; n > 0; at, n = at+wordSize, n-wordSize {
			(*atomic.Uint64)(unsafe.Pointer(&mem[at])).Store(0)
		}
		return nil
	}
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

func release(tb testing.TB, p *Pool, h Handle) (bool, codec.Encoded) {
	tb.Helper()
	freed, was, err := p.Release(h)
	if err != nil {
		tb.Fatal(err)
	}
	return freed, was
}

func reader(tb testing.TB, p *Pool) *Reader {
	tb.Helper()
	r := p.NewReader()
	tb.Cleanup(r.Close)
	return r
}

// view returns a copy of the entry.
func view(tb testing.TB, r *Reader, h Handle) codec.Encoded {
	tb.Helper()
	r.Pin()
	defer r.Unpin()
	enc, err := r.View(h)
	if err != nil {
		tb.Fatal(err)
	}
	enc.Data = bytes.Clone(enc.Data)
	return enc
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// entry makes an entry of n bytes that no other has, with the checksum of its data:
// tests decode by comparing it.
func entry(r *rand.Rand, n int) codec.Encoded {
	enc := codec.Encoded{Kind: codec.Kind(1 + r.IntN(codec.Kinds-1)), Data: make([]byte, n)}
	for i := 0; i < n; i += 8 {
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], r.Uint64())
		copy(enc.Data[i:], b[:])
	}
	if enc.Kind.HasOperand() {
		enc.Operand = r.Uint32()
	}
	enc.Sum = crc32.Checksum(enc.Data, castagnoli)
	return enc
}

func same(a, b codec.Encoded) bool {
	return a.Kind == b.Kind && a.Operand == b.Operand && a.Sum == b.Sum && bytes.Equal(a.Data, b.Data)
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

// smallSize draws a length like those that remain beside exact references: half
// below 160 B, nine tenths below 700 B.
func smallSize(r *rand.Rand) int {
	switch x := r.IntN(100); {
	case x < 50:
		return 10 + r.IntN(150)
	case x < 90:
		return 160 + r.IntN(540)
	default:
		return 700 + r.IntN(2900)
	}
}

// audit compares the accounts with the kernel's and with each other.
func audit(tb testing.TB, p *Pool) Stats {
	tb.Helper()
	s := p.Stats()
	if p.file != nil {
		kernel, err := hostmem.Allocated(p.file)
		if err != nil {
			tb.Fatal(err)
		}
		if s.Resident != kernel {
			tb.Errorf("Resident %d, the kernel says %d", s.Resident, kernel)
		}
	}
	if got := units.Bytes(p.used.Load()); got != s.Footprint || got != p.Footprint() {
		tb.Errorf("%d bytes reserved, Footprint %d (Stats) and %d", got, s.Footprint, p.Footprint())
	}
	if s.Live+s.Meta+s.Slack != s.Footprint || s.Slack < 0 {
		tb.Errorf("Live + Meta + Slack is not Footprint: %+v", s)
	}
	return s
}

// A fill is a pool's content, as a test knows it.
type fill map[Handle]codec.Encoded

func (f fill) check(tb testing.TB, p *Pool) {
	tb.Helper()
	r := p.NewReader()
	defer r.Close()
	for h, want := range f {
		if got := view(tb, r, h); !same(want, got) {
			tb.Fatalf("entry %#x changed: %s", h, cmp.Diff(want, got))
		}
	}
}

func TestWhatIsPutIsViewed(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(1, 1))
	want := fill{}
	for n := range codec.MaxData + 1 {
		enc := entry(r, n)
		h := put(t, p, enc)
		if _, twice := want[h]; twice || h == 0 || h > MaxHandle {
			t.Fatalf("handle %#x for an entry of %d bytes", h, n)
		}
		want[h] = enc
	}
	want.check(t, p)
	audit(t, p)
	for name, enc := range map[string]codec.Encoded{
		"longer than a page": {Kind: codec.KindRLE, Data: make([]byte, codec.MaxData+1)},
		"no kind":            {Data: []byte("a")},
		"an unknown kind":    {Kind: codec.Kind(codec.Kinds), Data: []byte("a")},
	} {
		if _, err := p.Put(enc); err == nil {
			t.Errorf("an entry was taken that is %s", name)
		}
	}
}

func TestViewAliasesTheArena(t *testing.T) {
	p := open(t, 0)
	r := reader(t, p)
	h := put(t, p, codec.Encoded{Kind: codec.KindZstd, Data: []byte("abc")})
	r.Pin()
	defer r.Unpin()
	v, err := r.View(h)
	if err != nil {
		t.Fatal(err)
	}
	if cap(v.Data) != len(v.Data) {
		t.Error("append to a view would write into a neighbour")
	}
	v.Data[1] ^= 1
	if again, _ := r.View(h); string(again.Data) != "acc" {
		t.Errorf("a byte flipped through View reads %q", again.Data)
	}
}

func TestAnEntryLivesUntilItsLastReferenceIsGone(t *testing.T) {
	p := open(t, 0)
	base := p.Stats().Footprint
	want := codec.Encoded{Kind: codec.KindZstdBase, Operand: 77, Sum: 5, Data: []byte("abc")}
	h := put(t, p, want)
	if err := p.Ref(h); err != nil || !p.TryRef(h) {
		t.Fatalf("no reference to an entry: %v", err)
	}
	for range 2 {
		if freed, _ := release(t, p, h); freed {
			t.Fatal("freed before the last release")
		}
	}
	freed, was := release(t, p, h)
	want.Data = nil
	if !freed || !same(want, was) {
		t.Errorf("the last release: freed %v, %+v; want true, %+v", freed, was, want)
	}
	p.Compact(context.Background(), 0)
	if s := audit(t, p); s.Entries != 0 || s.Live != 0 || s.Resident != 0 || s.Footprint-base > 16*units.KiB {
		t.Errorf("an empty pool holds %+v, %d B before", s, base)
	}
}

func TestAHandleThatNamesNoEntryIsAnError(t *testing.T) {
	p := open(t, 0)
	r := reader(t, p)
	h := put(t, p, entry(rand.New(rand.NewPCG(1, 2)), 100))
	gone := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: make([]byte, 100)})
	release(t, p, gone)
	r.Pin()
	defer r.Unpin()
	for name, bad := range map[string]Handle{
		"none": 0, "never given out": h + 100, "of a page of the table that does not exist": 1 << 20,
		"the highest": MaxHandle, "past the table": MaxHandle + 1, "far past it": ^Handle(0), "released": gone,
	} {
		if _, err := r.View(bad); !errors.Is(err, ErrDamaged) {
			t.Errorf("View of a handle that is %s: %v", name, err)
		}
		if err := p.Ref(bad); !errors.Is(err, ErrDamaged) {
			t.Errorf("Ref of a handle that is %s: %v", name, err)
		}
		if p.TryRef(bad) {
			t.Errorf("TryRef of a handle that is %s", name)
		}
		if freed, _, err := p.Release(bad); freed || !errors.Is(err, ErrDamaged) {
			t.Errorf("Release of a handle that is %s: %v, %v", name, freed, err)
		}
	}
	if s := audit(t, p); s.Entries != 1 {
		t.Errorf("%d entries, want 1", s.Entries)
	}
}

func TestReferencesEndWhereTheCountDoes(t *testing.T) {
	p := open(t, 0)
	h := put(t, p, codec.Encoded{Kind: codec.KindRLE, Data: []byte("a")})
	for range MaxRefs - 1 {
		if err := p.Ref(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Ref(h); !errors.Is(err, ErrShared) || p.TryRef(h) {
		t.Fatalf("reference %d: %v", MaxRefs+1, err)
	}
	for i := range MaxRefs {
		if freed, _ := release(t, p, h); freed != (i == MaxRefs-1) {
			t.Fatalf("release %d: freed %v", i+1, freed)
		}
	}
}

func TestTheLimitIsHardAndLiftsWhenEntriesGo(t *testing.T) {
	const limit = 3 * units.MiB
	p := open(t, limit)
	r := rand.New(rand.NewPCG(2, 2))
	var hs []Handle
	full := func() {
		for {
			h, err := p.Put(entry(r, size(r)))
			if err != nil {
				if !errors.Is(err, ErrFull) {
					t.Fatalf("got %v, want ErrFull", err)
				}
				return
			}
			hs = append(hs, h)
			if f := p.Footprint(); f > limit {
				t.Fatalf("footprint %v is over the limit", f)
			}
		}
	}
	full()
	n := len(hs)
	if s := audit(t, p); s.Live < limit*93/100 {
		t.Errorf("full at %v of %v", s.Live, limit)
	}
	for range 20 { // a full pool has the room that moving takes
		r.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
		for _, h := range hs[:n/5] {
			release(t, p, h)
		}
		hs = hs[n/5:]
		before := len(hs)
		if _, freed := p.Compact(t.Context(), 0); freed < limit/10 {
			t.Errorf("a fifth was released, Compact freed %v", freed)
		}
		full()
		if len(hs)-before < n/6 {
			t.Errorf("%d entries were released, then there was room for %d", n/5, len(hs)-before)
		}
		audit(t, p)
	}
	for _, h := range hs {
		release(t, p, h)
	}
	for range n * 9 / 10 { // without Compact: Put itself gives back what is dead
		put(t, p, entry(r, size(r)))
	}
	audit(t, p)
}

func TestLittleIsLostOnAGuestsDistribution(t *testing.T) {
	for _, c := range []struct {
		name        string
		n           int
		size        func(*rand.Rand) int
		slack, meta float64 // most, per cent of the footprint
	}{
		{"all entries", 20000, size, 0.6, 2.8},
		{"a small pool", 2000, size, 2, 4},
		{"small entries", 20000, smallSize, 0.6, 5.5},
	} {
		p := open(t, 0)
		r := rand.New(rand.NewPCG(3, 3))
		for range c.n {
			put(t, p, entry(r, c.size(r)))
		}
		s := audit(t, p)
		slack, meta := 100*float64(s.Slack)/float64(s.Footprint), 100*float64(s.Meta)/float64(s.Footprint)
		t.Logf("%s: %d entries, live %v (%d B each), slack %.2f%% (%.1f B), meta %.2f%% (%.1f B)", c.name, s.Entries, s.Live,
			int64(s.Live)/s.Entries, slack, float64(s.Slack)/float64(s.Entries), meta, float64(s.Meta)/float64(s.Entries))
		if slack > c.slack || meta > c.meta {
			t.Errorf("%s: slack %.2f%%, meta %.2f%% of the footprint", c.name, slack, meta)
		}
	}
}

func TestARefusalToGrowStoresNothing(t *testing.T) {
	boom := errors.New("boom")
	for after := range 6 { // the table's first page, tables of segments, the entry's pages, a later entry's
		p := open(t, 0)
		if err := fault.Arm("pool.grow", after, boom); err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(6, 6))
		want := fill{}
		var err error
		for err == nil {
			var h Handle
			enc := entry(r, 2000)
			if h, err = p.Put(enc); err == nil {
				want[h] = enc
			}
		}
		if !errors.Is(err, boom) {
			t.Fatalf("got %v", err)
		}
		if s := p.Stats(); s.Entries != int64(len(want)) || s.Entries > 12 {
			t.Errorf("the fault came after %d entries, %d are stored", len(want), s.Entries)
		}
		enc := entry(r, 2000)
		want[put(t, p, enc)] = enc
		want.check(t, p)
		audit(t, p)
	}
}

func TestThePagePathDoesNotAllocate(t *testing.T) {
	p := open(t, 0)
	r := reader(t, p)
	enc := codec.Encoded{Kind: codec.KindZstd, Data: make([]byte, 400)}
	put(t, p, enc)
	if n := testing.AllocsPerRun(100, func() {
		h := put(t, p, enc)
		_ = p.Ref(h)
		r.Pin()
		_, _ = r.View(h)
		_, _ = r.View(h + 100000)
		r.Unpin()
		_ = p.TryRef(h + 1)
		_, _, _ = p.Release(h)
		_, _, _ = p.Release(h)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
