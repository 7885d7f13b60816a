package prefetch

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/units"
)

// restoresPerMs is how many pages a restore brings back in a millisecond: 9 us a page were
// measured.
const restoresPerMs = 110

// aroundPages is the aligned window in which a fault maps shared pages; see
// internal/pager/service.go.
const aroundPages = 64

// evictedAround is the aligned window in which a fault brings evicted pages; see pager.Options.
const evictedAround = 8

// A verdict says what prediction was worth on a trace, counted against what was touched.
type verdict struct {
	calls int

	evicted, evictedAhead int // evicted pages touched; of those restored before
	shared, sharedAhead   int // shared pages written; of those installed writable before
	sharedSilent          int // of the shared ones: mapped, so that the kernel copied them without an event

	faultsEvicted, faultsShared int

	asked, useful     int // pages restored; of those touched in the call, at any time
	askedS, usefulS   int // of those: shared pages
	askedW, wroteW    int // evicted pages installed writable; of those written
	extra, extraUse   int // of asked: in answer to a fault
	predictor, cohort units.Bytes
	stats             Stats
}

func (v *verdict) faults() int { return v.faultsEvicted + v.faultsShared }

func pct(a, b int) string { return fmt.Sprintf("%5.1f", 100*share(a, b)) }

func (v *verdict) String() string {
	per := func(n int) string { return fmt.Sprintf("%6.0f", float64(n)/float64(max(1, v.calls))) }
	return fmt.Sprintf("cover ev %s sh %s (silent %s) all %s | acc %s ev %s sh %s wr %s extra %s | per call asked %s sh %s extra %s faults %s = ev %s sh %s | %v + %v | est cover %.3f acc %.3f",
		pct(v.evictedAhead, v.evicted), pct(v.sharedAhead, v.shared), pct(v.sharedSilent, v.shared),
		pct(v.evictedAhead+v.sharedAhead+v.sharedSilent, v.evicted+v.shared),
		pct(v.useful, v.asked), pct(v.useful-v.usefulS, v.asked-v.askedS), pct(v.usefulS, v.askedS), pct(v.wroteW, v.askedW), pct(v.extraUse, v.extra),
		per(v.asked), per(v.askedS), per(v.extra), per(v.faults()), per(v.faultsEvicted), per(v.faultsShared),
		v.predictor, v.cohort, v.stats.Coverage(), v.stats.Accuracy())
}

// A guest is one traced sandbox as the pager would see it.
type guest struct {
	box       tracedBox
	predictor *Predictor
	evicted   map[units.Frame]bool
	mapped    map[units.Frame]bool // shared pages that are mapped
	regions   map[units.Frame]bool // 2 MiB regions that were mapped
	there     map[units.Frame]int  // restored in this call: when, in 1/restoresPerMs ms
	writable  map[units.Frame]bool // of those: installed writable
	waited    map[units.Frame]bool // in this call
	promised  map[units.Frame]bool // expected to be written
	clock     int                  // when the restores asked for so far are done
}

func newGuest(h *History, b tracedBox) *guest {
	g := &guest{box: b, evicted: map[units.Frame]bool{}, mapped: map[units.Frame]bool{}, regions: map[units.Frame]bool{}, promised: map[units.Frame]bool{}}
	g.predictor = h.NewPredictor(b.name, func(f units.Frame) bool { return g.evicted[f] && g.there[f] == 0 })
	return g
}

// restore queues pages at a time in ms.
func (g *guest) restore(v *verdict, list []pager.Touch, at int, touched map[units.Frame]bool, extra bool) {
	g.clock = max(g.clock, at*restoresPerMs)
	for _, t := range list {
		if g.there[t.Frame] > 0 || !g.evicted[t.Frame] && (g.mapped[t.Frame] || !t.Write) {
			continue // present
		}
		g.clock++
		g.there[t.Frame] = g.clock
		g.writable[t.Frame] = t.Write
		wrote, used := touched[t.Frame]
		v.asked++
		if used {
			v.useful++
		}
		if extra {
			v.extra++
			if used {
				v.extraUse++
			}
		}
		switch {
		case !g.evicted[t.Frame]:
			v.askedS++
			if used {
				v.usefulS++
			}
		case t.Write:
			v.askedW++
			if wrote {
				v.wroteW++
			}
		}
	}
}

// play lets the guest run its k-th call.
func (g *guest) play(k int, v *verdict, kindOf func(tracedCall) string) {
	c := &g.box.calls[k]
	for _, f := range c.evict {
		g.evicted[f] = true
		delete(g.mapped, f)
	}
	for _, f := range c.unevict {
		delete(g.evicted, f)
	}
	touched := map[units.Frame]bool{}
	for _, t := range c.touches {
		touched[t.frame] = t.write
	}
	for _, f := range c.private {
		touched[f] = true // after the call, before it is evicted again
	}
	g.there, g.writable, g.waited, g.clock = map[units.Frame]int{}, map[units.Frame]bool{}, map[units.Frame]bool{}, 0
	v.calls++
	list := g.predictor.Begin(Call{Number: k + 1, Kind: kindOf(*c)})
	g.restore(v, list, 0, touched, false)
	var seen []pager.Touch
	for i, t := range c.touches {
		seen = g.touch(v, t, seen)
		if i+1 == len(c.touches) || c.touches[i+1].at > t.at {
			if len(seen) > 0 {
				g.restore(v, g.predictor.Faulted(seen), t.at, touched, true)
			}
			seen = seen[:0]
		}
	}
	clear(g.promised)
	for _, t := range g.predictor.End(nil) {
		if t.Write {
			g.promised[t.Frame] = true
		}
	}
	g.pass(c)
}

func (g *guest) touch(v *verdict, t tracedTouch, seen []pager.Touch) []pager.Touch {
	ready := g.there[t.frame] > 0 && g.there[t.frame] <= (t.at+1)*restoresPerMs
	if !ready {
		delete(g.there, t.frame) // the fault is faster
	}
	if !t.evicted {
		v.shared++
		switch {
		case ready:
			v.sharedAhead++
		case g.mapped[t.frame]:
			v.sharedSilent++
		default:
			v.faultsShared++
			seen = append(seen, pager.Touch{Frame: t.frame, Write: true, Kind: pager.KindZero})
			first := t.frame &^ (aroundPages - 1)
			for f := first; f < first+aroundPages; f++ {
				if !g.evicted[f] {
					g.mapped[f] = true
				}
			}
		}
		return seen
	}
	v.evicted++
	if !ready {
		v.faultsEvicted++
		g.waited[t.frame] = true
		seen = append(seen, pager.Touch{Frame: t.frame, Write: t.firstWrite, Kind: pager.KindEvicted})
		return g.neighbours(t, seen)
	}
	v.evictedAhead++
	return seen
}

// neighbours brings the evicted pages around one that was waited for.
func (g *guest) neighbours(t tracedTouch, seen []pager.Touch) []pager.Touch {
	first := t.frame &^ (evictedAround - 1)
	for f := first; f < first+evictedAround; f++ {
		if g.evicted[f] && g.there[f] == 0 && f != t.frame && !g.waited[f] {
			g.there[f], g.writable[f] = max(1, t.at*restoresPerMs), false
			seen = append(seen, pager.Touch{Frame: f, Kind: pager.KindNeighbour})
		}
	}
	return seen
}

// pass drops all private pages and maps the shared ones back.
func (g *guest) pass(c *tracedCall) {
	private := map[units.Frame]bool{}
	for _, t := range c.touches {
		// A page of zeros that was installed ahead and used is as it was when it was freed:
		// nearly all are.
		if t.write && (t.evicted || !g.writable[t.frame]) {
			private[t.frame] = true
		}
	}
	for _, f := range c.private {
		private[f] = true
	}
	var found []pager.Touch
	for f := range private {
		found = append(found, pager.Touch{Frame: f, Write: true, Kind: pager.KindPrivate})
		delete(g.mapped, f)
		if region := f / 512; !g.regions[region] {
			g.regions[region] = true
			for x := region * 512; x < (region+1)*512; x++ {
				if !g.promised[x] {
					g.mapped[x] = true // those that are evicted are taken out by the next call
				}
			}
		}
		if !g.promised[f] {
			g.mapped[f] = true
		}
	}
	g.predictor.Settle(found, true)
}

// evaluate replays the trace, the siblings' k-th calls one after the other.
func evaluate(tr trace, o Options, kindOf func(tracedCall) string) *verdict {
	h := NewHistory(o)
	v := new(verdict)
	guests := make([]*guest, len(tr.boxes))
	longest := 0
	for i, b := range tr.boxes {
		guests[i] = newGuest(h, b)
		longest = max(longest, len(b.calls))
	}
	for k := range longest {
		for _, g := range guests {
			if k < len(g.box.calls) {
				g.play(k, v, kindOf)
				v.predictor = max(v.predictor, g.predictor.Footprint())
			}
		}
	}
	v.cohort = h.Footprint()
	for _, g := range guests {
		v.stats.Merge(g.predictor.Stats())
	}
	return v
}

func toolKind(c tracedCall) string { return c.kind }

// TestEvaluate prints the table of docs/prefetch.md. AGENTZIP_TRACE names another trace.
func TestEvaluate(t *testing.T) {
	if os.Getenv("AGENTZIP_EVALUATE") == "" {
		t.Skip("set AGENTZIP_EVALUATE=1 to see the table")
	}
	tr := loadTrace(t)
	all := Sources(1<<NumSources - 1)
	rows := []struct {
		name string
		off  Sources
	}{{"all", 0}, {"none", all}}
	for s := range NumSources {
		rows = append(rows, struct {
			name string
			off  Sources
		}{"without " + s.String(), Only(s)})
	}
	for s := range NumSources {
		rows = append(rows, struct {
			name string
			off  Sources
		}{"only " + s.String(), all &^ Only(s)})
	}
	for _, r := range rows {
		v := evaluate(tr, Options{Without: r.off}, toolKind)
		t.Logf("%-18s %v", r.name, v)
		if r.off == 0 {
			var b strings.Builder
			for _, s := range v.stats.Sources {
				fmt.Fprintf(&b, "%v asked %d acc %.2f; ", s.Source, s.Asked, s.Accuracy())
			}
			t.Log(b.String())
		}
	}
}

// The recorded guests are what this package is for: it must find most of what they touch.
func TestPredictionCoversTheRecordedGuests(t *testing.T) {
	t.Parallel()
	v := evaluate(loadTrace(t), Options{}, toolKind)
	t.Log(v)
	if got := share(v.evictedAhead, v.evicted); got < 0.88 {
		t.Errorf("%.3f of the evicted pages were there, want 0.88", got)
	}
	if got := share(v.useful, v.asked); got < 0.7 {
		t.Errorf("%.3f of the pages restored were touched, want 0.7", got)
	}
	none := evaluate(loadTrace(t), Options{Without: Sources(1<<NumSources - 1)}, toolKind)
	if v.faults()*3 > none.faults() {
		t.Errorf("%d faults with and %d without prediction, want a third", v.faults(), none.faults())
	}
	if d := v.stats.Accuracy() - share(v.useful, v.asked); d < -0.1 || d > 0.1 {
		t.Errorf("accuracy is %.3f and was estimated as %.3f", share(v.useful, v.asked), v.stats.Accuracy())
	}
	if v.predictor > 100*units.KiB || v.cohort > 512*units.KiB {
		t.Errorf("a predictor occupies %v, the history %v", v.predictor, v.cohort)
	}
}
