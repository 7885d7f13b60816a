package cohort

import (
	"math"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/sketch"
	"github.com/agentzip/agentzip/internal/units"
)

// A Hint says what is known of a page's future.
type Hint struct {
	// Soon: the next tool call will probably touch it (the hot set).
	Soon bool
	// Must: it is kept even if it does not shrink, as it is then.
	Must bool
	// Fast: a guest stands still until it is kept. Only what takes a few microseconds is tried.
	Fast bool
}

// The rule of cost. A page that is kept costs its bytes for as long as it stays, and its
// decode time for each access. Both are brought to bytes:
//
//	cost = bytes + exchange x microseconds of decode
//
// One exchange rate stands for accesses x value of time / residence. A page of the hot set is
// accessed once a gap, nearly always; of the others about one in fifty is.
const (
	// exchangeSoon: a call that touches 500 hot pages saves 3 ms if they decode
	// 6 us faster; at 24 B a us it may pay 72 KB for that, 0.3 % of the sandbox's
	// private pages. At 48 the hot pages grow by a third more for 0.4 ms.
	exchangeSoon = 24.0
	exchangeElse = exchangeSoon / 50
)

// decodeTime is the median decode of a kind in microseconds, base not counted
// (bench codec, this rule's own table).
var decodeTime = [codec.Kinds]float64{
	codec.KindRLE: 0.3, codec.KindDelta: 0.4, codec.KindZstd: 5, codec.KindZstdDict: 5, codec.KindZstdBase: 4, codec.KindRaw: 0.2,
}

// Time to have a base, in microseconds.
const (
	baseTemplate = 0.1 // it is mapped
	baseBlock    = 1.2 // a pread
	baseEntry    = 5.5 // a decode
)

func (h Hint) cost(bytes int, micros float64) float64 {
	if h.Soon {
		return float64(bytes) + exchangeSoon*micros
	}
	return float64(bytes) + exchangeElse*micros
}

const (
	// runsEnough ends the search: a page that runs describe so briefly cannot become so
	// much smaller that a header, a base and 30 us would be worth it.
	runsEnough = 64

	// baseEnough: a block against a base that is shorter than this is not compared with
	// one without: a block without a base is rarely shorter, and never by much.
	baseEnough = 384

	// standAlone: a page is kept without a base unless the base saves this part. Only
	// such pages can be bases for the siblings to come.
	standAlone = 0.9

	// leastBase is the shortest entry that is worth being a base.
	leastBase = 128
)

// A choice is the cheapest encoding found so far; its data is in Worker.best.
type choice struct {
	enc  codec.Encoded
	cost float64
}

func (w *Worker) take(b *choice, enc codec.Encoded, cost float64) {
	if cost < b.cost {
		enc.Data = w.best[:copy(w.best[:], enc.Data)]
		*b = choice{enc, cost}
	}
}

// choose encodes a page that is neither public nor shared. If the encoding has a base in the
// pool, the caller gets a reference to that base with it. Of a page that may be a base itself
// features are returned. false: the page does not shrink.
func (c *Cohort) choose(w *Worker, reader *pool.Reader, f units.Frame, page *units.Page, hint Hint, without WaySet) (enc codec.Encoded, features sketch.Features, canBase, ok bool) {
	best := choice{cost: math.Inf(1)}
	limit := w.encoder.Limit()
	if e, ok := w.encoder.Runs(page, nil, limit); ok && !without.Has(WayRLE) {
		w.take(&best, e, hint.cost(len(e.Data), decodeTime[e.Kind]))
	}
	template := c.library.Template(f)
	templateRef := uint32(public(library.ID(f)))
	if template != nil && !without.Has(WayDelta) {
		if e, ok := w.encoder.Runs(page, template, limit); ok {
			e.Operand = templateRef
			w.take(&best, e, hint.cost(len(e.Data)+operandBytes, decodeTime[e.Kind]+baseTemplate))
		}
	}
	if !hint.Fast && (math.IsInf(best.cost, 1) || len(best.enc.Data) > runsEnough) {
		features, canBase = c.blocks(w, reader, page, template, templateRef, hint, without, &best)
	}
	if math.IsInf(best.cost, 1) || len(best.enc.Data) > limit {
		c.dropBase(best.enc)
		return codec.Encoded{}, features, false, false
	}
	return best.enc, features, canBase && !best.enc.Kind.HasBase() && len(best.enc.Data) >= leastBase, true
}

// operandBytes is what the header of an entry with an operand is longer.
const operandBytes = 4

// blocks tries Zstandard: against the template's page, against a similar page of the pool,
// and alone.
func (c *Cohort) blocks(w *Worker, reader *pool.Reader, page, template *units.Page, templateRef uint32, hint Hint, without WaySet, best *choice) (features sketch.Features, known bool) {
	shortest := math.MaxInt
	if template != nil && !without.Has(WayBase) {
		if e, ok := w.encoder.BlockBase(page, template); ok {
			e.Operand = templateRef
			shortest = len(e.Data)
			w.take(best, e, hint.cost(len(e.Data)+operandBytes, decodeTime[e.Kind]+baseTemplate))
		}
	}
	if !without.Has(WaySimilar) {
		if features, known = sketch.Of(page); known {
			shortest = min(shortest, c.trySimilar(w, reader, page, features, hint, without, best))
		}
	}
	if shortest < baseEnough && !without.Has(WayBase) {
		return features, known
	}
	if e, ok := c.block(w, page, without); ok {
		cost, must := hint.cost(len(e.Data), decodeTime[e.Kind]), best.cost
		if best.enc.Kind.HasBase() {
			must /= standAlone // else it is worth being a base for others
		}
		if cost < must {
			c.dropBase(best.enc)
			best.cost = math.Inf(1)
			w.take(best, e, cost)
		}
	}
	return features, known
}

// block encodes a page with the cohort's dictionary, if it has one, or alone.
func (c *Cohort) block(w *Worker, page *units.Page, without WaySet) (codec.Encoded, bool) {
	var dict *codec.Dictionary
	if c.dict != nil {
		dict = c.dict.Dictionary()
	}
	if dict == nil && without.Has(WayZstd) {
		return codec.Encoded{}, false
	}
	return w.encoder.Block(page, dict)
}

// trySimilar encodes a page against the best candidate of the pool, by runs and by a block,
// and returns the shorter length. If that is the best choice so far, the candidate's
// reference goes with it.
func (c *Cohort) trySimilar(w *Worker, reader *pool.Reader, page *units.Page, f sketch.Features, hint Hint, without WaySet, best *choice) int {
	r, base := c.similarBase(w, reader, f)
	if base == nil {
		return math.MaxInt
	}
	was, shortest := best.cost, math.MaxInt
	if e, ok := w.encoder.Runs(page, base, min(w.encoder.Limit(), baseEnough)); ok && !without.Has(WayDelta) {
		e.Operand, shortest = uint32(r), len(e.Data)
		w.take(best, e, hint.cost(len(e.Data)+operandBytes, decodeTime[e.Kind]+baseEntry))
	}
	if e, ok := w.encoder.BlockBase(page, base); ok && !without.Has(WayBase) {
		e.Operand, shortest = uint32(r), min(shortest, len(e.Data))
		w.take(best, e, hint.cost(len(e.Data)+operandBytes, decodeTime[e.Kind]+baseEntry))
	}
	if best.cost == was {
		_ = c.Release(r) // it was alive a moment ago and is ours
	}
	return shortest
}

// similarBase returns the first candidate that is there and shares a feature, with a reference;
// nil if there is none. A candidate that is no such page costs 7 us here, and 30 us if it
// were encoded against, and would hide one behind it that is.
func (c *Cohort) similarBase(w *Worker, reader *pool.Reader, f sketch.Features) (Ref, *units.Page) {
	for _, h := range c.similar.find(f) {
		if h == 0 {
			break
		}
		if !c.pool.TryRef(h) {
			continue
		}
		r := Ref(h)
		enc, err := view(reader, h)
		if err == nil && !enc.Kind.HasBase() { // else the handle is another page's by now
			var base *units.Page
			if base, err = c.base(w, reader, r); err != nil {
				c.reportDamage(err, nil)
			} else if sketch.Similar(base, f) {
				return r, base
			}
		}
		_ = c.Release(r)
	}
	return 0, nil
}

// dropBase gives back the reference that an encoding that is not kept has to its base.
func (c *Cohort) dropBase(enc codec.Encoded) {
	if enc.Kind.HasBase() {
		_ = c.Release(Ref(enc.Operand)) // damage shows when the base is loaded
	}
}
