package pager

import "github.com/agentzip/agentzip/internal/units"

// Evicted pages in the neighbourhood of one that the guest waited for come back too: a guest
// that touches one page touches the next ones. The thread that waited goes on first; then the
// fault thread brings the neighbours one by one, and looks for new faults before each. They
// keep their entries, so that a wrong one costs little. The log has them as KindNeighbour, which
// nobody waited for, so that whoever learns knows what cannot be seen any more: only a sign of use
// (a write) makes them one. They are marked as brought ahead.

// note remembers an evicted page that came back, for bringNeighbours.
func (w *faultWorker) note(f units.Frame) {
	if w.nrestored < len(w.restored) {
		w.restored[w.nrestored] = f
		w.nrestored++
	}
}

// bringNeighbours brings evicted pages around those that this turn's faults brought. New
// faults go first, at most faultsAtOnce of them: then other sandboxes have waited long enough.
func (p *Pager) bringNeighbours(w *faultWorker) (ok bool) {
	defer func() { w.nrestored = 0 }()
	served := 0
	for k := 0; k < w.nrestored && p.window > 1; k++ {
		lo := w.restored[k] &^ (p.window - 1)
		for f := lo; f < min(lo+p.window, units.Frame(p.table.frames)); f++ {
			if p.table.load(f).tag() != tagEvicted {
				continue
			}
			n, ok := p.serveWaiting(w)
			if !ok {
				return false
			}
			if served += n; served >= faultsAtOnce {
				return true
			}
			if !p.bring(f, w) {
				return true
			}
		}
	}
	return true
}

// bring installs an evicted page that nobody asked for; more says whether to go on. A page
// that is damaged is left to the fault that needs it: the guest may never touch it.
func (p *Pager) bring(f units.Frame, w *faultWorker) (more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.table.load(f)
	if p.dead != nil || e.tag() != tagEvicted {
		return p.dead == nil
	}
	if p.cohort.Load(w.codec, &w.page, e.ref()) != nil {
		return false
	}
	if _, err := p.mem.Copy(f, w.page[:], p.protect); err != nil {
		_ = p.fail(p.installError(f, e, err))
		return false
	}
	p.table.store(f, p.back(e.ref()))
	p.table.mark(f, true)
	p.stats.neighbours.Add(1)
	p.note(Touch{Frame: f, Kind: KindNeighbour})
	p.stats.ways[w.codec.Loaded()].Add(1)
	return true
}
