package dictionary

import (
	"unsafe"

	"github.com/agentzip/agentzip/internal/units"
)

// asPages returns the whole pages of mem.
func asPages(mem []byte) []units.Page {
	// SAFETY: a Page is an array of bytes, so it needs no alignment, and
	// len(mem)/PageSize of them lie in mem.
	return unsafe.Slice((*units.Page)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/units.PageSize)
}
