package pool

import (
	"slices"

	"github.com/agentzip/agentzip/internal/units"
)

// ripeMost segments are given back at most before the lock is taken to say so.
const ripeMost = 1024

// Trim gives the memory back in which no entry is left and that no pinned reader
// can see, and returns how much it was. It moves nothing and does not wait.
func (p *Pool) Trim() units.Bytes {
	return units.Bytes(p.giveBack() + p.trimOpen(&p.young) + p.trimOpen(&p.old) + p.trimTable())
}

// giveBack punches the segments of limbo that no reader can see, and returns how
// many bytes that was.
func (p *Pool) giveBack() (sum int64) {
	for {
		ripe := p.takeRipe()
		bytes, ok := p.punchSegments(ripe)
		sum += bytes
		if len(ripe) < ripeMost || !ok {
			return sum
		}
	}
}

// takeRipe takes segments out of limbo that no reader can see.
func (p *Pool) takeRipe() (ripe []int) {
	for {
		p.mu.Lock()
		p.collectDead()
		least, n := p.leastPinned(), 0
		for ; n < batch; n++ {
			i := p.popRipe(least)
			if i < 0 {
				break
			}
			p.segment(i).state = statePunched
			ripe = append(ripe, i)
		}
		p.mu.Unlock()
		if n < batch || len(ripe) >= ripeMost {
			return ripe
		}
	}
}

// punchSegments makes segments that are the caller's free. false: some could not be
// punched and are in limbo again.
func (p *Pool) punchSegments(ripe []int) (sum int64, ok bool) {
	slices.Sort(ripe)
	ok = true
	for len(ripe) > 0 {
		n := 1
		for n < min(punchMost, len(ripe)) && ripe[n] == ripe[0]+n {
			n++
		}
		err := punchPoint.Err()
		if err == nil {
			err = p.punch(p.arena, int64(ripe[0])*segmentSize, int64(n)*segmentSize)
		}
		ok = ok && err == nil
		sum += p.punched(ripe[:n], err == nil)
		ripe = ripe[n:]
	}
	return sum, ok
}

// punched notes that segments, at most batch of them, have no memory any more, or that they kept it.
func (p *Pool) punched(run []int, gone bool) (sum int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, i := range run {
		s := p.segment(i)
		if !gone {
			s.state = stateLimbo
			p.pushBack(&p.limbo, i)
			continue
		}
		sum += s.memory()
		s.state, s.fill, s.pages = stateFree, 0, 0
		p.pushBack(&p.free, i)
	}
	p.inArena.Add(-sum)
	p.used.Add(-sum)
	return sum
}

// trimOpen gives those pages of open segments back that were in memory when the
// segment was opened and are not needed yet. Meanwhile the segment is in no set.
func (p *Pool) trimOpen(set *openSet) (sum int64) {
	for {
		p.mu.Lock()
		var s *segment
		var o opened
		for j := range set.n {
			if t := p.segment(int(set.segs[j].index)); t.pages > pagesOf(t.fill) {
				s, o = t, set.segs[j]
				set.n--
				set.segs[j] = set.segs[set.n]
				s.state = statePunched
				break
			}
		}
		p.mu.Unlock()
		if s == nil {
			return sum
		}
		keep := int64(pagesOf(s.fill)) * units.PageSize
		n := s.memory() - keep
		err := punchPoint.Err()
		if err == nil {
			err = p.punch(p.arena, int64(o.index)*segmentSize+keep, n)
		}
		p.mu.Lock()
		if err == nil {
			s.pages = pagesOf(s.fill)
			p.inArena.Add(-n)
			p.used.Add(-n)
			sum += n
		}
		s.state = stateOpen
		set.segs[set.n] = o
		set.n++
		if err != nil || set.n > set.most {
			p.seal(set, set.n-1)
		}
		p.mu.Unlock()
	}
}
