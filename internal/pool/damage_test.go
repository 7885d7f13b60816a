package pool

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
)

// judge views h as a decoder would: it says whether the entry was taken as right.
func judge(tb testing.TB, r *Reader, h Handle) (codec.Encoded, bool) {
	tb.Helper()
	enc, err := r.View(h)
	if err != nil {
		if !errors.Is(err, ErrDamaged) {
			tb.Fatalf("View: %v", err)
		}
		return enc, false
	}
	return enc, crc32.Checksum(enc.Data, castagnoli) == enc.Sum
}

// wordAndEntry returns the bytes of the file that belong to h.
func wordAndEntry(p *Pool, h Handle) (table, entry []byte) {
	off := int(word(p.word(h).Load()).place()) * unit
	enc, _ := p.readEntry(h, off)
	return p.table[int(h)*wordSize : int(h+1)*wordSize], p.arena[off : off+entrySize(enc.Kind, len(enc.Data))]
}

func TestAFlippedBitIsNeverTakenAsRight(t *testing.T) {
	p := onHeap(0, 16)
	r := rand.New(rand.NewPCG(20, 20))
	want, hs := populate(t, p, r, 120, func(r *rand.Rand) int { return r.IntN(300) })
	drop(t, p, want, hs[100:]) // whose bytes and words still lie there
	rd := p.NewReader()
	rd.Pin()
	defer rd.Unpin()
	flips, missed := 0, 0
	for _, h := range hs[:100] {
		before := want[h]
		table, entry := wordAndEntry(p, h)
		for part, mem := range [][]byte{table, entry} {
			for i := range mem {
				for bit := range 8 {
					mem[i] ^= 1 << bit
					enc, right := judge(t, rd, h)
					flips++
					switch {
					case right && !same(before, enc):
						t.Fatalf("part %d, byte %d, bit %d of entry %#x: another entry is taken as right", part, i, bit, h)
					case right:
						missed++ // the byte of rounding
					case part == 0 && p.TryRef(h):
						t.Fatalf("byte %d, bit %d of word %#x: a reference was given", i, bit, h)
					}
					mem[i] ^= 1 << bit
				}
			}
		}
	}
	if missed > 8*len(want) {
		t.Errorf("%d of %d flips changed nothing", missed, flips)
	}
	for _, h := range hs[100:] {
		mem := p.table[int(h)*wordSize : int(h+1)*wordSize]
		for i := range 64 {
			mem[i/8] ^= 1 << (i % 8)
			if p.TryRef(h) {
				t.Fatalf("bit %d of a released handle's word made it an entry", i)
			}
			mem[i/8] ^= 1 << (i % 8)
		}
	}
	want.check(t, p)
}

func TestOneHandlesEntryNeverPassesForAnothers(t *testing.T) {
	p := onHeap(0, 16)
	r := rand.New(rand.NewPCG(21, 21))
	_, hs := populate(t, p, r, 300, smallSize)
	rd := p.NewReader()
	rd.Pin()
	defer rd.Unpin()
	for _, h := range hs {
		w := p.word(h).Load()
		for _, other := range hs {
			if other == h {
				continue
			}
			p.word(h).Store(uint64(word(w).withPlace(word(p.word(other).Load()).place()))) // a word that passes its own check
			if _, right := judge(t, rd, h); right {
				t.Fatalf("the entry of %#x is taken for that of %#x", other, h)
			}
		}
		p.word(h).Store(w)
	}
}

// Each flip is followed by the life of a pool: the damaged entry may be lost, no
// other one may change, nothing may panic.
func TestAFlippedBitHarmsNoOtherEntry(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 22))
	for seed := range 2 {
		for i := range 64 + 8*headOp + 16 {
			p := onHeap(0, 16)
			r := rand.New(rand.NewPCG(23, uint64(seed)))
			want, hs := populate(t, p, r, 200, smallSize)
			victim := hs[r.IntN(len(hs))]
			table, entry := wordAndEntry(p, victim)
			if i < 64 {
				table[i/8] ^= 1 << (i % 8)
			} else {
				at := min((i-64)/8, len(entry)-1)
				entry[at] ^= 1 << (i % 8)
			}
			live(t, p, r, want, hs, victim)
		}
	}
	for range 100 { // words of free handles
		p := onHeap(0, 16)
		want, hs := populate(t, p, r, 200, smallSize)
		drop(t, p, want, hs[150:])
		h := hs[150+r.IntN(50)]
		p.table[int(h)*wordSize+r.IntN(8)] ^= 1 << r.IntN(8)
		live(t, p, r, want, hs[:150], 0)
	}
}

// live releases, compacts, puts and releases, with one handle damaged.
func live(t *testing.T, p *Pool, r *rand.Rand, want fill, hs []Handle, damaged Handle) {
	t.Helper()
	first, lost := r.IntN(2) == 0, len(want[damaged].Data)
	for i, h := range hs {
		if h == damaged && first || h != damaged && i%2 == 0 {
			if _, _, err := p.Release(h); err != nil && h != damaged {
				t.Fatal(err)
			}
			delete(want, h)
		}
	}
	p.Compact(context.Background(), 0)
	delete(want, damaged)
	for range 300 {
		enc := entry(r, smallSize(r))
		h := put(t, p, enc)
		if _, twice := want[h]; twice {
			t.Fatalf("handle %#x was given out twice", h)
		}
		want[h] = enc
	}
	p.Compact(context.Background(), 0)
	want.check(t, p)
	for h := range want {
		release(t, p, h)
	}
	_, _, _ = p.Release(damaged)
	for range stuckMost + 1 {
		p.Compact(context.Background(), 0)
	}
	s := audit(t, p)
	if s.Entries == 0 && s.Live != 0 || s.Entries == 1 && int(s.Live) != lost {
		t.Fatalf("%d entries of %d B are left; the damaged one had %d B", s.Entries, s.Live, lost)
	}
	if s.Entries > 1 || s.Resident > segmentSize+8*4096 {
		t.Fatalf("one entry is damaged, %+v stay", s)
	}
}

func TestManyFlippedBitsCrashNothing(t *testing.T) {
	for seed := range uint64(80) {
		p := onHeap(0, 12)
		r := rand.New(rand.NewPCG(24, seed))
		_, hs := populate(t, p, r, 300, smallSize)
		for _, h := range hs[:100] {
			release(t, p, h)
		}
		for range 1 + r.IntN(400) {
			if r.IntN(2) == 0 {
				p.table[r.IntN(301*wordSize)] ^= 1 << r.IntN(8)
			} else {
				p.arena[r.IntN(segmentSize*2)] ^= 1 << r.IntN(8)
			}
		}
		rd := p.NewReader()
		for range 3 {
			for _, h := range hs {
				rd.Pin()
				_, _ = rd.View(h)
				rd.Unpin()
				if r.IntN(3) == 0 {
					_ = p.TryRef(h)
				}
				if r.IntN(3) == 0 {
					_, _, _ = p.Release(h)
				}
			}
			for range 100 {
				_, _ = p.Put(entry(r, smallSize(r)))
			}
			ctx, cancel := context.WithCancel(context.Background())
			p.Compact(ctx, 0)
			p.Trim()
			cancel()
		}
		rd.Close()
	}
}

func FuzzViewTakesAnyBytes(f *testing.F) {
	p := onHeap(0, spareSegments+1)
	enc := entry(rand.New(rand.NewPCG(1, 1)), 40)
	h := put(f, p, enc)
	_, good := wordAndEntry(p, h)
	f.Add(bytes.Clone(good), uint32(0))
	f.Add([]byte{1, 2, 3, 4, 0xff, 0xff}, uint32(segmentSize-6)/unit)
	f.Add([]byte{}, uint32(1<<placeBits-1))
	f.Fuzz(func(t *testing.T, mem []byte, place uint32) {
		p := onHeap(0, spareSegments+1)
		h := put(t, p, enc)
		p.word(h).Store(uint64(word(p.word(h).Load()).withPlace(place & (1<<placeBits - 1))))
		if from := int(place) * unit; from < len(p.arena) {
			copy(p.arena[from:], mem)
		}
		rd := p.NewReader()
		rd.Pin()
		got, err := rd.View(h)
		rd.Unpin()
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		if got.Kind == 0 || int(got.Kind) >= codec.Kinds || len(got.Data) > codec.MaxData || !got.Kind.HasOperand() && got.Operand != 0 {
			t.Fatalf("View returned %+v", got)
		}
	})
}
