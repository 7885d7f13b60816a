// Package dictionary trains, keeps and retires the Zstandard dictionaries that
// the siblings of one trust domain share.
//
// A dictionary is in one state, and its holds say which:
//
//	(training) --adopted--> current (1 + pages) --replaced--> retired (pages) --last page gone--> gone, memory freed
//
// A hold is a page in a pool that names the dictionary (Retain, Release), or
// being current. An id is used once in the life of a cohort.
//
// The samples are in one state as well:
//
//	closed --enough pages went by--> open, filling --full, or Train--> training --> closed
//
// The reservoir is memory of its own only while open and training: 4 MiB would
// be more than several compressed sandboxes.
//
// Lock order: training, then mu, then nothing. Dictionary, Lookup, Retain and
// Release take no lock (but for the Release that frees a dictionary, once in its
// life) and may be called on the fault path.
package dictionary

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

// Defaults, measured on pages of Debian guests after git, grep, find and pytest
// (train on one guest, encode the 4,987 pages of another, bytes a page; without
// a dictionary 804; all at level 3 with its full tables, which is within 0.5 % of
// what codec uses).
const (
	// defaultDictSize: 16 KiB 780, 32 KiB 770, 64 KiB 764, 110 KiB 757. With its
	// tables a dictionary of 64 KiB takes 230 KiB while it is current: it pays from
	// some 7,000 pages in the pool on.
	defaultDictSize = 64 << 10

	// defaultSamples: 1,000 pages 764, 4,000 pages 762. It takes 0.1 s of CPU; 4,000
	// take 0.2 s and four times the memory while they are collected.
	defaultSamples = 1000
)

// Options of a Set. The zero value is ready for use.
type Options struct {
	DictSize int // bytes of a trained dictionary; 0 = 64 KiB
	Samples  int // pages to train from; 0 = 1,000

	// AtStake returns the bytes in the pool that a dictionary could have made smaller; nil
	// leaves it out of account.
	AtStake func() units.Bytes
}

// Set is safe for concurrent use. Use New.
type Set struct {
	dictSize int                // immutable
	atStake  func() units.Bytes // immutable, may be nil

	current atomic.Pointer[holding]                   // nil before the first training; written under mu
	table   atomic.Pointer[map[codec.DictID]*holding] // alive ones; the map is never changed, only replaced, under mu

	asked atomic.Int64 // pages sampled, to ask AtStake now and then
	idle  atomic.Bool  // a dictionary could not pay for itself

	samples   reservoir
	trainings atomic.Int64
	refusals  atomic.Int64

	training sync.Mutex // held by the one training that runs

	mu     sync.Mutex
	lastID codec.DictID // guarded by mu
}

// A holding is a dictionary that is alive.
type holding struct {
	dict  *codec.Dictionary
	holds atomic.Int64 // pages that name it, + 1 while it is current; 0 is for ever
}

// hold adds a hold unless there is none any more.
func (h *holding) hold() bool {
	for n := h.holds.Load(); n > 0; n = h.holds.Load() {
		if h.holds.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// New returns a cohort without a dictionary. Close frees its memory.
func New(o Options) *Set {
	if o.DictSize == 0 {
		o.DictSize = defaultDictSize
	}
	if o.Samples == 0 {
		o.Samples = defaultSamples
	}
	d := &Set{dictSize: o.DictSize, atStake: o.AtStake}
	d.table.Store(&map[codec.DictID]*holding{})
	d.samples.init(max(o.Samples, codec.MinSamples*holdOut/(holdOut-1)+1))
	return d
}

// Sample offers a private page for training; it copies what it keeps. Most
// calls are two atomic operations; those that keep a page take about 1 us. While a
// dictionary could not pay for itself (Options.AtStake), nothing is kept: the
// samples alone would be as much memory as several compressed sandboxes.
func (d *Set) Sample(p *units.Page) {
	if d.atStake != nil && d.asked.Add(1)%askEvery == 1 {
		d.idle.Store(float64(d.atStake())*hope < payBack*float64(d.dictSize+tablesSize))
	}
	if !d.idle.Load() {
		d.samples.offer(p)
	}
}

const (
	// askEvery is for how many pages an answer of AtStake holds.
	askEvery = 256

	// hope is the part of the bytes at stake that a dictionary saves: 5 % of blocks were
	// measured on gaps of sixteen siblings.
	hope = 0.05

	// tablesSize is what a dictionary occupies beside its bytes (zstd_cgo.go).
	tablesSize = 169 << 10
)

// Dictionary returns the current one, or nil before the first training. It may
// be replaced, and closed, at any moment: an Encoder then encodes without it.
func (d *Set) Dictionary() *codec.Dictionary {
	if h := d.current.Load(); h != nil {
		return h.dict
	}
	return nil
}

// Lookup returns a live dictionary, or nil. It stays alive as long as a page
// whose Retain succeeded was not released. Lock-free.
func (d *Set) Lookup(id codec.DictID) *codec.Dictionary {
	if h := (*d.table.Load())[id]; h != nil {
		return h.dict
	}
	return nil
}

// Retain notes that one more page names id. false: that dictionary is gone (it
// was replaced after the caller asked for it) and the page must be encoded
// again. Retain(0) does nothing and reports true.
func (d *Set) Retain(id codec.DictID) bool {
	if id == 0 {
		return true
	}
	h := (*d.table.Load())[id]
	return h != nil && h.hold()
}

// Release undoes one Retain that succeeded. Release(0) does nothing. More
// releases than retains are a broken invariant and panic.
func (d *Set) Release(id codec.DictID) {
	if id == 0 {
		return
	}
	h := (*d.table.Load())[id]
	if h == nil {
		panic(fmt.Sprintf("dictionary: release of dictionary %d, which no page names", id))
	}
	d.unhold(h)
}

func (d *Set) unhold(h *holding) {
	n := h.holds.Add(-1)
	if n > 0 {
		return
	}
	if n < 0 {
		panic(fmt.Sprintf("dictionary: dictionary %d released more often than retained", h.dict.ID()))
	}
	d.mu.Lock()
	alive := maps.Clone(*d.table.Load())
	delete(alive, h.dict.ID())
	d.table.Store(&alive)
	d.mu.Unlock()
	h.dict.Close()
}

// adopt makes a dictionary of raw and makes it current.
func (d *Set) adopt(raw []byte) error {
	d.mu.Lock()
	d.lastID++
	id := d.lastID
	d.mu.Unlock()
	dict, err := codec.NewDictionary(id, raw)
	if err != nil {
		return err
	}
	h := &holding{dict: dict}
	h.holds.Store(1)
	d.mu.Lock()
	alive := maps.Clone(*d.table.Load())
	alive[id] = h
	d.table.Store(&alive)
	old := d.current.Swap(h)
	d.mu.Unlock()
	if old != nil {
		d.unhold(old)
	}
	return nil
}

// Stats is an account of a cohort.
type Stats struct {
	Current      codec.DictID   // 0 before the first training
	IDs          []codec.DictID // alive, ascending
	Pages        int64          // that name a dictionary
	Dictionaries units.Bytes    // native memory of all alive, tables included
	Reservoir    units.Bytes    // memory of the samples
	Offered      int64          // pages offered by Sample
	Trainings    int            // that ended with a new dictionary
	Refusals     int            // that did not: samples too few or too alike, or the current dictionary as good
}

// Stats returns the account; each figure is right for some moment of the call.
func (d *Set) Stats() Stats {
	s := Stats{
		Reservoir: d.samples.size(),
		Offered:   d.samples.offered.Load(),
		Trainings: int(d.trainings.Load()),
		Refusals:  int(d.refusals.Load()),
	}
	current := d.current.Load()
	if current != nil {
		s.Current = current.dict.ID()
	}
	alive := *d.table.Load()
	s.IDs = slices.Sorted(maps.Keys(alive))
	for _, h := range alive {
		s.Pages += h.holds.Load()
		if h == current {
			s.Pages--
		}
		s.Dictionaries += h.dict.Size()
	}
	return s
}

// Close frees all dictionaries and samples. No other call may run or come
// after: the pagers of the cohort are closed, Run has returned.
func (d *Set) Close() {
	d.current.Store(nil)
	for _, h := range *d.table.Swap(&map[codec.DictID]*holding{}) {
		h.dict.Close()
	}
	d.samples.close()
}

// ErrNoBetter: the new dictionary was not worth its memory; the old one, or
// none, stays current.
var ErrNoBetter = errors.New("the new dictionary is no better")

// Train trains a dictionary from the samples collected so far and makes it
// current. On any error (codec.ErrSamples, ErrNoBetter, ctx) the old one stays.
// It takes 0.1-0.5 s of one core, of which ctx cannot interrupt the part inside
// the library. Trainings run one at a time.
func (d *Set) Train(ctx context.Context) error {
	d.training.Lock()
	defer d.training.Unlock()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("train dictionary: %w", err)
	}
	pages, mapping := d.samples.take()
	err := d.train(ctx, pages)
	d.samples.giveBack(mapping, errors.Is(err, codec.ErrSamples))
	if err != nil {
		d.refusals.Add(1)
		return fmt.Errorf("train dictionary: %w", err)
	}
	d.trainings.Add(1)
	return nil
}

// Rules of a training.
const (
	// holdOut: one sample in so many is not trained on but judges the result.
	holdOut = 8

	// A dictionary must make the held-out pages smaller by keepGain of what the
	// current one (or none) makes of them. Below, its 230 KiB and the old one's,
	// which stays while pages name it, cost more than it saves.
	keepGain = 0.02

	// payBack is how many times its own memory a dictionary must save of what is in the
	// pool already, if that is known. At 1 a small cohort, whose pages refer to the template
	// and to each other, gains nothing and pays for two when the next one comes.
	payBack = 2
)

func (d *Set) train(ctx context.Context, pages []units.Page) error {
	judges := len(pages) / holdOut // the first ones: the reservoir has no order
	raw, err := codec.Train(pages[judges:], d.dictSize)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	trial, err := codec.NewDictionary(1, raw)
	if err != nil {
		return err
	}
	defer trial.Close()
	was, is := encodedSize(pages[:judges], d.Dictionary()), encodedSize(pages[:judges], trial)
	if float64(is) > float64(was)*(1-keepGain) {
		return fmt.Errorf("%d pages are %d bytes, were %d: %w", judges, is, was, ErrNoBetter)
	}
	if d.atStake != nil {
		stake := d.atStake()
		if gain := units.Bytes(float64(stake) * float64(was-is) / float64(was)); gain < payBack*trial.Size() {
			return fmt.Errorf("it would save %v of %v and occupies %v: %w", gain, stake, trial.Size(), ErrNoBetter)
		}
	}
	return d.adopt(raw)
}

// encodedSize returns what pages take in the pool with dict.
func encodedSize(pages []units.Page, dict *codec.Dictionary) int {
	e := codec.NewEncoder(codec.Options{})
	defer e.Close()
	sum := 0
	for i := range pages {
		if enc, ok := e.Encode(&pages[i], nil, dict); ok {
			sum += len(enc.Data)
		} else {
			sum += units.PageSize
		}
	}
	return sum
}
