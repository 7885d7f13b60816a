package pool

import (
	"math"
	"slices"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/invariant"
)

// A Reader looks at entries. One goroutine at a time.
//
//	unpinned --Pin--> pinned --Unpin--> unpinned --Close--> closed
//
// Pinned it keeps memory from being given back: pin for a decode, not longer.
type Reader struct {
	_     [64]byte      // two readers' epochs do not share a cache line, nor the line that is fetched with it
	epoch atomic.Uint64 // the pool's epoch at Pin, 0 while unpinned; written by the owner
	pool  *Pool         // immutable
	_     [64]byte
}

// NewReader returns a reader; Close it before the pool.
func (p *Pool) NewReader() *Reader {
	r := &Reader{pool: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.readers = append(p.readers, r)
	p.tables.Add(readerBytes)
	p.used.Add(readerBytes) // not refused: without readers no page comes back
	return r
}

// Pin makes what View returns stay until Unpin. It does not nest.
func (r *Reader) Pin() {
	if invariant.Enabled {
		invariant.Check(r.epoch.Load() == 0, "a reader is pinned once at a time")
	}
	r.epoch.Store(r.pool.epoch.Load())
}

// Unpin ends the use of all that View returned since Pin.
func (r *Reader) Unpin() {
	if invariant.Enabled {
		invariant.Check(r.epoch.Load() != 0, "a reader that is unpinned was pinned")
	}
	r.epoch.Store(0)
}

// View returns the entry of which the caller holds a reference; Data aliases the
// arena, must not be written to, and stays as it is until Unpin, even if the last
// reference goes meanwhile. It fails with ErrDamaged, or the damage is for the
// decoder to find: then Sum does not match.
// Preconditions: r is pinned.
func (r *Reader) View(h Handle) (codec.Encoded, error) {
	if invariant.Enabled {
		invariant.Check(r.epoch.Load() != 0, "a reader that views is pinned")
	}
	_, w, err := r.pool.load(h)
	if err != nil {
		return codec.Encoded{}, err
	}
	enc, ok := r.pool.readEntry(h, int(w.place())*unit)
	if !ok {
		return codec.Encoded{}, errHeader
	}
	return enc, nil
}

// Close ends the reader. The pool forgets it.
// Preconditions: r is not pinned.
func (r *Reader) Close() {
	p := r.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.readers, r); i >= 0 {
		p.readers = slices.Delete(p.readers, i, i+1)
		p.tables.Add(-readerBytes)
		p.used.Add(-readerBytes)
	}
}

// leastPinned returns the earliest epoch at which a reader that is pinned now
// pinned. What went to limbo at that epoch or before is seen by nobody.
// Preconditions: mu is held.
func (p *Pool) leastPinned() uint64 {
	least := uint64(math.MaxUint64)
	for _, r := range p.readers {
		if e := r.epoch.Load(); e != 0 {
			least = min(least, e)
		}
	}
	return least
}
