package pool

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

const (
	// deadEnough is the part of the sealed segments' memory, in 1/100, that
	// Compact leaves dead. With 2 it would move a third more of what a random
	// release leaves.
	deadEnough = 4
	// liveMost: a segment of which more, in 1/100, is live is left alone: to free
	// 6 B of it 94 B would be copied.
	liveMost = 94
	// roundLeast is what Compact moves at least before it frees what it moved
	// out of; beyond, an eighth of the pool. The pool is larger by this
	// meanwhile, and each round reads the whole handle table.
	roundLeast = 1 << 20
	// stuckMost: a segment that kept live bytes in that many calls is not tried
	// again. It holds a damaged entry; one that was just being put is there for
	// one call.
	stuckMost = 3
)

// A candidate is a segment that may be emptied.
type candidate struct {
	index        int
	live, memory int64 // bytes
}

// Compact moves entries out of the sealed segments of which the largest part is
// dead, until little of the pool is dead or budget bytes have been copied (0: no
// bound), and gives the memory back that this and earlier releases made free. It
// waits, with no lock held, for readers that are pinned to be unpinned. When ctx
// ends it returns early; what it had moved is given back by the next call.
//
// One call runs at a time; a second waits for its end. Everything else may run
// beside it. freed is by how much the pool's pages became less by it.
func (p *Pool) Compact(ctx context.Context, budget units.Bytes) (moved int, freed units.Bytes) {
	select {
	case p.compacting <- struct{}{}:
	case <-ctx.Done():
		return 0, 0
	}
	defer func() { <-p.compacting }()
	p.compactions++
	if budget <= 0 {
		budget = units.Bytes(len(p.arena))
	}
	p.mu.Lock()
	p.sealSparse(&p.young)
	p.sealSparse(&p.old)
	grown := p.old.grown
	p.mu.Unlock()

	var sum int64
	for copied := int64(0); ctx.Err() == nil; {
		victims := p.victims(int64(budget) - copied)
		if len(victims) == 0 {
			break
		}
		n, bytes, ok := p.evacuate(ctx, victims)
		moved += n
		copied += bytes
		if !p.settle(ctx) {
			break
		}
		if ok {
			continue // what this round emptied, the next one fills
		}
		back := p.giveBack()
		sum += back
		if back == 0 {
			break
		}
	}
	sum += int64(p.Trim())
	p.mu.Lock()
	grown = p.old.grown - grown
	p.mu.Unlock()
	return moved, max(0, units.Bytes(sum-grown))
}

// victims chooses segments to empty in one round and marks them. What lives in
// them is at most budget bytes, and fits below the limit, or is one segment's.
func (p *Pool) victims(budget int64) []candidate {
	var all []candidate
	var total, dead int64
	for from, end := 0, 1; from < end; from += batch {
		p.mu.Lock()
		end = p.fresh
		for i := from; i < min(from+batch, end); i++ {
			s := p.segment(i)
			if s.state != stateSealed || s.stuck == stuckMost || s.tried == p.compactions {
				continue
			}
			c := candidate{i, int64(s.live.Load()), s.memory()}
			total += c.memory
			dead += c.memory - c.live
			if c.live*100 <= c.memory*liveMost {
				all = append(all, c)
			}
		}
		p.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.live*b.memory, b.live*a.memory) })

	enough, n := total*deadEnough/100, 0
	for ; n < len(all) && dead > enough && all[n].live <= budget; n++ {
		dead -= all[n].memory - all[n].live
		budget -= all[n].live
	}
	// Of these the lowest: what is empty in the end lies in long runs, which are
	// punched six times faster than single segments.
	all = all[:n]
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.index, b.index) })
	chosen := all[:0]
	most := min(max(roundLeast, total/8), p.limit-p.used.Load()-workRoom)
	for _, c := range all {
		if len(chosen) > 0 && c.live > most {
			break
		}
		most -= c.live
		if p.claim(c.index) {
			chosen = append(chosen, c)
		}
	}
	return chosen
}

// claim makes a sealed segment a victim, unless it has just died.
func (p *Pool) claim(i int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.segment(i)
	if s.state != stateSealed {
		return false
	}
	for live := s.live.Load(); live > 0; live = s.live.Load() {
		if s.live.CompareAndSwap(live, live+hold) {
			s.state = stateVictim
			return true
		}
	}
	return false
}

// evacuate moves what lives in the victims elsewhere: handle by handle, because an
// entry does not know its own (4 B each would be 1 % of the pool; reading 8 B of
// each handle costs 1-2 ns). false: it ended early.
func (p *Pool) evacuate(ctx context.Context, victims []candidate) (moved int, copied int64, ok bool) {
	p.mu.Lock()
	pages, isVictim := len(p.handles.pages), make([]uint64, p.fresh/64+1)
	p.mu.Unlock()
	for _, c := range victims {
		isVictim[c.index/64] |= 1 << (c.index % 64)
	}
	ok = true
	for page := 0; page < pages && ok; page++ {
		present := *p.present.Load()
		if present[page/64].Load()>>(page%64)&1 == 0 {
			continue
		}
		for h := Handle(page * wordsPerPage); ok && h < Handle((page+1)*wordsPerPage); h++ {
			w := word(p.word(h).Load())
			if !w.valid() || w.refs() == 0 {
				if w == 0 {
					p.strayed.Store(true)
				}
				continue
			}
			i := int(w.place()) * unit / segmentSize
			if i/64 >= len(isVictim) || isVictim[i/64]>>(i%64)&1 == 0 {
				continue
			}
			n, err := p.move(h, w)
			if n > 0 {
				moved++
				copied += int64(n)
			}
			ok = err == nil
		}
		ok = ok && ctx.Err() == nil
	}
	for _, c := range victims {
		p.mu.Lock()
		s := p.segment(c.index)
		if s.live.Load() > hold && ok {
			s.stuck, s.tried = s.stuck+1, p.compactions
		}
		s.state = stateSealed
		p.unhold(c.index, s)
		p.mu.Unlock()
	}
	return moved, copied, ok
}

// move copies the entry that w, the word of h, points at, and points the word at
// the copy. 0: the entry was released meanwhile, or is damaged.
func (p *Pool) move(h Handle, w word) (n int, err error) {
	from := int(w.place()) * unit
	enc, ok := p.readEntry(h, from)
	if !ok {
		return 0, nil
	}
	n = entrySize(enc.Kind, len(enc.Data))
	p.mu.Lock()
	to, err := p.allot(&p.old, n, p.limit)
	p.mu.Unlock()
	if err != nil {
		return 0, err
	}
	copy(p.arena[to:to+n], p.arena[from:from+n])
	a := p.word(h)
	for !a.CompareAndSwap(uint64(w), uint64(w.withPlace(uint32(to/unit)))) {
		// References came or went. That the place is still the same one proves that
		// it is still the same entry: no place of a victim is written again.
		place := w.place()
		if w = word(a.Load()); !w.valid() || w.refs() == 0 || w.place() != place {
			if w == 0 {
				p.strayed.Store(true)
			}
			p.abandon(to, n)
			return 0, nil
		}
	}
	p.abandon(from, n)
	return n, nil
}

// settle waits until no reader sees what is dead now. false: ctx ended first.
func (p *Pool) settle(ctx context.Context) bool {
	p.mu.Lock()
	p.collectDead()
	stamp := p.epoch.Load()
	p.mu.Unlock()
	// A decode takes 3-20 us: asked twice as seldom, a round is over 40 us later.
	for tries := 0; ; tries++ {
		p.mu.Lock()
		clear := p.leastPinned() >= stamp
		p.mu.Unlock()
		switch {
		case clear:
			return true
		case ctx.Err() != nil:
			return false
		case tries < 10:
			runtime.Gosched()
		default:
			time.Sleep(min(time.Duration(tries)*2*time.Microsecond, time.Millisecond))
		}
	}
}
