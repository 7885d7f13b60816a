package pager

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// A Kind says what made the guest wait at a page.
type Kind uint8

// Kinds of touches.
const (
	KindUnknown   Kind = iota // of a page that is expected to be touched: none waited yet
	KindEvicted               // it had to be decoded
	KindZero                  // not mapped, zeros
	KindTemplate              // not mapped, the template's
	KindProtected             // mapped, and written while clean or being encoded
	KindPrivate               // no fault: a pass found the page private, so it was written since it was dropped
	KindNeighbour             // nobody waited: an evicted page was brought beside one that was waited for
	numKinds
)

func (k Kind) String() string {
	switch k {
	case KindUnknown:
		return "unknown"
	case KindEvicted:
		return "evicted"
	case KindZero:
		return "zero"
	case KindTemplate:
		return "template"
	case KindProtected:
		return "protected"
	case KindPrivate:
		return "private"
	case KindNeighbour:
		return "neighbour"
	case numKinds:
	}
	return "?"
}

// Waited reports whether the guest waited for the page.
func (k Kind) Waited() bool { return k >= KindEvicted && k <= KindProtected }

// A Touch is a page that the guest was seen touching, or that it is expected to touch.
type Touch struct {
	Frame units.Frame
	Write bool // it was, or will be, written
	Kind  Kind // of the fault that told; KindUnknown for pages that are expected
}

// DrainTouched appends to dst the faults that were served since the last call, in their
// order. A page is there when it is first touched and again when it is first written, if
// that is later: each is a fault. What takes no fault is not there: pages restored ahead
// that were installed writable or only read, and neighbours mapped by a fault. It may be
// called at any time, also during a tool call; Notify says when it is worth it.
//
// Passes add the pages that they found private and looked at, as KindPrivate: so a write to a
// page that was mapped as shared is seen, which the kernel copies without an event. Pages
// that Restore installed to be written are among them only if their content has changed: a
// guest that zeroes what it frees may have used a page of zeros that is as it was.
func (p *Pager) DrainTouched(dst []Touch) []Touch {
	p.life.RLock()
	defer p.life.RUnlock()
	if p.closed {
		return dst
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.touched.drain(dst)
}

// note adds a touch to the log, or counts it as lost. Caller holds mu.
func (p *Pager) note(t Touch) {
	if !p.touched.add(t) {
		p.stats.touchesLost.Add(1)
	}
}

// Notify returns a channel that holds a token when faults were served since DrainTouched
// last took them. It is the same at each call, is never closed, and is for one reader.
func (p *Pager) Notify() <-chan struct{} { return p.notify }

// tell puts the token into the channel. It neither waits nor allocates.
func (p *Pager) tell() {
	select {
	case p.notify <- struct{}{}:
	default:
	}
}

// touchLogLimit is how many faults a log holds: some ten tool calls' (1,027 each before any
// page is restored in the right order). Doubled, a sandbox that nobody drains holds 128 KiB.
const touchLogLimit = 1 << 14

// The word of a touch in the log: frame, then whether it was a write, then its kind.
const (
	touchWrite     = 1 << 28
	touchKindShift = 29
	touchFrames    = touchWrite // guests have at most so many frames: 1 TiB
)

// A touchLog holds faults in their order, in memory outside the Go heap of which only what
// is in use is resident. When it is full the newer ones are lost and counted. Guarded by
// Pager.mu.
type touchLog struct {
	mapping *hostmem.Mapping // immutable until close
	n       int              // faults in it
	most    int              // most faults in it since it was trimmed
}

func newTouchLog() (touchLog, error) {
	m, err := hostmem.MapAnonymous(touchLogLimit * 4)
	if err != nil {
		return touchLog{}, fmt.Errorf("make the log of touched pages: %w", err)
	}
	return touchLog{mapping: m}, nil
}

// add notes a touch. ok: there was room.
func (l *touchLog) add(t Touch) (ok bool) {
	if l.n == touchLogLimit {
		return false
	}
	word := uint32(t.Frame) | uint32(t.Kind)<<touchKindShift
	if t.Write {
		word |= touchWrite
	}
	binary.NativeEndian.PutUint32(l.mapping.Data[l.n*4:], word)
	l.n++
	return true
}

func (l *touchLog) drain(dst []Touch) []Touch {
	for i := range l.n {
		word := binary.NativeEndian.Uint32(l.mapping.Data[i*4:])
		dst = append(dst, Touch{Frame: units.Frame(word & (touchFrames - 1)), Write: word&touchWrite != 0, Kind: Kind(word >> touchKindShift)})
	}
	l.most = max(l.most, l.n)
	l.n = 0
	return dst
}

// size returns how much of the log is resident.
func (l *touchLog) size() units.Bytes {
	return units.Bytes(max(l.most, l.n)*4+units.PageSize-1) &^ (units.PageSize - 1)
}

// trim gives back the pages of a log that is used no more; the first stays, a call needs it.
func (l *touchLog) trim() {
	if l.n*4 <= units.PageSize && l.size() > units.PageSize &&
		unix.Madvise(l.mapping.Data[units.PageSize:], unix.MADV_DONTNEED) == nil {
		l.most = l.n
	}
}

func (l *touchLog) close() error { return l.mapping.Close() }
