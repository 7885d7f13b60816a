package pool

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/units"
)

// rss returns how much of the pool's mapping this process has mapped.
func rss(tb testing.TB, p *Pool) units.Bytes {
	tb.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	start := fmt.Sprintf("%x-", addressOf(p.table))
	in := false
	for s := bufio.NewScanner(f); s.Scan(); {
		var kb int64
		if strings.HasPrefix(s.Text(), start) {
			in = true
		} else if in {
			if _, err := fmt.Sscanf(s.Text(), "Rss: %d kB", &kb); err == nil {
				return units.Bytes(kb) * units.KiB
			}
		}
	}
	tb.Fatal("the mapping is not in smaps")
	return 0
}

// cpuTime returns what this process has used: other tests' load is not in it.
func cpuTime(tb testing.TB) time.Duration {
	tb.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// populate puts n entries and returns them with the order of their handles.
func populate(tb testing.TB, p *Pool, r *rand.Rand, n int, size func(*rand.Rand) int) (fill, []Handle) {
	tb.Helper()
	want, hs := fill{}, make([]Handle, n)
	for i := range hs {
		enc := entry(r, size(r))
		hs[i] = put(tb, p, enc)
		want[hs[i]] = enc
	}
	return want, hs
}

func drop(tb testing.TB, p *Pool, want fill, hs []Handle) {
	tb.Helper()
	for _, h := range hs {
		release(tb, p, h)
		delete(want, h)
	}
}

func TestCompactReturnsWhatAReleaseLeaves(t *testing.T) {
	for name, size := range map[string]func(*rand.Rand) int{"all": size, "small": smallSize} {
		p := open(t, 0)
		r := rand.New(rand.NewPCG(5, 5))
		want, hs := populate(t, p, r, 20000, size)
		r.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
		full := audit(t, p)
		drop(t, p, want, hs[:len(hs)/2])
		before, rssBefore := audit(t, p), rss(t, p)
		start := cpuTime(t)
		moved, freed := p.Compact(t.Context(), 0)
		took := cpuTime(t) - start
		after, rssAfter := audit(t, p), rss(t, p)
		part := func(s Stats) float64 { return 100 * float64(s.Slack) / float64(s.Footprint) }
		t.Logf("%s: slack %.2f%% full, %.1f%% half released, %.2f%% compacted; resident %v, %v (RSS %v), %v (RSS %v); %d moved in %v of CPU, %d ns each",
			name, part(full), part(before), part(after), full.Resident, before.Resident, rssBefore, after.Resident, rssAfter,
			moved, took, took.Nanoseconds()/int64(moved))
		if before.Resident-after.Resident != freed || rssAfter > after.Resident {
			t.Errorf("Compact says %v; resident went from %v to %v, RSS to %v", freed, before.Resident, after.Resident, rssAfter)
		}
		if part(full) > 3 || part(after) > 8 {
			t.Errorf("slack is %.2f%% after filling, %.2f%% after Compact", part(full), part(after))
		}
		want.check(t, p)
		if moved, _ := p.Compact(t.Context(), 0); moved > 0 {
			t.Errorf("a second Compact moved %d more", moved)
		}
		populate(t, p, r, 10000, size)
		want.check(t, p)
	}
}

func TestAnEmptiedPoolIsBackAtItsBaseline(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(7, 5))
	populated := func(n int) units.Bytes {
		want, hs := populate(t, p, r, n, size)
		r.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
		drop(t, p, want, hs)
		p.Compact(t.Context(), 0)
		s := audit(t, p)
		if s.Entries != 0 || s.Live != 0 || s.Resident != 0 || s.Slack != 0 || rss(t, p) != 0 {
			t.Errorf("after the last entry: %+v, RSS %v", s, rss(t, p))
		}
		return s.Footprint
	}
	// What stays are tables for the most segments and handles there were: the pool,
	// and for each 2 MiB of arena 1 KiB of tables and a page of page table.
	base := populated(15000)
	if most := units.Bytes(p.fresh/chunkLen+1)*(chunkBytesForTest+units.PageSize) + 16*units.KiB; base > most {
		t.Errorf("baseline %v, want at most %v", base, most)
	}
	for range 3 {
		if again := populated(12000); again > base+20*units.KiB {
			t.Errorf("%v stay, %v before", again, base)
		}
	}
}

func TestABudgetBoundsWhatIsMoved(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(8, 5))
	want, hs := populate(t, p, r, 12000, size)
	r.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
	drop(t, p, want, hs[:len(hs)/2])
	const budget = 300 * units.KiB
	calls, moved := 0, 1
	for ; moved > 0; calls++ {
		before := p.old.grown
		moved, _ = p.Compact(t.Context(), budget)
		if grown := units.Bytes(p.old.grown - before); grown > budget+units.PageSize*oldOpen {
			t.Errorf("with a budget of %v, %v grew", budget, grown)
		}
		audit(t, p)
	}
	if s := p.Stats(); calls < 10 || s.Slack*100 > s.Footprint*8 {
		t.Errorf("%d calls left %+v", calls, s)
	}
	want.check(t, p)
}

func TestAPinnedReaderKeepsWhatItViewed(t *testing.T) {
	p := open(t, 0)
	rd := reader(t, p)
	r := rand.New(rand.NewPCG(9, 5))
	want, hs := populate(t, p, r, 4000, size)
	r.Shuffle(len(hs), func(i, j int) { hs[i], hs[j] = hs[j], hs[i] })
	viewed := map[Handle]codec.Encoded{}
	rd.Pin()
	for h := range want {
		enc, err := rd.View(h)
		if err != nil {
			t.Fatal(err)
		}
		viewed[h] = enc
	}
	copyOf := maps.Clone(want)
	drop(t, p, want, hs[:2000])
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if moved, freed := p.Compact(ctx, 0); moved == 0 || freed != 0 {
		t.Errorf("beside a pinned reader %d were moved and %v freed", moved, freed)
	}
	drop(t, p, want, hs[2000:3999])
	p.Trim()
	populate(t, p, r, 1000, size)
	for h, enc := range viewed {
		if !same(copyOf[h], enc) {
			t.Fatalf("the view of %#x changed while it was pinned", h)
		}
	}
	audit(t, p)
	rd.Unpin()
	if p.Trim() == 0 {
		t.Error("nothing was given back after Unpin")
	}
	want.check(t, p)
	audit(t, p)
}

func TestPagesOfTheHandleTableAreGivenBack(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(10, 5))
	want, hs := populate(t, p, r, 10*wordsPerPage, func(*rand.Rand) int { return 10 })
	drop(t, p, want, hs[2*wordsPerPage:5*wordsPerPage])
	drop(t, p, want, hs[8*wordsPerPage:])
	before := p.inTable.Load()
	p.Trim()
	if freed := before - p.inTable.Load(); freed < 4*units.PageSize {
		t.Errorf("%d bytes of the table were given back", freed)
	}
	audit(t, p)
	for _, h := range hs {
		if _, there := want[h]; p.TryRef(h) != there {
			t.Fatalf("TryRef(%#x) is not %v", h, there)
		} else if there {
			release(t, p, h)
		}
	}
	audit(t, p)
	more, _ := populate(t, p, r, 5*wordsPerPage-10, func(*rand.Rand) int { return 10 })
	for h := range more {
		if h > 10*wordsPerPage {
			t.Fatalf("handle %#x, although lower ones are free", h)
		}
	}
	want.check(t, p)
	audit(t, p)
}

func TestAFailureToGiveBackKeepsTheAccounts(t *testing.T) {
	defer fault.Disarm("pool.punch")
	for after := 0; ; after++ {
		p := open(t, 0)
		r := rand.New(rand.NewPCG(11, 5))
		want, hs := populate(t, p, r, 4000, size)
		drop(t, p, want, hs[100:])
		hits := fault.Hits("pool.punch")
		if err := fault.Arm("pool.punch", after, errors.New("boom")); err != nil {
			t.Fatal(err)
		}
		p.Compact(t.Context(), 0)
		if fault.Hits("pool.punch") == hits {
			if after < 3 {
				t.Errorf("memory is given back with %d calls", after)
			}
			return
		}
		audit(t, p)
		p.Compact(t.Context(), 0)
		if s := audit(t, p); s.Resident > 256*units.KiB {
			t.Errorf("%v stay for %d entries", s.Resident, s.Entries)
		}
		want.check(t, p)
	}
}

func TestARefusalToGrowEndsCompact(t *testing.T) {
	for after := range 24 {
		p := open(t, 0)
		r := rand.New(rand.NewPCG(12, 5))
		want, hs := populate(t, p, r, 2000, size)
		for i := 0; i < len(hs); i += 2 {
			drop(t, p, want, hs[i:i+1])
		}
		if err := fault.Arm("pool.grow", after, errors.New("boom")); err != nil {
			t.Fatal(err)
		}
		p.Compact(t.Context(), 0)
		audit(t, p)
		want.check(t, p)
		fault.Disarm("pool.grow")
		p.Compact(t.Context(), 0)
		if s := audit(t, p); s.Slack*100 > s.Footprint*10 {
			t.Errorf("slack %v of %v", s.Slack, s.Footprint)
		}
		want.check(t, p)
	}
}

func TestMovingKeepsBytesAndReferences(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(13, 5))
	want, hs := populate(t, p, r, 3000, size)
	refs := map[Handle]int{}
	for range 5000 {
		h := hs[r.IntN(len(hs))]
		if err := p.Ref(h); err != nil {
			t.Fatal(err)
		}
		refs[h]++
	}
	for _, h := range hs {
		if r.IntN(3) > 0 && refs[h] == 0 {
			drop(t, p, want, []Handle{h})
		}
	}
	if moved, _ := p.Compact(t.Context(), 0); moved < 500 {
		t.Fatalf("%d moved", moved)
	}
	want.check(t, p)
	for h, enc := range want {
		for range refs[h] {
			if freed, _ := release(t, p, h); freed {
				t.Fatal("freed too early")
			}
		}
		freed, was := release(t, p, h)
		if !freed || was.Sum != enc.Sum || !bytes.Equal(was.Data, nil) {
			t.Fatalf("freed %v, was %+v", freed, was)
		}
	}
}

// What Compact read of an entry may be old when it points the handle at the copy.
func TestAnEntryThatChangesWhileItMoves(t *testing.T) {
	p := onHeap(0, 16)
	r := rand.New(rand.NewPCG(14, 5))
	want, hs := populate(t, p, r, 20, size)
	read := func(h Handle) word { return word(p.word(h).Load()) }

	w := read(hs[0])
	if err := p.Ref(hs[0]); err != nil {
		t.Fatal(err)
	}
	n, err := p.move(hs[0], w)
	if now := read(hs[0]); n == 0 || err != nil || now.place() == w.place() || now.refs() != 2 {
		t.Errorf("referenced meanwhile: moved %d B, %v, %d references", n, err, now.refs())
	}
	live := func() (sum int32) {
		for i := range p.fresh {
			sum += p.segment(i).live.Load() % hold
		}
		return sum
	}
	w = read(hs[1])
	drop(t, p, want, hs[1:2])
	before := live()
	if n, err := p.move(hs[1], w); n != 0 || err != nil || live() != before {
		t.Errorf("released meanwhile: moved %d B, %v, %d B live, %d before", n, err, live(), before)
	}

	w = read(hs[2])
	drop(t, p, want, hs[2:3])
	var again Handle
	for again != hs[2] {
		enc := entry(r, 10)
		again = put(t, p, enc)
		want[again] = enc
	}
	before = live()
	if n, err := p.move(hs[2], w); n != 0 || err != nil || live() != before {
		t.Errorf("given to another entry meanwhile: moved %d B, %v, %d B live, %d before", n, err, live(), before)
	}
	want.check(t, p)
}

func TestAPageOfTheTableThatComesBackByBeingReadIsGivenBackAgain(t *testing.T) {
	p := open(t, 0)
	r := rand.New(rand.NewPCG(15, 5))
	want, hs := populate(t, p, r, 3*wordsPerPage, func(*rand.Rand) int { return 10 })
	drop(t, p, want, hs[wordsPerPage:])
	p.Trim()
	present := &(*p.present.Load())[0]
	present.Or(1 << 2) // as a TryRef saw it before the page was given back
	if p.TryRef(2*wordsPerPage + 5) {
		t.Error("a reference to nothing")
	}
	present.And(^uint64(1 << 2))
	p.Trim()
	audit(t, p)
	want.check(t, p)
}

// An open segment that is being trimmed is in no set; Puts may fill its place.
func TestTrimmedOpenSegmentsFindTheirSetFull(t *testing.T) {
	for _, fails := range []bool{false, true} {
		p := onHeap(0, 32)
		r := rand.New(rand.NewPCG(16, 5))
		want, _ := populate(t, p, r, 3, size)
		s := p.segment(int(p.young.segs[0].index))
		more := int64(segmentSize) - s.memory() // as of a segment that comes from limbo
		s.pages = segmentSize / units.PageSize
		p.inArena.Add(more)
		p.used.Add(more)
		punch := p.punch
		p.punch = func(mem []byte, at, n int64) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			for p.young.n < p.young.most {
				if err := p.open(&p.young, p.limit); err != nil {
					t.Fatal(err)
				}
			}
			if fails {
				return errors.New("boom")
			}
			return punch(mem, at, n)
		}
		freed := int64(p.Trim())
		if fails && freed != 0 || !fails && freed != more || p.young.n != p.young.most || s.state != stateSealed {
			t.Errorf("Trim freed %d of %d B and left %d segments open, state %d", freed, more, p.young.n, s.state)
		}
		p.punch = punch
		audit(t, p)
		more2, _ := populate(t, p, r, 200, size)
		more2.check(t, p)
		want.check(t, p)
	}
}
