package pager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A snapshot is the content of a guest's memory at one moment, without any memory: a page
// table of which every word is Template, Zero or Evicted, with references of its own. It is
// what is left of a sandbox that is parked, and what its forks begin with.
//
//	Keep, any number of times, while the guest runs
//	guest stopped --Snapshot--> Snapshot --New(Options.From), any number of times--> a pager each
//	                            Snapshot --Close--> nothing
//
// Rules, beside those of the package:
//
//  8. A snapshot is complete: it is made under the mutex after a scan, under the same mutex,
//     has found no private page whose word is not Clean. Then each page's content is the
//     image's, zeros, or what the cohort keeps, by its word alone. The caller answers for
//     it that nobody writes from the moment it stopped the guest until it goes on.
//  9. A pager that adopts a snapshot drops the whole mapping first, already registered with
//     userfaultfd: what the VMM mapped before it was watched (its own first touches, a
//     template page where the snapshot has an evicted one) would be taken for the guest's
//     content. From then on an access waits for the word, which is there before the pager
//     is handed to a Server. The VMM must not have loaded its devices: they read the guest's
//     memory, and would have read the template's.
//  10. Each word with a ref has a reference of its own, in the snapshot and in every pager made
//     of it, so that any of them may end, or release the page, at any time.

// ErrIncomplete: the guest's memory does not hold still: it was not stopped. Nothing was made.
var ErrIncomplete = errors.New("pages change while the guest should stand still")

// ErrMismatch: a snapshot was given to a pager of another image or cohort. Nothing was done.
var ErrMismatch = errors.New("the snapshot is of another image or cohort")

const (
	// snapshotPasses is how often a Snapshot looks again before it says ErrIncomplete: the
	// first pass may meet a page that a Restore installs meanwhile.
	snapshotPasses = 4

	// thorough is for how long a Snapshot, while the guest stands still, keeps pages in the ways
	// that are smallest (15 to 30 us a page); then only in those that take 3 to 5 us. A sandbox
	// that was busy until it stopped has some thousand pages left. Doubled, it stands still for
	// that much longer.
	thorough = 8 * time.Millisecond
)

// Keep makes one pass over all private pages that leaves all of them mapped: each is
// kept by the cohort and becomes Clean, also those that do not shrink. A Snapshot after it has only
// to look at what was written since. The guest runs on. Errors and result are those of Evict.
func (p *Pager) Keep(ctx context.Context) (EvictResult, error) {
	return p.passInTurn(ctx, passMode{all: true, stay: true})
}

// Snapshot returns the guest's memory as it is now. The guest goes on as it was, when its
// caller lets it: no page it had is dropped but those equal to the template's or zeros.
//
// Preconditions: the vCPUs stand still and no device of the VMM writes to memory, from
// before the call until the snapshot's device state was saved.
//
// Errors as for Evict; cohort.ErrFull means that there is no snapshot. ErrIncomplete: see there.
func (p *Pager) Snapshot(ctx context.Context) (*Snapshot, error) {
	p.life.RLock()
	defer p.life.RUnlock()
	release, err := p.takePass(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	s, err := newSnapshot(p.name, p.image, p.cohort)
	if err != nil {
		return nil, err
	}
	soon := time.Now().Add(thorough)
	for range snapshotPasses {
		if _, err = p.onePass(ctx, passMode{all: true, stay: true, frozen: true, soon: soon}); err != nil {
			break
		}
		var done bool
		if done, err = p.copyComplete(s); done || err != nil { //nolint:contextcheck // with the pager's mutex held: it is not to be given up in the middle
			break
		}
		err = ErrIncomplete
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("snapshot sandbox %s: %w", p.name, err), s.Close())
	}
	return s, nil
}

// copyComplete copies the table into s if every private page is Clean. The caller has the
// turn to make passes, which is what Scan needs.
func (p *Pager) copyComplete(s *Snapshot) (done bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead != nil {
		return false, p.dead
	}
	complete := true
	err = p.mem.Scan(func(r guestmem.Run, _ bool) bool {
		for i := range r.Pages {
			if p.table.load(r.Start+units.Frame(i)).tag() != tagClean {
				complete = false
			}
		}
		return complete
	})
	if err != nil || !complete {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return true, s.words.fill(p.table)
}

// adopt makes the pages of a fresh guest those of s. Nobody serves its faults yet.
func (p *Pager) adopt(s *Snapshot) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return fmt.Errorf("adopt snapshot: %w", ErrClosed)
	case s.damaged != nil:
		return s.damaged
	case s.image != p.image || s.words.cohort != p.cohort:
		return ErrMismatch
	}
	if err := p.mem.Drop([]guestmem.Run{{Start: 0, Pages: p.table.frames}}); err != nil { // rule 9
		return fmt.Errorf("adopt snapshot: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	own := refWords{cohort: p.cohort, table: p.table}
	err := own.fill(s.words.table)
	p.kept = own.kept
	if err != nil {
		return fmt.Errorf("adopt snapshot: %w", err)
	}
	return nil
}

// refWords are a page table with references of its own. The owner's lock guards them.
type refWords struct {
	cohort *cohort.Cohort
	table  *table
	kept   int // words with a ref
}

// fill copies the words of src, each ref with a reference of its own. On an error some are
// copied. Caller holds the locks of both tables.
func (w *refWords) fill(src *table) (err error) {
	var copier *cohort.Worker // for pages that are shared too often
	defer func() {
		if copier != nil {
			copier.Close()
		}
	}()
	src.each(func(f units.Frame, e entry) bool {
		switch e.tag() {
		case tagZero:
			w.table.store(f, entryZero)
		case tagEvicted, tagClean:
			r := e.ref()
			err = w.cohort.Ref(r)
			if errors.Is(err, cohort.ErrShared) {
				if copier == nil {
					copier = cohort.NewWorker()
				}
				r, err = another(w.cohort, copier, f, r)
			}
			if err != nil {
				err = fmt.Errorf("frame %d: %w", f, err)
				return false
			}
			w.table.store(f, evicted(r))
			w.kept++
		case tagBusy, tagTemplate, tagCount, tagKept, tagAhead, tagLoose:
			// Rule 4: Kept, Ahead and Loose are private, and copyComplete has found none that is not
			// Clean. To take such a page for the image's would be a wrong page in every copy.
			err = fmt.Errorf("frame %d is %v after a pass", f, e.tag())
			return false
		}
		return true
	})
	return err
}

// another keeps the page of r a second time, because r has as many references as can be counted.
func another(c *cohort.Cohort, w *cohort.Worker, f units.Frame, r cohort.Ref) (cohort.Ref, error) {
	var page units.Page
	if err := c.Load(w, &page, r); err != nil {
		return 0, err
	}
	st, err := c.Store(w, f, &page, cohort.Hint{Must: true})
	return st.Ref, err
}

// releaseAll gives all references back.
func (w *refWords) releaseAll() error {
	var errs []error
	w.table.each(func(f units.Frame, e entry) bool {
		if e.hasRef() {
			errs = append(errs, w.cohort.Release(e.ref()))
			w.table.store(f, entryTemplate)
		}
		return true
	})
	w.kept = 0
	return errors.Join(errs...)
}

// A Snapshot is described above. Safe for concurrent use.
//
// Lock order: Snapshot.mu, then Pager.mu of a pager that adopts it; but of the one it is
// made of, that pager's mutex comes first, when nobody else knows the snapshot yet.
type Snapshot struct {
	name  string          // immutable; of the sandbox, for errors
	image *guestmem.Image // immutable

	mu      sync.Mutex
	words   refWords // guarded by mu
	damaged error    // guarded by mu; a page of it is lost
	closed  bool     // guarded by mu
}

var _ cohort.Member = (*Snapshot)(nil)

// newSnapshot returns one in which all pages are the template's, and which hears of damage.
func newSnapshot(name string, image *guestmem.Image, c *cohort.Cohort) (*Snapshot, error) {
	t, err := newTable(image.Frames())
	if err != nil {
		return nil, fmt.Errorf("snapshot sandbox %s: %w", name, err)
	}
	s := &Snapshot{name: name, image: image, words: refWords{cohort: c, table: t}}
	c.Join(s)
	return s, nil
}

// Refers is described at cohort.Member.
func (s *Snapshot) Refers(damaged func(cohort.Ref) bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := false
	if !s.closed {
		s.words.table.each(func(_ units.Frame, e entry) bool {
			found = e.hasRef() && damaged(e.ref())
			return !found
		})
	}
	return found
}

// Fail is described at cohort.Member: nobody can adopt the snapshot any more.
func (s *Snapshot) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.damaged == nil {
		s.damaged = fmt.Errorf("snapshot of sandbox %s: %w: %w", s.name, ErrIntegrity, err)
	}
}

// Err returns why nobody can adopt the snapshot, or nil.
func (s *Snapshot) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.damaged
}

// Usage is what the snapshot costs: nothing of it is resident, but its page table and its
// entries are. Shared entries count for each sandbox.
func (s *Snapshot) Usage() (Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Usage{}, ErrClosed
	}
	size, err := s.words.table.resident()
	if err != nil {
		return Usage{}, fmt.Errorf("measure snapshot of sandbox %s: %w", s.name, err)
	}
	w := cohort.NewLoader()
	defer w.Close()
	u := Usage{PageTable: size, Kept: s.words.kept}
	s.words.table.each(func(_ units.Frame, e entry) bool {
		if e.hasRef() {
			if _, n, err := s.words.cohort.Way(w, e.ref()); err == nil {
				u.Encoded += units.Bytes(n)
			}
		}
		return true
	})
	return u, nil
}

// Close gives back the references and the page table. Pagers that adopted it go on.
func (s *Snapshot) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.words.cohort.Leave(s)
	if err := errors.Join(s.words.releaseAll(), s.words.table.close()); err != nil {
		return fmt.Errorf("close snapshot of sandbox %s: %w", s.name, err)
	}
	return nil
}
