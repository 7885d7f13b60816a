package pager

import (
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// words returns mapped memory as atomics.
//
// SAFETY: data is a shared mapping, so page-aligned, of whole pages; every access is
// checked against the slice's length. The mapping outlives all users (Pager.life).
func words(data []byte) []atomic.Uint32 {
	return unsafe.Slice((*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(data))), len(data)/4)
}

const _ = uint(unsafe.Sizeof(atomic.Uint32{})-4) + uint(4-unsafe.Sizeof(atomic.Uint32{})) // a word is 4 bytes

// fileSide is what os.NewFile allocates behind an os.File of Go 1.26:
// TestTheGoSideOfTheTableIsCounted.
const fileSide = 176

// goSide is what a table has on the Go heap.
const goSide = units.Bytes(unsafe.Sizeof(table{}) + unsafe.Sizeof(hostmem.Mapping{}) + unsafe.Sizeof(os.File{}) + fileSide)
