package pool

import (
	"unsafe"

	"github.com/agentzip/agentzip/internal/units"
)

const chunkBytesForTest = units.Bytes(chunkBytes)

func addressOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }
