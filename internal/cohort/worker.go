package cohort

import (
	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// A Worker is what one goroutine at a time needs to store and load pages, of any number of
// cohorts. The goroutine that owns it passes it to each call.
type Worker struct {
	encoder *codec.Encoder // nil: it only loads
	decoder *codec.Decoder
	readers []bound
	loaded  Way // of the last page that was loaded

	base  units.Page // a base while a page is decoded or encoded
	check units.Page // what was stored, decoded
	best  [codec.MaxData]byte
}

// Loaded says how the page of the last Load without an error was kept. A page that is shared
// is kept as whoever stored it first kept it.
func (w *Worker) Loaded() Way { return w.loaded }

// bound is a reader of one cohort's pool.
type bound struct {
	cohort *Cohort
	reader *pool.Reader
}

// NewWorker returns a worker that stores and loads. Close frees its native memory.
func NewWorker() *Worker {
	return &Worker{encoder: codec.NewEncoder(codec.Options{}), decoder: codec.NewDecoder()}
}

// NewLoader returns a worker that only loads: a place on the fault path, which must
// not pay for an encoder.
func NewLoader() *Worker { return &Worker{decoder: codec.NewDecoder()} }

// Close frees the worker. Cohorts it was used with may be closed already.
func (w *Worker) Close() {
	for _, b := range w.readers {
		if !b.cohort.closed.Load() {
			b.reader.Close()
		}
	}
	w.readers = nil
	if w.encoder != nil {
		w.encoder.Close()
	}
	w.decoder.Close()
}

// reader returns the worker's reader of c's pool, made at the first use. Those of cohorts
// that were closed are forgotten then.
func (w *Worker) reader(c *Cohort) *pool.Reader {
	for i := range w.readers {
		if w.readers[i].cohort == c {
			return w.readers[i].reader
		}
	}
	kept := w.readers[:0]
	for _, b := range w.readers {
		if !b.cohort.closed.Load() {
			kept = append(kept, b)
		}
	}
	clear(w.readers[len(kept):])
	r := c.pool.NewReader()
	w.readers = append(kept, bound{c, r})
	return r
}
