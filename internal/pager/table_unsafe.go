package pager

import (
	"sync/atomic"
	"unsafe"

	"github.com/agentzip/agentzip/internal/units"
)

// word returns the table's entry of a frame as an atomic.
//
// SAFETY: t.words is the page-aligned start of a shared mapping of frames*4 bytes, so
// that every entry is aligned and inside it; the caller checks f < frames by the slice
// expression. The mapping outlives all users (Pager.life).
func (t *table) word(f units.Frame) *atomic.Uint32 {
	b := t.words[4*uint64(f) : 4*uint64(f)+4]
	return (*atomic.Uint32)(unsafe.Pointer(&b[0]))
}

const _ = uint(unsafe.Sizeof(atomic.Uint32{})-4) + uint(4-unsafe.Sizeof(atomic.Uint32{})) // a word is 4 bytes
