package pager

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// encode decides the fate of the i-th page of the batch, which was read into its slot. It
// holds no lock. The fate stays fateAbandon where nothing can be done.
func (p *Pager) encode(ctx context.Context, w *worker, i int) {
	b := &w.batch
	f, page := b.frames[i], w.page(b.slot[i])
	image := p.image.Page(f)
	b.written[i] = b.before[i].tag() == tagAhead && b.before[i] != ahead(codec.Checksum(page))
	if b.before[i].tag() == tagLoose {
		if p.unchanged(w, b.before[i].ref(), page) {
			b.fates[i], b.after[i] = fateSame, evicted(b.before[i].ref())
			return
		}
		b.written[i] = true
	}
	switch {
	case image != nil && *page == *image:
		b.fates[i] = fateEqual
		return
	case codec.IsZero(page):
		b.fates[i] = fateZero
		if image == nil {
			b.fates[i] = fateEqual
		}
		return
	}
	if !b.mode.all && b.before[i].tag() == tagKept && b.before[i].keptSum(codec.Checksum(page)) {
		b.fates[i], b.after[i] = fateKeep, b.before[i]
		return
	}
	if b.full {
		return
	}
	hint := cohort.Hint{Soon: p.expected(f), Must: b.mode.all, Fast: b.mode.fast()}
	st, err := p.cohort.Store(w.codec, f, page, hint) //nolint:contextcheck // it waits 5 ms at most
	if errors.Is(err, cohort.ErrFull) && !b.relieved {
		b.relieved = true
		if p.cohort.Relieve(ctx, p) > 0 {
			st, err = p.cohort.Store(w.codec, f, page, hint) //nolint:contextcheck // it waits 5 ms at most
		}
	}
	switch {
	case errors.Is(err, cohort.ErrFull):
		b.full = true
	case err != nil:
		p.noteMismatch(b, fmt.Errorf("store frame %d: %w", f, err))
	case st.Ref == 0:
		b.fates[i], b.after[i] = fateKeep, kept(codec.Checksum(page))
	default:
		b.fates[i], b.after[i], b.stored[i] = fateEncoded, evicted(st.Ref), st
	}
}

// unchanged reports whether a page is what r names, all 4096 bytes: then it need not be
// encoded. To decode and compare takes 3 to 20 us, to encode several times that. If r is
// damaged the guest is unharmed: its page is kept anew, and the siblings are told.
func (p *Pager) unchanged(w *worker, r cohort.Ref, page *units.Page) bool {
	kept := w.page(BatchPages)
	if err := p.cohort.Load(w.codec, kept, r); err != nil {
		p.cohort.ReportDamage(err, p)
		return false
	}
	return *kept == *page
}

func (p *Pager) noteMismatch(b *batch, err error) {
	p.stats.mismatches.Add(1)
	if b.verify == nil {
		b.verify = err
	}
}
