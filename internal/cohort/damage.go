package cohort

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/codec"
)

// A Member is a sandbox of the cohort, as far as damage concerns it: its pager.
type Member interface {
	// Refers reports whether the member holds one of the refs for which damaged is true.
	// It may be asked from any goroutine.
	Refers(damaged func(Ref) bool) bool
	// Fail ends the member: a page it will need is lost.
	Fail(err error)
}

// A Reliever is a Member that can give up references to pages which it has in memory too.
type Reliever interface {
	// GiveUp gives up what it can until ctx ends and returns how many references it were.
	// It is called without a lock held, from any goroutine.
	GiveUp(ctx context.Context) int
}

// Relieve asks the members but one to give up what they have in memory too, because the pool
// is full, and returns how many references they gave up. How much room that makes depends on
// who else has them.
func (c *Cohort) Relieve(ctx context.Context, but Member) (given int) {
	c.mu.Lock()
	var members []Reliever
	for m := range c.members {
		if r, ok := m.(Reliever); ok && m != but {
			members = append(members, r)
		}
	}
	c.mu.Unlock()
	for _, r := range members {
		if ctx.Err() != nil {
			break
		}
		given += r.GiveUp(ctx)
	}
	return given
}

// Join makes m hear of damage until Leave.
func (c *Cohort) Join(m Member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.members[m] = struct{}{}
}

// Leave ends a Join.
func (c *Cohort) Leave(m Member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.members, m)
}

// ReportDamage ends every member that refers to a damaged page, but not `but`, which found it
// and ends itself: others would meet it later, at a moment that nobody can explain then.
// It returns at once; err is what Load or Store said.
func (c *Cohort) ReportDamage(err error, but Member) { c.reportDamage(err, but) }

func (c *Cohort) reportDamage(err error, but Member) {
	var d *Damage
	if !errors.As(err, &d) {
		return
	}
	c.mu.Lock()
	others := make([]Member, 0, len(c.members))
	for m := range c.members {
		if m != but {
			others = append(others, m)
		}
	}
	c.mu.Unlock()
	c.reports.Go(func() { // the finder may hold its lock, and members take theirs
		reader := c.pool.NewReader()
		defer reader.Close()
		damaged := func(r Ref) bool {
			if r == d.Ref {
				return true
			}
			if r.Public() {
				return false
			}
			reader.Pin()
			defer reader.Unpin()
			enc, err := view(reader, r.handle())
			return err == nil && enc.Kind.HasBase() && Ref(enc.Operand) == d.Ref
		}
		for _, m := range others {
			if m.Refers(damaged) {
				m.Fail(fmt.Errorf("it refers to damaged content that a sibling met first: %w", err))
			}
		}
	})
}

// IsDamage reports whether err says that a kept page is damaged.
func IsDamage(err error) bool { return errors.Is(err, ErrDamaged) || errors.Is(err, codec.ErrCorrupt) }
