//go:build cgo

package codec

/*
#cgo LDFLAGS: -l:libzstd.a
#cgo noescape agz_compress
#cgo nocallback agz_compress
#cgo noescape agz_compress_base
#cgo nocallback agz_compress_base
#cgo noescape agz_decompress_base
#cgo nocallback agz_decompress_base
#cgo noescape agz_decompress
#cgo nocallback agz_decompress
#include <stdlib.h>
#include <string.h>
#define ZSTD_STATIC_LINKING_ONLY // ZSTD_createCDict_advanced, ZSTD_createDDict_advanced, ZSTD_sizeof_*
#include <zstd.h>

static ZSTD_CCtx *agz_new_cctx(int level) {
	ZSTD_CCtx *c = ZSTD_createCCtx();
	if (c == NULL) return NULL;
	if (ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_compressionLevel, level)) ||
	    ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, 0)) ||
	    ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 0)) ||
	    ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_dictIDFlag, 0))) {
		ZSTD_freeCCtx(c);
		return NULL;
	}
	return c;
}

// agz_compress returns the length of the frame, 0 on any error.
static size_t agz_compress(ZSTD_CCtx *c, const ZSTD_CDict *cd, void *dst, size_t cap, const void *src, size_t n) {
	size_t r = ZSTD_CCtx_refCDict(c, cd); // cd == NULL: no dictionary
	if (ZSTD_isError(r)) return 0;
	r = ZSTD_compress2(c, dst, cap, src, n);
	return ZSTD_isError(r) ? 0 : r;
}

// agz_decompress returns the number of bytes written to dst, 0 on any error.
static size_t agz_decompress(ZSTD_DCtx *d, const ZSTD_DDict *dd, void *dst, size_t cap, const void *src, size_t n) {
	size_t r = dd ? ZSTD_decompress_usingDDict(d, dst, cap, src, n, dd) : ZSTD_decompressDCtx(d, dst, cap, src, n);
	return ZSTD_isError(r) ? 0 : r;
}

// The prefix holds for one frame and is only referred to, so base must stay until
// the call returns, and does.
static size_t agz_compress_base(ZSTD_CCtx *c, void *dst, size_t cap, const void *src, size_t n, const void *base, size_t m) {
	size_t r = ZSTD_CCtx_refPrefix(c, base, m);
	if (ZSTD_isError(r)) return 0;
	r = ZSTD_compress2(c, dst, cap, src, n);
	return ZSTD_isError(r) ? 0 : r;
}

static size_t agz_decompress_base(ZSTD_DCtx *d, void *dst, size_t cap, const void *src, size_t n, const void *base, size_t m) {
	// Not ZSTD_DCtx_refPrefix: it allocates 27 KiB for each frame and remembers the
	// pointer. This takes base as raw content unless it starts like a dictionary,
	// and such a base is refused (usableBase).
	size_t r = ZSTD_decompress_usingDict(d, dst, cap, src, n, base, m);
	return ZSTD_isError(r) ? 0 : r;
}

static ZSTD_CDict *agz_new_cdict(const void *raw, size_t n, int level) {
	ZSTD_compressionParameters p = ZSTD_getCParams(level, 4096, n);
	// A dictionary of 64 KiB asks for tables of up to 1 MiB at this level; with
	// 1<<14 entries each they are 142 KiB and pages grow by 0.5 %.
	if (p.hashLog > 14) p.hashLog = 14;
	if (p.chainLog > 14) p.chainLog = 14;
	return ZSTD_createCDict_advanced(raw, n, ZSTD_dlm_byRef, ZSTD_dct_fullDict, p, ZSTD_defaultCMem);
}

static ZSTD_DDict *agz_new_ddict(const void *raw, size_t n) {
	return ZSTD_createDDict_advanced(raw, n, ZSTD_dlm_byRef, ZSTD_dct_fullDict, ZSTD_defaultCMem);
}
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/agentzip/agentzip/internal/units"
)

// SAFETY, for the whole file: C keeps no pointer to Go memory after a call
// returns. The contexts and dictionaries are C memory that only this file
// names; a dictionary's tables refer to its raw bytes, which are C memory of the
// same lifetime. Every length passed to C is the length of the array or slice
// whose first element is passed beside it.

// compressor wraps a ZSTD_CCtx. One goroutine at a time.
type compressor struct{ ctx *C.ZSTD_CCtx }

func newCompressor(level int) *compressor {
	ctx := C.agz_new_cctx(C.int(level))
	if ctx == nil {
		panic("codec: no memory for a zstd context")
	}
	return &compressor{ctx}
}

func (c *compressor) free() {
	C.ZSTD_freeCCtx(c.ctx)
	c.ctx = nil
}

func (c *compressor) size() int { return int(C.ZSTD_sizeof_CCtx(c.ctx)) }

// compress writes a whole frame to dst and returns its length, 0 if it failed.
func (c *compressor) compress(dst *frameBuffer, page *units.Page, tables *dictTables) int {
	var cd *C.ZSTD_CDict
	if tables != nil {
		cd = tables.cd
	}
	return int(C.agz_compress(c.ctx, cd, unsafe.Pointer(&dst[0]), C.size_t(len(dst)), unsafe.Pointer(&page[0]), C.size_t(len(page))))
}

// compressWithBase is compress with base as prefix.
func (c *compressor) compressWithBase(dst *frameBuffer, page, base *units.Page) int {
	return int(C.agz_compress_base(c.ctx, unsafe.Pointer(&dst[0]), C.size_t(len(dst)), unsafe.Pointer(&page[0]), C.size_t(len(page)), unsafe.Pointer(&base[0]), C.size_t(len(base))))
}

// decompressor wraps a ZSTD_DCtx. One goroutine at a time.
type decompressor struct{ ctx *C.ZSTD_DCtx }

func newDecompressor() *decompressor {
	ctx := C.ZSTD_createDCtx()
	if ctx == nil {
		panic("codec: no memory for a zstd context")
	}
	return &decompressor{ctx}
}

func (d *decompressor) free() {
	C.ZSTD_freeDCtx(d.ctx)
	d.ctx = nil
}

func (d *decompressor) size() int { return int(C.ZSTD_sizeof_DCtx(d.ctx)) }

// decompress decodes the block body to dst and reports whether it filled it.
func (d *decompressor) decompress(dst *units.Page, body []byte, scratch *frameBuffer, tables *dictTables) bool {
	frame := appendFrame(scratch[:0], body, 0)
	var dd *C.ZSTD_DDict
	if tables != nil {
		dd = tables.dd
	}
	n := C.agz_decompress(d.ctx, dd, unsafe.Pointer(&dst[0]), C.size_t(len(dst)), unsafe.Pointer(&frame[0]), C.size_t(len(frame)))
	return n == units.PageSize
}

// decompressWithBase is decompress with base as prefix.
func (d *decompressor) decompressWithBase(dst *units.Page, body []byte, scratch *frameBuffer, base *units.Page) bool {
	frame := appendFrame(scratch[:0], body, 0)
	n := C.agz_decompress_base(d.ctx, unsafe.Pointer(&dst[0]), C.size_t(len(dst)), unsafe.Pointer(&frame[0]), C.size_t(len(frame)), unsafe.Pointer(&base[0]), C.size_t(len(base)))
	return n == units.PageSize
}

// dictTables is a dictionary digested for both directions, in C memory.
type dictTables struct {
	raw unsafe.Pointer
	n   int
	cd  *C.ZSTD_CDict
	dd  *C.ZSTD_DDict
}

// newDictTables copies raw. level is the level of frames made with it.
func newDictTables(raw []byte, level int) (*dictTables, error) {
	t := &dictTables{raw: C.CBytes(raw), n: len(raw)}
	t.cd = C.agz_new_cdict(t.raw, C.size_t(t.n), C.int(level))
	t.dd = C.agz_new_ddict(t.raw, C.size_t(t.n))
	if t.cd == nil || t.dd == nil {
		t.free()
		return nil, errors.New("zstd refuses the dictionary")
	}
	return t, nil
}

func (t *dictTables) free() {
	C.ZSTD_freeCDict(t.cd) // NULL is accepted
	C.ZSTD_freeDDict(t.dd)
	C.free(t.raw)
	*t = dictTables{}
}

func (t *dictTables) size() int {
	return t.n + int(C.ZSTD_sizeof_CDict(t.cd)) + int(C.ZSTD_sizeof_DDict(t.dd))
}
