package pager

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/units"
)

// newSiblings starts n rigs that share the cohort of the first, served by one server.
func newSiblings(t *testing.T, n int) []*rig {
	t.Helper()
	rigs := []*rig{newRig(t, 64, 1).serve()}
	for i := 1; i < n; i++ {
		r := newRig(t, 64, 1, func(o *Options) { o.Name = fmt.Sprintf("sibling%d", i) })
		r.cohort.Leave(r.pager)
		if err := r.cohort.Close(); err != nil {
			t.Fatal(err)
		}
		r.cohort, r.server = rigs[0].cohort, rigs[0].server
		r.pager.cohort = r.cohort
		r.cohort.Join(r.pager)
		r.serve()
		t.Cleanup(func() { // before those of the first, which closes the cohort
			r.closed = true
			r.vm.Kill()
			r.server.Remove(r.pager)
			if err := errors.Join(r.pager.Close(), r.guest.Close()); err != nil {
				t.Error(err)
			}
		})
		rigs = append(rigs, r)
	}
	return rigs
}

// distinct is a page of words that no two seeds have in common.
func distinct(seed uint64) *units.Page {
	p := new(units.Page)
	for i := range uint64(units.PageSize / 8) {
		binary.NativeEndian.PutUint64(p[i*8:], seed<<32|(i*i*2654435761)&0xffffff)
	}
	return p
}

// withByteChanged is p with one byte changed.
func withByteChanged(p *units.Page, at int) *units.Page {
	q := *p
	q[at] ^= 0x55
	return &q
}

// ref of an evicted frame.
func (r *rig) ref(f units.Frame) cohort.Ref {
	r.t.Helper()
	if r.state(f) != tagEvicted {
		r.t.Fatalf("frame %d is %v, want evicted", f, r.state(f))
	}
	return r.pager.table.load(f).ref()
}

// A bit of the pool flips in content that siblings have in common. Whoever meets it dies with a
// reason that names page and entry; those that refer to it, too, by themselves or as a base, and
// they say that a sibling met it; the others go on and never notice.
func TestDamageEndsThoseThatReferToItAndNoOther(t *testing.T) {
	page, base := textPage(1), distinct(1)
	for name, tt := range map[string]struct {
		pages [3]*units.Page // of each sandbox
		// of whose frame 7 the entry is damaged; who reads first; what is named beside frame 7
		damaged, finder, other int
		named                  string
	}{
		"an entry that two share":               {[3]*units.Page{page, page, textPage(2)}, 0, 0, 1, `pool entry \d+: encoder zstd`},
		"the same, met by the other":            {[3]*units.Page{page, page, textPage(2)}, 0, 1, 0, `pool entry \d+: encoder zstd`},
		"a base, met by its holder":             {[3]*units.Page{base, withByteChanged(base, 99), distinct(7)}, 0, 0, 1, `pool entry \d+: encoder`},
		"a base, met by one that is kept by it": {[3]*units.Page{base, withByteChanged(base, 99), distinct(7)}, 0, 1, 0, `pool entry \d+: encoder`},
	} {
		for _, by := range []string{"fault", "restore"} {
			t.Run(name+", "+by, func(t *testing.T) {
				rigs := newSiblings(t, 3)
				for i, r := range rigs {
					r.write(7, tt.pages[i])
					r.write(20, textPage(uint64(100+i)))
					r.evict()
				}
				equal := *tt.pages[0] == *tt.pages[1]
				if a, b := rigs[0].ref(7), rigs[1].ref(7); (a == b) != equal {
					t.Fatalf("refs are %#x and %#x, the pages are equal: %v", a, b, equal)
				}
				rigs[tt.damaged].flipBit(7)
				r, sibling, third := rigs[tt.finder], rigs[tt.other], rigs[2]
				for _, doomed := range []*rig{r, sibling} {
					if err := doomed.vm.Channels[0].SetDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
						t.Fatal(err)
					}
				}
				if by == "fault" {
					if _, err := r.vm.Channels[0].Read(7, false); err == nil {
						t.Error("the guest read a damaged page")
					}
				} else if _, err := r.pager.Restore(context.Background(), reads(7), Needed); !errors.Is(err, ErrIntegrity) {
					t.Errorf("restore: %v", err)
				}

				got := r.fatals(1)
				if len(got) != 1 || !errors.Is(got[0], ErrIntegrity) || !regexp.MustCompile(`frame 7: `+tt.named).MatchString(got[0].Error()) || strings.Contains(got[0].Error(), "sibling met") {
					t.Errorf("the finder died of %v, want frame and entry named", got)
				}
				got = sibling.fatals(1)
				if len(got) != 1 || !errors.Is(got[0], ErrIntegrity) || !regexp.MustCompile(`sibling met first.*`+tt.named).MatchString(got[0].Error()) {
					t.Errorf("the sibling that refers to it died of %v", got)
				}
				if _, err := sibling.vm.Channels[0].Read(7, false); err == nil {
					t.Error("the sibling read a damaged page")
				}
				for round := range 2 {
					third.unharmed()
					if *third.read(7) != *tt.pages[2] || *third.read(20) != *textPage(102) {
						t.Errorf("round %d: the third sandbox read a wrong page", round)
					}
					third.poke(20, binary.NativeEndian.Uint64(textPage(102)[64:]))
					third.evict()
				}
				if got := third.fatals(0); len(got) != 0 {
					t.Errorf("the third sandbox died of %v", got)
				}
			})
		}
	}
}

// A sandbox may be closed while it is asked whether it refers to damage.
func TestASandboxMayEndWhileDamageIsReported(t *testing.T) {
	rigs := newSiblings(t, 3)
	for _, r := range rigs {
		r.write(7, textPage(1))
		r.evict()
	}
	rigs[0].flipBit(7)
	done := make(chan error)
	go func() {
		_, err := rigs[0].pager.Restore(context.Background(), reads(7), Needed)
		done <- err
	}()
	rigs[1].vm.Kill()
	rigs[1].server.Remove(rigs[1].pager)
	if err := rigs[1].pager.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, ErrIntegrity) {
		t.Errorf("restore: %v, want ErrIntegrity", err)
	}
	if got := rigs[2].fatals(1); len(got) != 1 {
		t.Errorf("the third, which shares the page, died of %v", got)
	}
}
