package pager

import (
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// sampleAbove is from which encoded size on a page is offered for the training of a
// dictionary: below it, runs and deltas have done the work and a dictionary has nothing to gain.
const sampleAbove = 256

// dictionaryTries is how often a page is encoded anew because the dictionary was replaced
// between asking for it and retaining it. Replacements are seconds apart.
const dictionaryTries = 2

// encode decides the fate of the i-th page of the batch, which was read into its slot. It
// holds no lock. The fate stays fateAbandon where nothing can be done.
func (p *Pager) encode(w *worker, i int) {
	b := &w.batch
	f, page := b.frames[i], w.page(b.slot[i])
	image := p.image.Page(f)
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
	if b.before[i].tag() == tagKept && b.before[i].keptSum(codec.Checksum(page)) {
		b.fates[i], b.after[i] = fateKeep, b.before[i]
		return
	}
	if b.full {
		return
	}
	h, shrinks, err := p.store(w, page, image)
	switch {
	case errors.Is(err, pool.ErrFull):
		b.full = true
		return
	case err != nil:
		p.noteMismatch(b, fmt.Errorf("store frame %d: %w", f, err))
		return
	case !shrinks:
		b.fates[i], b.after[i] = fateKeep, kept(codec.Checksum(page))
		return
	}
	if err := p.verify(w, h, page, image); err != nil {
		p.unref(h)
		p.noteMismatch(b, fmt.Errorf("verify frame %d: %w", f, err))
		return
	}
	b.fates[i], b.after[i] = fateEncoded, evicted(h)
}

func (p *Pager) noteMismatch(b *batch, err error) {
	p.stats.mismatches.Add(1)
	if b.verify == nil {
		b.verify = err
	}
}

// store encodes a page and puts it into the pool; its dictionary is retained with it.
func (p *Pager) store(w *worker, page, image *units.Page) (h pool.Handle, shrinks bool, err error) {
	if err := putPoint.Err(); err != nil {
		return 0, false, err
	}
	enc, ok := p.encodeRetained(w, page, image)
	if p.cohort != nil && (!ok || len(enc.Data) > sampleAbove) {
		p.cohort.Sample(page)
	}
	if !ok {
		return 0, false, nil
	}
	h, err = p.pool.Put(enc)
	if err != nil {
		if enc.Dict != 0 {
			p.cohort.Release(enc.Dict)
		}
		return 0, false, err
	}
	return h, true, nil
}

// encodeRetained encodes a page with the cohort's current dictionary and retains that
// dictionary if it was used.
func (p *Pager) encodeRetained(w *worker, page, image *units.Page) (codec.Encoded, bool) {
	if p.cohort != nil {
		for range dictionaryTries {
			enc, ok := w.encoder.Encode(page, image, p.cohort.Dictionary())
			if !ok || enc.Dict == 0 || p.cohort.Retain(enc.Dict) {
				return enc, ok
			}
		}
	}
	return w.encoder.Encode(page, image, nil)
}

// verify decodes what the pool now holds and compares all of it with the page.
func (p *Pager) verify(w *worker, h pool.Handle, page, image *units.Page) error {
	enc := p.pool.View(h)
	var dict *codec.Dictionary
	if enc.Dict != 0 {
		dict = p.cohort.Lookup(enc.Dict)
	}
	err := w.decoder.Decode(&w.check, enc, image, dict)
	if injected := mismatchPoint.Err(); injected != nil {
		w.check[0] ^= 1
	}
	if err != nil {
		return fmt.Errorf("%w: encoder %v, dictionary %d, %d bytes: %w", ErrVerify, enc.Kind, enc.Dict, len(enc.Data), err)
	}
	if w.check != *page {
		return fmt.Errorf("%w: encoder %v, dictionary %d, %d bytes", ErrVerify, enc.Kind, enc.Dict, len(enc.Data))
	}
	return nil
}
