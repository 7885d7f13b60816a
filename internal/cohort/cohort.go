// Package cohort keeps the pages of one trust domain: the siblings that run from one
// template, for one job of one tenant.
//
// A page is kept as a Ref. Which of these it becomes is decided by content first, then
// by cost (choose.go):
//
//	public    it equals a page of the template or a block of its root image: nothing is stored
//	shared    it equals a page that a sibling (or the sandbox itself) has in the pool: one more reference
//	entry     it is encoded: runs; runs or a Zstandard block against a base page; a block with a
//	          dictionary, or without
//
// A base is the template's page of the frame, or a similar page of the pool. A base is
// never encoded against a base itself, so a page is at most two decodes away, and it holds a
// reference: it stays as long as an entry needs it.
//
// # Trust
//
// The Cohort is the wall. Pool, indexes and dictionaries belong to one cohort, a Ref means
// something only in its own, and no lookup sees another's: what a sandbox stores or how
// long that takes tells nothing about other cohorts. Public pages are the exception: every
// clone of the template may read them anyway. With Strict, not even siblings are looked at.
//
// # What may be believed
//
// An index only proposes. A public page is compared byte by byte before it is referenced,
// a shared entry is decoded and compared, and a new entry is decoded from the pool and
// compared before Store returns its Ref. Load checks the CRC-32C of the plain page, also
// of a base. So an index may be wrong, stale or overwritten: that costs bytes, never content.
//
// # Locks
//
// Load, Ref and Release take no lock and allocate nothing (but in a Worker's first use of a
// cohort): they run on the fault path. Store locks for moments inside the pool and when an
// index grows, never across an encode. Lock order: Cohort.growing or Cohort.mu, then the
// locks inside pool and dictionary.
package cohort

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/dictionary"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// A Ref names a page that a Cohort keeps, in 29 bits: a pool handle, or with the highest
// bit set a public page. 0 is none.
type Ref uint32

const (
	// RefBits is the width of a Ref: page tables have no room for more.
	RefBits = 29

	publicBit Ref = 1 << (RefBits - 1)
)

const (
	_ = uint(publicBit - 1 - Ref(pool.MaxHandle)) // a handle fits
	_ = uint(RefBits - 1 - library.IDBits)        // a public page fits
)

// Public reports whether r names a public page, which is not in the pool.
func (r Ref) Public() bool { return r&publicBit != 0 }

func public(id library.ID) Ref { return publicBit | Ref(id) }

func (r Ref) id() library.ID      { return library.ID(r &^ publicBit) }
func (r Ref) handle() pool.Handle { return pool.Handle(r) }

// Errors that callers branch on.
var (
	// ErrFull: the pool is at its limit. Nothing was stored.
	ErrFull = pool.ErrFull
	// ErrShared: the page has as many references as can be counted. It is as good as
	// before; the caller does without one more.
	ErrShared = pool.ErrShared
	// ErrVerify: what was stored does not decode to the page. Nothing is kept; the codec is
	// wrong.
	ErrVerify = errors.New("encoded page does not decode to itself")
	// ErrDamaged: a kept page is not what was stored. Always as a *Damage.
	ErrDamaged = errors.New("kept page is damaged")
)

// Damage says which page is damaged: for an entry against a base, perhaps the base.
type Damage struct {
	Ref Ref
	Err error
}

func (d *Damage) Error() string {
	if d.Ref.Public() {
		return fmt.Sprintf("public page %#x: %v", uint32(d.Ref.id()), d.Err)
	}
	return fmt.Sprintf("pool entry %d: %v", uint32(d.Ref), d.Err)
}

// Unwrap makes a Damage an ErrDamaged, and whatever caused it.
func (d *Damage) Unwrap() []error { return []error{ErrDamaged, d.Err} }

// An Isolation says what the sandboxes of a cohort may have in common.
type Isolation uint8

// Isolations.
const (
	Shared Isolation = iota // dictionaries, equal and similar pages of siblings
	Strict                  // nothing but the template: a sandbox's pages refer to its own template only
)

// String returns the word of configuration files.
func (i Isolation) String() string {
	if i == Strict {
		return "strict"
	}
	return "cohort"
}

// ParseIsolation is the inverse of String.
func ParseIsolation(s string) (Isolation, error) {
	for _, i := range []Isolation{Shared, Strict} {
		if s == i.String() {
			return i, nil
		}
	}
	return 0, fmt.Errorf("isolation %q is not one of: cohort (siblings share equal and similar pages and dictionaries), strict (only the template is shared)", s)
}

// Options of a Cohort. Library is required.
type Options struct {
	Library    *library.Library // of the template; stays the caller's, must outlive the Cohort
	Limit      units.Bytes      // the most the pool may occupy; 0 = what it can address
	Isolation  Isolation
	Dictionary dictionary.Options

	// Without turns ways of keeping pages off, for measurements.
	Without WaySet
}

// A Cohort keeps the pages of one trust domain. Safe for concurrent use, Close excepted.
type Cohort struct {
	library   *library.Library // immutable
	pool      *pool.Pool       // immutable
	dict      *dictionary.Set  // immutable, nil without dictionaries
	isolation Isolation        // immutable
	without   WaySet           // immutable

	equal   index   // by checksum: every entry
	similar similar // by features: entries that may be a base
	growing sync.Mutex

	closed    atomic.Bool
	putBytes  atomic.Int64 // encoded bytes ever put into the pool
	putBlocks atomic.Int64 // of them, in blocks without a base
	putPlain  atomic.Int64 // entries without a base ever put into the pool
	plain     atomic.Int64 // of them, those that are there now

	reports sync.WaitGroup // reports of damage that are under way; they look into the pool

	mu      sync.Mutex
	members map[Member]struct{} // guarded by mu
}

// New returns an empty cohort.
func New(o Options) (*Cohort, error) {
	if o.Library == nil {
		return nil, errors.New("create cohort: a library is required")
	}
	p, err := pool.New(pool.Options{Limit: o.Limit})
	if err != nil {
		return nil, fmt.Errorf("create cohort: %w", err)
	}
	c := &Cohort{library: o.Library, pool: p, isolation: o.Isolation, without: o.Without, members: map[Member]struct{}{}}
	if o.Isolation == Strict {
		c.without |= Ways(WayShared, WaySimilar, WayDict)
	}
	if !c.without.Has(WayDict) {
		d := o.Dictionary
		if d.AtStake == nil {
			d.AtStake = c.atStake
		}
		c.dict = dictionary.New(d)
	}
	c.equal.init()
	c.similar.init()
	return c, nil
}

// Library returns the public pages.
func (c *Cohort) Library() *library.Library { return c.library }

// Pool returns where the entries are, to look at. The handles of refs that are not public are
// its handles.
func (c *Cohort) Pool() *pool.Pool { return c.pool }

// Run trains dictionaries as they become due, until ctx ends.
func (c *Cohort) Run(ctx context.Context) error {
	if c.dict == nil {
		<-ctx.Done()
		return nil
	}
	return c.dict.Run(ctx)
}

// Train trains a dictionary now; see dictionary.Set.Train for its errors.
func (c *Cohort) Train(ctx context.Context) error {
	if c.dict == nil {
		return fmt.Errorf("train dictionary: isolation is %v: %w", c.isolation, codec.ErrSamples)
	}
	return c.dict.Train(ctx)
}

// TrainIfDue trains a dictionary if one is due; see dictionary.Set.TrainIfDue.
func (c *Cohort) TrainIfDue(ctx context.Context) bool { return c.dict != nil && c.dict.TrainIfDue(ctx) }

// Ref adds a reference to a page that the caller holds one of. It fails with a *Damage or
// with ErrShared; then the caller holds what it held.
func (c *Cohort) Ref(r Ref) error {
	if r.Public() {
		return nil
	}
	err := c.pool.Ref(r.handle())
	if errors.Is(err, pool.ErrShared) {
		return err // nothing is wrong with the page
	}
	return wrap(r, err)
}

// Release gives a reference back. A *Damage means that the entry cannot be freed: what it
// occupies is lost until Close. Another ErrDamaged means that it is freed, and what it
// referred to is lost: there is no damaged page any more, and its Ref may be another's already.
func (c *Cohort) Release(r Ref) error {
	for range 2 { // the entry, then its base
		if r.Public() || r == 0 {
			return nil
		}
		freed, was, err := c.pool.Release(r.handle())
		if err != nil {
			return &Damage{r, err}
		}
		if !freed {
			return nil
		}
		if !was.Kind.HasBase() {
			c.plain.Add(-1)
		}
		if was, err = unsealed(was); err != nil {
			return fmt.Errorf("release pool entry %d: %w", uint32(r), err)
		}
		if id := was.Dict(); id != 0 {
			if err := c.releaseDictionary(id); err != nil {
				return fmt.Errorf("release pool entry %d: %w", uint32(r), err)
			}
			return nil
		}
		if !was.Kind.HasBase() {
			return nil
		}
		r = Ref(was.Operand)
	}
	return fmt.Errorf("release pool entry %d: %w", uint32(r), errChain)
}

// releaseDictionary gives back what an entry held. The entry's hold keeps its dictionary alive,
// so an id that names none is not what was stored.
func (c *Cohort) releaseDictionary(id codec.DictID) error {
	if c.dict == nil || c.dict.Lookup(id) == nil {
		return errOperand
	}
	c.dict.Release(id)
	return nil
}

var errChain = fmt.Errorf("the base of a page has a base itself: %w", ErrDamaged)

func wrap(r Ref, err error) error {
	if err == nil {
		return nil
	}
	return &Damage{r, err}
}

// describe adds to the error of a decode what was decoded.
func describe(r Ref, enc codec.Encoded, err error) error {
	if err == nil {
		return nil
	}
	return &Damage{r, fmt.Errorf("encoder %v, operand %#x, %d bytes: %w", enc.Kind, enc.Operand, len(enc.Data), err)}
}

// Compact moves entries together and returns the memory that is left over to the system;
// see pool.Compact.
func (c *Cohort) Compact(ctx context.Context, budget units.Bytes) (moved int, freed units.Bytes) {
	return c.pool.Compact(ctx, budget)
}

// Close frees everything that was kept.
// Preconditions: no member is left, Run has returned.
func (c *Cohort) Close() error {
	c.closed.Store(true)
	c.reports.Wait()
	if c.dict != nil {
		c.dict.Close()
	}
	if err := c.pool.Close(); err != nil {
		return fmt.Errorf("close cohort: %w", err)
	}
	return nil
}
