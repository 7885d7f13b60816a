package pager

import (
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// bridgePages is the widest gap between two runs that are unprotected by one call: to walk
// over a page that is not protected costs 10 ns, another call 1 us and the flush of the TLBs
// of all vCPUs.
const bridgePages = 64

// bridge joins neighbouring runs that are to be unprotected if no page between them must stay
// protected. Caller holds mu.
func (p *Pager) bridge(runs []guestmem.Run) []guestmem.Run {
	joined := runs[:0]
	for _, r := range runs {
		if k := len(joined) - 1; k >= 0 && p.open(joined[k].Start+units.Frame(joined[k].Pages), r.Start) {
			joined[k].Pages = int(r.Start-joined[k].Start) + r.Pages
			continue
		}
		joined = append(joined, r)
	}
	return joined
}

// open reports whether the gap [f, end) is narrow and no page in it is protected.
func (p *Pager) open(f, end units.Frame) bool {
	if end-f > bridgePages {
		return false
	}
	for ; f < end; f++ {
		if t := p.table.load(f).tag(); t == tagClean || t == tagBusy {
			return false
		}
	}
	return true
}

// publish stores the new word of the i-th page. dropped: its physical page must be freed
// now; released: it must be unprotected now. Caller holds mu.
func (p *Pager) publish(b *batch, i int, drop bool, res *EvictResult) (dropped, released bool) {
	f, fate := b.frames[i], b.fates[i]
	now := p.table.load(f)
	if fate == fateSkip {
		return false, false
	}
	if fate == fateClean {
		if now != b.before[i] || !drop || b.mode.stay {
			return false, false // written meanwhile, or the pass ends
		}
		p.table.store(f, evicted(now.ref()))
		p.noteWasted(f)
		res.Clean++
		res.Dropped++
		return true, false
	}
	if now != entryBusy {
		p.noteFate(b, i, fateSkip, drop)
		p.releaseLoose(b.before[i])
		if fate == fateEncoded {
			p.unref(b.after[i].ref())
		}
		res.Cancelled++
		return false, false
	}
	if b.tells(i) {
		p.note(Touch{Frame: f, Write: true, Kind: KindPrivate})
	}
	if !drop && (fate == fateZero || fate == fateEqual || fate == fateSame && !b.mode.stay) {
		fate = fateAbandon
	}
	p.noteFate(b, i, fate, drop)
	if fate != fateAbandon && fate != fateSame {
		p.releaseLoose(b.before[i])
	}
	switch fate {
	case fateEncoded:
		p.kept++
		p.stats.noteStored(b.stored[i])
		res.Encoded++
		res.Bytes += units.Bytes(b.stored[i].Size)
		return p.publishKept(b, i, drop, res)
	case fateSame:
		if b.mode.stay {
			res.Encoded++ // it counts as kept, like those that were encoded
		} else {
			res.Clean++
		}
		return p.publishKept(b, i, drop, res)
	case fateZero:
		p.table.store(f, entryZero)
		res.Zeros++
	case fateEqual:
		p.table.store(f, entryTemplate)
		res.Equal++
	case fateKeep:
		p.table.store(f, b.after[i])
		res.Kept++
		return false, true
	case fateAbandon, fateSkip, fateClean, fateFill:
		p.table.store(f, b.before[i])
		res.Abandoned++
		return false, true
	}
	res.Dropped++
	return true, false
}

// publishKept stores the word of a page that the cohort keeps. Caller holds mu.
func (p *Pager) publishKept(b *batch, i int, drop bool, res *EvictResult) (dropped, released bool) {
	f, r := b.frames[i], b.after[i].ref()
	switch {
	case b.mode.stay:
		p.table.store(f, clean(r))
		return false, false
	case !drop:
		p.table.store(f, p.back(r))
		return false, !p.protect
	}
	p.table.store(f, b.after[i])
	res.Dropped++
	return true, false
}

// releaseLoose gives back the reference of a page that was Loose when it was taken in hand and
// no longer is what it names. Caller holds mu.
func (p *Pager) releaseLoose(before entry) {
	if before.tag() == tagLoose {
		p.release(before.ref())
	}
}

// tells reports whether that the i-th page is private means that it was written since the
// pass before: not if it stays because it did not shrink, and is as it was.
func (b *batch) tells(i int) bool {
	switch b.fates[i] {
	case fateZero, fateEqual, fateEncoded:
		return b.before[i].tag() != tagAhead || b.written[i]
	case fateKeep:
		return b.after[i] != b.before[i]
	case fateSkip, fateClean, fateAbandon, fateSame, fateFill:
	}
	return false
}
