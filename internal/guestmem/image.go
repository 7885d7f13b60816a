package guestmem

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"

	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// copyChunk is how much is read from a file at once when an image is loaded.
const copyChunk = 1 << 20

// An Image is a template's memory: a memory file with holes where pages are zero.
// A sealed image is safe for concurrent use.
type Image struct {
	file     *os.File         // immutable
	size     units.Bytes      // immutable
	memory   *hostmem.Mapping // read-only view; set by Seal
	holes    []uint64         // bit set: the frame is a hole; set by Seal, immutable after
	resident units.Bytes      // set by Seal, immutable after
}

// NewImage creates an unsealed image of zeros, for a machine that is to become a
// template. size must be a multiple of the page size.
func NewImage(size units.Bytes) (*Image, error) {
	if size <= 0 || size%units.PageSize != 0 {
		return nil, fmt.Errorf("create memory image: size %d is not a number of whole pages", size)
	}
	file, err := hostmem.NewMemfd("agentzip-memory", size)
	if err != nil {
		return nil, err
	}
	return &Image{file: file, size: size}, nil
}

// LoadImage reads a sparse file of exactly size bytes into a sealed image. Pages of
// zeros become holes, whether the file has holes there or not.
func LoadImage(path string, size units.Bytes) (*Image, error) {
	src, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("load memory image: %w", err)
	}
	defer src.Close() //nolint:errcheck // read only
	info, err := src.Stat()
	if err != nil {
		return nil, fmt.Errorf("load memory image: %w", err)
	}
	if info.Size() != int64(size) {
		return nil, fmt.Errorf("load memory image %s: it has %d bytes, not %d", path, info.Size(), int64(size))
	}
	im, err := NewImage(size)
	if err != nil {
		return nil, err
	}
	if err := im.fill(src); err != nil {
		return nil, errors.Join(fmt.Errorf("load memory image %s: %w", path, err), im.Close())
	}
	if err := im.Seal(); err != nil {
		return nil, errors.Join(err, im.Close())
	}
	return im, nil
}

// fill copies the pages of src that are not zero.
func (im *Image) fill(src *os.File) error {
	buf := make([]byte, copyChunk)
	return eachData(src, int64(im.size), func(start, end int64) error {
		for off := start; off < end; off += copyChunk {
			chunk := buf[:min(copyChunk, end-off)]
			if _, err := src.ReadAt(chunk, off); err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("read at %#x: %w", off, err)
			}
			if err := copyPages(im.file, chunk, off); err != nil {
				return err
			}
		}
		return nil
	})
}

// copyPages writes the pages of chunk that are not zero to dst at off.
func copyPages(dst *os.File, chunk []byte, off int64) error {
	for at := 0; at < len(chunk); {
		if zero(chunk[at : at+units.PageSize]) {
			at += units.PageSize
			continue
		}
		end := at + units.PageSize
		for end < len(chunk) && !zero(chunk[end:end+units.PageSize]) {
			end += units.PageSize
		}
		if _, err := dst.WriteAt(chunk[at:end], off+int64(at)); err != nil {
			return fmt.Errorf("write at %#x: %w", off+int64(at), err)
		}
		at = end
	}
	return nil
}

// eachData calls visit for the parts of file that are not holes, widened to whole
// pages.
func eachData(file *os.File, size int64, visit func(start, end int64) error) error {
	for off := int64(0); off < size; {
		start, end, err := hostmem.NextData(file, off, size)
		if err != nil {
			return err
		}
		if start >= size {
			return nil
		}
		start &^= units.PageSize - 1
		end = min((end+units.PageSize-1)&^(units.PageSize-1), size)
		if err := visit(max(start, off), end); err != nil {
			return err
		}
		off = end
	}
	return nil
}

func zero(page []byte) bool {
	return *(*units.Page)(page) == units.Page{}
}

// PunchZeroPages turns pages of zeros into holes, so that no clone pays for them.
//
// Preconditions: the image is not sealed and no machine runs on it.
func (im *Image) PunchZeroPages() error {
	if im.memory != nil {
		return errors.New("punch zero pages: the image is sealed")
	}
	buf := make([]byte, copyChunk)
	return eachData(im.file, int64(im.size), func(start, end int64) error {
		for off := start; off < end; off += copyChunk {
			chunk := buf[:min(copyChunk, end-off)]
			if _, err := im.file.ReadAt(chunk, off); err != nil {
				return fmt.Errorf("punch zero pages: read at %#x: %w", off, err)
			}
			if err := im.punch(chunk, off); err != nil {
				return fmt.Errorf("punch zero pages: %w", err)
			}
		}
		return nil
	})
}

func (im *Image) punch(chunk []byte, off int64) error {
	for at := 0; at < len(chunk); {
		end := at
		for end < len(chunk) && zero(chunk[end:end+units.PageSize]) {
			end += units.PageSize
		}
		if end > at {
			if err := hostmem.PunchHole(im.file, off+int64(at), int64(end-at)); err != nil {
				return err
			}
		}
		at = end + units.PageSize
	}
	return nil
}

// Seal makes the image immutable and readable by Page. It fails while a machine
// maps it shared.
func (im *Image) Seal() error {
	if im.memory != nil {
		return nil
	}
	if err := hostmem.Seal(im.file); err != nil {
		return fmt.Errorf("seal memory image (does a machine still run on it?): %w", err)
	}
	holes := make([]uint64, (im.Frames()+63)/64)
	for i := range holes {
		holes[i] = ^uint64(0)
	}
	err := eachData(im.file, int64(im.size), func(start, end int64) error {
		for f := start / units.PageSize; f < end/units.PageSize; f++ {
			holes[f/64] &^= 1 << (f % 64)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("seal memory image: %w", err)
	}
	// From the map, not from st_blocks: a VMM that touches a hole before it is under
	// userfaultfd makes the kernel allocate a page of zeros there.
	pages := im.Frames()
	for i, w := range holes {
		pages -= bits.OnesCount64(w & validBits(im.Frames(), i))
	}
	memory, err := hostmem.MapReadOnly(im.file, im.size)
	if err != nil {
		return fmt.Errorf("seal memory image: %w", err)
	}
	im.holes, im.memory = holes, memory
	im.resident = units.Bytes(pages) * units.PageSize
	return nil
}

// validBits masks the bits of word i that stand for one of n frames.
func validBits(n, i int) uint64 {
	if rest := n - i*64; rest < 64 {
		return 1<<rest - 1
	}
	return ^uint64(0)
}

// WriteSparse writes the image to a new file at path, holes as holes, and syncs it.
// It refuses to overwrite.
func (im *Image) WriteSparse(path string) error {
	dst, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write memory image: %w", err)
	}
	if err := im.writeTo(dst); err != nil {
		return errors.Join(fmt.Errorf("write memory image %s: %w", path, err), dst.Close(), os.Remove(path))
	}
	if err := dst.Close(); err != nil {
		return fmt.Errorf("write memory image %s: %w", path, err)
	}
	return nil
}

func (im *Image) writeTo(dst *os.File) error {
	if err := dst.Truncate(int64(im.size)); err != nil {
		return err
	}
	buf := make([]byte, copyChunk)
	err := eachData(im.file, int64(im.size), func(start, end int64) error {
		for off := start; off < end; off += copyChunk {
			chunk := buf[:min(copyChunk, end-off)]
			if _, err := im.file.ReadAt(chunk, off); err != nil {
				return err
			}
			if err := copyPages(dst, chunk, off); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return dst.Sync()
}

// Page returns the content of a frame, or nil if it is a hole (all zeros). It is
// read-only and valid until Close.
//
// Preconditions: the image is sealed; f < Frames.
func (im *Image) Page(f units.Frame) *units.Page {
	if im.Hole(f) {
		return nil
	}
	return (*units.Page)(im.memory.Data[f.Offset() : f.Offset()+units.PageSize])
}

// Hole reports whether a frame of a sealed image is a hole.
func (im *Image) Hole(f units.Frame) bool { return im.holes[f/64]&(1<<(f%64)) != 0 }

// Frames returns the number of pages.
func (im *Image) Frames() int { return im.size.Pages() }

// Size returns the size of guest memory.
func (im *Image) Size() units.Bytes { return im.size }

// File returns the memory file, to be inherited by a machine. It stays the image's.
func (im *Image) File() *os.File { return im.file }

// Resident returns what the pages of a sealed image occupy, holes not counted: once,
// for all its clones.
func (im *Image) Resident() units.Bytes { return im.resident }

// Close frees the image in this process; machines that map it go on.
//
// Preconditions: no Pager of this process uses it any more.
func (im *Image) Close() error {
	var err error
	if im.memory != nil {
		err = im.memory.Close()
	}
	return errors.Join(err, im.file.Close())
}
