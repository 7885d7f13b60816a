//go:build cgo

package codec

/*
#define ZDICT_STATIC_LINKING_ONLY // ZDICT_*_fastCover
#include <zdict.h>

// agz_train fills dst and returns the length of the dictionary; 0 on any error.
// sizes is filled with n times page.
//
// The parameters are fixed: the search for better ones (ZDICT_optimize...) takes
// five times as long, and k from 256 to 2,048 moves the result by 0.2 %.
static size_t agz_train(void *dst, size_t cap, const void *pages, size_t *sizes, unsigned n, size_t page, int level) {
	for (unsigned i = 0; i < n; i++) sizes[i] = page;
	ZDICT_fastCover_params_t p = {0};
	p.k = 1024; // bytes of a segment
	p.d = 8;    // bytes that count as one word
	p.f = 20;
	p.accel = 1;
	p.zParams.compressionLevel = level;
	size_t r = ZDICT_trainFromBuffer_fastCover(dst, cap, pages, sizes, n, p);
	return ZDICT_isError(r) ? 0 : r;
}
*/
import "C"

import (
	"unsafe"

	"github.com/agentzip/agentzip/internal/units"
)

// train returns the dictionary, nil if ZDICT refuses the samples.
func train(pages []units.Page, size int) []byte {
	// SAFETY: C reads len(pages) pages, writes at most size bytes to dst and
	// len(pages) lengths to sizes, and keeps none of the pointers.
	dst := make([]byte, size)
	sizes := make([]C.size_t, len(pages))
	n := C.agz_train(unsafe.Pointer(&dst[0]), C.size_t(size), unsafe.Pointer(&pages[0]), &sizes[0], C.uint(len(pages)), units.PageSize, levelDict)
	if n == 0 {
		return nil
	}
	return dst[:n:n]
}
