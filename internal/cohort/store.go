package cohort

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/sketch"
	"github.com/agentzip/agentzip/internal/units"
)

// Failure points: putPoint is a full pool, mismatchPoint damages what a verification
// compares.
var (
	putPoint      = fault.NewPoint("cohort.put")
	mismatchPoint = fault.NewPoint("cohort.mismatch")
)

// sampleAbove is from which encoded size on a page is offered for the training of a
// dictionary: below it there is nothing to gain.
const sampleAbove = 256

// dictionaryTries is how often a page is encoded anew because the dictionary was replaced
// between asking for it and retaining it. Replacements are seconds apart.
const dictionaryTries = 2

// Stored says how a page was kept.
type Stored struct {
	Ref  Ref // 0: it does not shrink, nothing is kept
	Way  Way
	Size int // bytes that its entry added to the pool, header left out; 0 for a reference
}

// Store keeps a page and returns a reference, after what is kept was decoded (or a public
// page read) and compared with all of it. f is the frame it lies in: its template page is
// the first base to try. The page must not change meanwhile, and is neither all zeros
// nor equal to the template's page of the frame: those need no Store.
//
// ErrFull: see there. ErrVerify: the codec is wrong, a report worth failing a run for.
// Preconditions: w came from NewWorker and is not in use.
func (c *Cohort) Store(w *Worker, f units.Frame, page *units.Page, hint Hint) (Stored, error) {
	sum := codec.Checksum(page)
	if !c.without.Has(WayPublic) {
		if id, ok := c.library.Find(page, sum); ok {
			return Stored{Ref: public(id), Way: WayPublic}, nil
		}
	}
	reader := w.reader(c)
	if !c.without.Has(WayShared) {
		if h := c.findEqual(w, reader, page, sum); h != 0 {
			return Stored{Ref: Ref(h), Way: WayShared}, nil
		}
	}
	if err := putPoint.Err(); err != nil {
		return Stored{}, err
	}
	enc, h, features, canBase, err := c.encode(w, reader, f, page, sum, hint)
	if err != nil || h == 0 {
		return Stored{}, err
	}
	r := Ref(h)
	c.notePut(enc)
	if err := c.verify(w, reader, r, page); err != nil {
		return Stored{}, errors.Join(fmt.Errorf("%w: encoder %v, operand %d, %d bytes: %w", ErrVerify, enc.Kind, enc.Operand, len(enc.Data), err), c.Release(r))
	}
	// From here on siblings may find it: it is right.
	if !c.without.Has(WayShared) {
		c.equal.insert(sum, h, func(h pool.Handle) (uint32, bool) { return sumOf(reader, h) })
	}
	if canBase {
		c.similar.insert(features, h)
	}
	c.grow(reader)
	return Stored{Ref: r, Way: Way(enc.Kind), Size: len(enc.Data)}, nil
}

// encode puts the cheapest encoding of page into the pool. h is 0 if the page does not shrink.
func (c *Cohort) encode(w *Worker, reader *pool.Reader, f units.Frame, page *units.Page, sum uint32, hint Hint) (enc codec.Encoded, h pool.Handle, features sketch.Features, canBase bool, err error) {
	for try := 0; ; try++ {
		reader.Pin()
		var ok bool
		enc, features, canBase, ok = c.choose(w, reader, f, page, hint, c.without)
		reader.Unpin()
		if c.dict != nil && !hint.Fast && (!ok || len(enc.Data) > sampleAbove && !enc.Kind.HasBase()) {
			c.dict.Sample(page)
		}
		if !ok && !hint.Must {
			return enc, 0, features, false, nil
		}
		if !ok {
			enc = codec.Raw(page)
		}
		if id := enc.Dict(); id == 0 || c.dict.Retain(id) {
			break
		}
		if try < dictionaryTries {
			continue
		}
		// Dictionaries come and go faster than a page is encoded.
		if !hint.Must {
			return enc, 0, features, false, nil
		}
		enc = codec.Raw(page)
		break
	}
	enc.Sum = sum
	h, err = c.put(sealed(enc))
	if err != nil {
		if id := enc.Dict(); id != 0 {
			c.dict.Release(id)
		}
		c.dropBase(enc)
		return enc, 0, features, false, fmt.Errorf("store page of frame %d: %w", f, err)
	}
	return enc, h, features, canBase, nil
}

// What a pass that meets a full pool spends on room that released entries left: at most so
// many bytes are moved, 1 ms of one core, and so long is waited for readers. Tenfold, a call
// that comes meanwhile would wait for it.
const (
	fullBudget = units.MiB / 2
	fullWait   = 5 * time.Millisecond
)

// put is pool.Put; if the pool is full, entries are moved together once and it is tried again.
// Preconditions: the caller's reader is not pinned.
func (c *Cohort) put(enc codec.Encoded) (pool.Handle, error) {
	h, err := c.pool.Put(enc)
	if !errors.Is(err, ErrFull) {
		return h, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), fullWait)
	defer cancel()
	if _, freed := c.pool.Compact(ctx, fullBudget); freed == 0 {
		return 0, err
	}
	return c.pool.Put(enc)
}

// Probe returns how Store would encode a page now, with some more ways turned off, and the
// bytes of the entry; 0 if it does not shrink. Nothing is kept. References to equal pages
// are not looked for. It is for measurements.
func (c *Cohort) Probe(w *Worker, f units.Frame, page *units.Page, without WaySet) (Way, int) {
	reader := w.reader(c)
	reader.Pin()
	enc, _, _, ok := c.choose(w, reader, f, page, Hint{}, c.without|without)
	reader.Unpin()
	if !ok {
		return 0, 0
	}
	c.dropBase(enc)
	return Way(enc.Kind), len(enc.Data)
}

// verify decodes what the pool holds now and compares all of it with the page.
func (c *Cohort) verify(w *Worker, reader *pool.Reader, r Ref, page *units.Page) error {
	reader.Pin()
	defer reader.Unpin()
	err := c.load(w, reader, &w.check, r)
	if mismatchPoint.Err() != nil {
		w.check[0] ^= 1
	}
	if err == nil && w.check != *page {
		err = errors.New("it decodes to another page")
	}
	return err
}

// findEqual returns an entry whose page was decoded and compared, with a reference; 0
// if there is none.
func (c *Cohort) findEqual(w *Worker, reader *pool.Reader, page *units.Page, sum uint32) pool.Handle {
	for _, b := range buckets(*c.equal.table.Load(), sum) {
		for i := range b {
			s := slot(b[i].Load())
			if !s.tagged(sum) {
				continue
			}
			if h := s.handle(); c.isEqual(w, reader, h, page, sum) {
				return h
			}
		}
	}
	return 0
}

// isEqual reports whether h is an entry of page; then the caller has a reference to it.
func (c *Cohort) isEqual(w *Worker, reader *pool.Reader, h pool.Handle, page *units.Page, sum uint32) bool {
	reader.Pin()
	defer reader.Unpin()
	if enc, err := reader.View(h); err != nil || enc.Sum != sum {
		return false // another page, or a stale slot: nobody is harmed by it
	}
	if !c.pool.TryRef(h) {
		return false
	}
	// Ours from here on, whatever it is by now.
	err := c.load(w, reader, &w.check, Ref(h))
	if err == nil && w.check == *page {
		return true
	}
	if err != nil {
		c.reportDamage(err, nil)
	}
	_ = c.Release(Ref(h))
	return false
}

// grow makes the indexes larger when they are full. One worker does it, the others go on
// with what there is.
func (c *Cohort) grow(reader *pool.Reader) {
	if !c.growing.TryLock() {
		return
	}
	defer c.growing.Unlock()
	if !c.without.Has(WayShared) {
		c.equal.grow(c.pool.Stats().Entries, func(h pool.Handle) (uint32, bool) { return sumOf(reader, h) })
	}
	c.similar.grow(c.plain.Load(), c.putPlain.Load())
}

// sumOf returns the checksum of the page that h names now, if any. reader is not pinned.
func sumOf(reader *pool.Reader, h pool.Handle) (uint32, bool) {
	reader.Pin()
	defer reader.Unpin()
	enc, err := reader.View(h)
	return enc.Sum, err == nil
}
