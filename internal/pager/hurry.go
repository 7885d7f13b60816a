package pager

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/hostmem"
)

// A hurry makes a pass that is cancelled come to its end: a call has arrived, vCPUs run again,
// and the pass, which is nice to them, would have to wait for a core to give up its batch. So
// whoever cancels it raises its priority.
//
// Lock order: mu, then nothing.
type hurry struct {
	plain bool // immutable; Workers.plain

	mu     sync.Mutex
	worker *worker   // guarded by mu; nil while no thread of this pass runs
	tid    int       // guarded by mu; its thread
	hurry  bool      // guarded by mu; ctx has ended
	at     time.Time // guarded by mu; when
}

// begin says that the calling thread, which ends with the pass, works for it now.
func (h *hurry) begin(w *worker) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.worker, h.tid = w, unix.Gettid()
	w.hurried.Store(h.hurry)
}

// end says that it no longer does: its id may become another thread's.
func (h *hurry) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.worker.hurried.Store(false)
	h.worker = nil
}

// cancelled is called when ctx ends.
func (h *hurry) cancelled() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at, h.hurry = time.Now(), true
	if h.worker != nil {
		h.worker.hurried.Store(true)
		if !h.plain {
			_ = hostmem.SetNice(h.tid, niceLocked) // without the right to, it takes longer
		}
	}
}

// since returns how long ago cancelled was called, 0 if it is just about to be.
func (h *hurry) since() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.hurry {
		return 0
	}
	return time.Since(h.at)
}
