package pager

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/guestmem/guestmemtest"
	"github.com/agentzip/agentzip/internal/units"
)

// An event of the table in the package doc.
type event struct {
	name      string
	write, wp bool
}

var events = []event{{"absent, read", false, false}, {"absent, write", true, false}, {"write protected", true, true}}

const (
	pageFrame units.Frame = 6  // the image has a page
	holeFrame units.Frame = 10 // the image has a hole
	token                 = 0x5eed
)

// A situation is a state of a page together with what is mapped. make brings the frame
// there, with a server running, and returns the page's content.
type situation struct {
	name  string
	frame units.Frame
	make  func(r *rig, f units.Frame) *units.Page
	state tag
	after [3]tag // by event

	// needsServer: the guest's own access, of the kind of the event, must not be possible
	// without a server afterwards: the event was stale and the access comes back.
	needsServer [3]bool

	mappedBack bool // passes map shared pages back
}

func poked(f units.Frame, p *units.Page) *units.Page {
	binary.NativeEndian.PutUint64(p[64:], token)
	return p
}

var situations = []situation{
	{"template, page not mapped", pageFrame, func(_ *rig, f units.Frame) *units.Page {
		return guestmemtest.Base(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{false, false, true}, false},
	{"template, hole not mapped", holeFrame, func(_ *rig, f units.Frame) *units.Page {
		return guestmemtest.Base(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{false, false, true}, false},
	{"template, the image's page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		return r.read(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{}, false},
	{"template, zero page mapped in a hole", holeFrame, func(r *rig, f units.Frame) *units.Page {
		return r.read(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{}, false},
	{"template, private page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.poke(f, token)
		return poked(f, guestmemtest.Base(f))
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{}, false},
	{"template, dropped because equal", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.poke(f, token)
		r.write(f, guestmemtest.Base(f))
		r.evict()
		return guestmemtest.Base(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{false, false, true}, false},
	{"template, dropped because zeros in a hole", holeFrame, func(r *rig, f units.Frame) *units.Page {
		r.poke(f, token)
		r.write(f, zeroPage())
		r.evict()
		return zeroPage()
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{false, false, true}, false},
	{"template, mapped back when dropped because equal", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.poke(f, token)
		r.write(f, guestmemtest.Base(f))
		r.evict()
		return guestmemtest.Base(f)
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{}, true},
	{"template, mapped back when dropped because zeros in a hole", holeFrame, func(r *rig, f units.Frame) *units.Page {
		r.poke(f, token)
		r.write(f, zeroPage())
		r.evict()
		return zeroPage()
	}, tagTemplate, [3]tag{tagTemplate, tagTemplate, tagTemplate}, [3]bool{}, true},
	{"zero, mapped back", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, zeroPage())
		r.evict()
		return zeroPage()
	}, tagZero, [3]tag{tagZero, tagZero, tagZero}, [3]bool{}, true},
	{"kept, private page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, randomPage(1))
		r.evict()
		return randomPage(1)
	}, tagKept, [3]tag{tagKept, tagKept, tagKept}, [3]bool{}, false},
	{"zero, not mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, zeroPage())
		r.evict()
		return zeroPage()
	}, tagZero, [3]tag{tagZero, tagZero, tagZero}, [3]bool{false, false, true}, false},
	{"zero, zero page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, zeroPage())
		r.evict()
		return r.read(f)
	}, tagZero, [3]tag{tagZero, tagZero, tagZero}, [3]bool{}, false},
	{"zero, private page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, zeroPage())
		r.evict()
		r.poke(f, token)
		return poked(f, zeroPage())
	}, tagZero, [3]tag{tagZero, tagZero, tagZero}, [3]bool{}, false},
	{"evicted, image's page not mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, textPage(2))
		r.evict()
		return textPage(2)
	}, tagEvicted, [3]tag{tagLoose, tagTemplate, tagTemplate}, [3]bool{}, false},
	{"evicted, hole not mapped", holeFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, textPage(3))
		r.evict()
		return textPage(3)
	}, tagEvicted, [3]tag{tagLoose, tagTemplate, tagTemplate}, [3]bool{}, false},
	{"loose, private page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, textPage(4))
		r.evict()
		return r.read(f)
	}, tagLoose, [3]tag{tagLoose, tagLoose, tagLoose}, [3]bool{}, false},
	{"loose, written", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, textPage(4))
		r.evict()
		r.read(f)
		r.poke(f, token)
		return poked(f, textPage(4))
	}, tagLoose, [3]tag{tagLoose, tagLoose, tagLoose}, [3]bool{}, false},
	{"clean, private page mapped", pageFrame, func(r *rig, f units.Frame) *units.Page {
		r.write(f, textPage(4))
		r.evict()
		return r.read(f)
	}, tagClean, [3]tag{tagClean, tagClean, tagTemplate}, [3]bool{false, true, false}, false},
}

// accessible says whether the guest's access of the event's kind succeeds with no server. If it
// should, it may take as long as a busy machine takes.
func (r *rig) accessible(f units.Frame, write, should bool) bool {
	r.t.Helper()
	c, patience := r.vm.Channels[1], 100*time.Millisecond
	if should {
		patience = 10 * time.Second
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		r.t.Fatal(err)
	}
	var err error
	if write {
		err = c.Poke(f, 128, 99)
	} else {
		_, err = c.Read(f, false)
	}
	return err == nil
}

func TestEveryEventInEveryStateIsServedRight(t *testing.T) {
	w := &faultWorker{codec: cohort.NewLoader()}
	defer w.codec.Close()
	server := runServer(t)
	for _, s := range situations {
		for i, e := range events {
			t.Run(fmt.Sprintf("%s; %s", s.name, e.name), func(t *testing.T) {
				r := newRig(t, 64, 2, func(o *Options) {
					o.FaultAround, o.LeaveUnmapped, o.ProtectRestored = 1, !s.mappedBack, s.state == tagClean
				})
				r.server = server
				r.serve()
				want := s.make(r, s.frame)
				if got := r.state(s.frame); got != s.state {
					t.Fatalf("the situation was not reached: state %v, want %v", got, s.state)
				}
				server.Remove(r.pager)
				fault := guestmem.Fault{Frame: s.frame, Write: e.write, WP: e.wp, Minor: s.frame == pageFrame && !e.wp}
				r.pager.handle(fault, w, time.Now())
				r.unharmed()
				if got := r.state(s.frame); got != s.after[i] {
					t.Errorf("state %v, want %v", got, s.after[i])
				}
				ok := r.accessible(s.frame, e.write, !s.needsServer[i])
				if ok == s.needsServer[i] {
					t.Errorf("the guest's access without a server: %v, want %v", ok, !s.needsServer[i])
				}
				if e.write {
					binary.NativeEndian.PutUint64(want[128:], 99) // at once or when it is served
				}
				r.serve()
				checkThroughEviction(t, r, s.frame, want)
			})
		}
	}
}

// checkThroughEviction reads a page, evicts it, reads it, twice.
func checkThroughEviction(t *testing.T, r *rig, f units.Frame, want *units.Page) {
	t.Helper()
	for round := range 3 {
		deadline := time.Now().Add(time.Second)
		for *r.read(f) != *want {
			// The access that waited for the server may be served after this read.
			if round > 0 || time.Now().After(deadline) {
				t.Fatalf("round %d: the guest reads another page (state %v)", round, r.state(f))
			}
		}
		r.evict()
	}
	r.unharmed()
}

// Busy exists only during a pass: the events come from inside it.
func TestEveryEventWhileAPageIsBeingEncodedIsServedRight(t *testing.T) {
	w := &faultWorker{codec: cohort.NewLoader()}
	defer w.codec.Close()
	server := runServer(t)
	contents := map[string]*units.Page{"encoded": textPage(5), "zeros": zeroPage(), "equal": guestmemtest.Base(pageFrame), "kept": randomPage(6)}
	ends := map[string]tag{"encoded": tagEvicted, "zeros": tagZero, "equal": tagTemplate, "kept": tagKept}
	for name, content := range contents {
		for _, e := range events {
			for _, when := range []string{"before the read", "after the read"} {
				t.Run(fmt.Sprintf("%s; %s; %s", name, e.name, when), func(t *testing.T) {
					h := &hooked{}
					r := newRig(t, 64, 2, hook(h), func(o *Options) { o.FaultAround = 1 })
					r.server = server
					r.serve()
					r.poke(pageFrame, token) // private, whatever is written then
					r.write(pageFrame, content)
					server.Remove(r.pager)
					during := func() {
						if got := r.state(pageFrame); got != tagBusy {
							t.Errorf("state %v, want busy", got)
						}
						r.pager.handle(guestmem.Fault{Frame: pageFrame, Write: e.write, WP: e.wp, Minor: !e.wp}, w, time.Now())
						if e.wp && !r.accessible(pageFrame, true, true) {
							t.Error("the write still waits")
						}
					}
					if when == "before the read" {
						h.beforeRead = during
					} else {
						h.afterRead = during
					}
					res := r.evict()
					want, state := *content, ends[name]
					if e.wp {
						binary.NativeEndian.PutUint64(want[128:], 99)
						state = tagTemplate
						if res.Cancelled != 1 || res.Dropped != 0 {
							t.Errorf("result %+v, want one cancelled page", res)
						}
					}
					if got := r.state(pageFrame); got != state {
						t.Errorf("state %v, want %v", got, state)
					}
					r.serve()
					checkThroughEviction(t, r, pageFrame, &want)
				})
			}
		}
	}
}

// A write waits at a protected page; before its event is read the page is dropped. The
// stale event then meets every state that a drop can lead to, and Clean after a restore.
func TestAWriteThatWaitsWhileItsPageIsDroppedIsNotLost(t *testing.T) {
	server := runServer(t)
	for name, content := range map[string]*units.Page{"evicted": textPage(7), "zero": zeroPage(), "template": guestmemtest.Base(pageFrame)} {
		for _, restore := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restored meanwhile: %v", name, restore), func(t *testing.T) {
				h := &hooked{}
				r := newRig(t, 64, 2, hook(h))
				r.server = server
				r.serve()
				r.poke(pageFrame, token)
				r.write(pageFrame, content)
				server.Remove(r.pager)
				wrote := make(chan error, 1)
				h.afterRead = func() {
					go func() { wrote <- r.vm.Channels[1].Poke(pageFrame, 128, 99) }()
					waitForEvent(t, r)
				}
				r.evict()
				if restore {
					if _, err := r.pager.Restore(context.Background(), reads(pageFrame), Needed); err != nil {
						t.Fatal(err)
					}
				}
				r.serve()
				if err := <-wrote; err != nil {
					t.Fatal(err)
				}
				want := *content
				binary.NativeEndian.PutUint64(want[128:], 99)
				checkThroughEviction(t, r, pageFrame, &want)
			})
		}
	}
}
