// Package library finds public pages by content: the pages of a template's memory
// and the 4 KiB blocks of its root image.
//
// Every clone of a template may read all of them, so a reference to one tells
// nothing about a sibling, and what it names is on the host anyway. A page of a
// sandbox that equals a public one is kept as an ID and costs no byte of the pool.
//
//	Build (scans both) --+
//	                     +--> open --Close--> closed
//	Open (reads a file) -+
//
// A Library is built once per template (0.25 s for 268 MiB of root), stored beside it by WriteIndex,
// opened once per host process and shared by all cohorts. It holds one table: the
// CRC-32C of each distinct page that is not zero, and its ID (see table.go: 4.7 bytes
// a page). The table only proposes: Find compares bytes before it says yes, and Read
// checks what it read against the table before it says it is that page.
//
// Blocks of the root image are read with pread, never mapped: a file that was
// truncated, or a disk that fails, is an error and not a signal, and a goroutine that
// waits for a disk is one the Go scheduler knows of. A mapping would save 1.7 of the 2.4 us
// (1 us of them is the entry of a system call, on a virtual machine with page table
// isolation), and cost 0.5 MB of page tables, more than the table itself.
//
// There is no lock: nothing changes after Build or Open. Everything but Close may be
// called from any goroutine; Find and Read do not allocate.
package library

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// An ID names a public page: the template's frames first, then the blocks of the root
// image. It has IDBits bits and means the same in every process that uses that template.
type ID uint32

// IDBits is the width of an ID: the page tables of the pager have no room for more.
const IDBits = 28

// MaxPages is how many frames and blocks a template may have: 1 TiB of them.
const MaxPages = 1 << IDBits

// What callers branch on.
var (
	// ErrDamaged: an index file, or a public page, is not what was written. dst of
	// Read holds no valid page then.
	ErrDamaged = errors.New("public pages are damaged")
	// ErrMismatch: the index is that of another memory image or root image.
	ErrMismatch = errors.New("index belongs to another template")
	// ErrFormat: the index was written by a newer AgentZip.
	ErrFormat = errors.New("index has an unknown format")
)

// readPoint fails the read of a root block, as a broken disk would.
var readPoint = fault.NewPoint("library.read")

// A Library finds and reads public pages. Safe for concurrent use, Close excepted.
type Library struct {
	source
	table  *table   // immutable
	digest [32]byte // immutable; of the memory image, see memoryDigest
}

// A source is where the bytes of public pages are.
type source struct {
	image  *guestmem.Image // immutable; not owned
	root   *os.File        // immutable; an own descriptor of the root image
	fd     int             // immutable; that of root
	frames uint32          // immutable; IDs below it are frames of the image
	blocks uint32          // immutable; whole blocks of the root image
}

func newSource(image *guestmem.Image, root *os.File) (source, error) {
	info, err := root.Stat()
	if err != nil {
		return source{}, fmt.Errorf("look at root image: %w", err)
	}
	if !info.Mode().IsRegular() {
		return source{}, fmt.Errorf("root image %s is not a regular file", root.Name())
	}
	frames, blocks := image.Frames(), units.Bytes(info.Size()).Pages()
	if frames+blocks > MaxPages {
		return source{}, fmt.Errorf("memory and root image have %d pages, %d are the most", frames+blocks, MaxPages)
	}
	// An own descriptor: nobody can close it, and let its number name another file.
	fd, err := unix.FcntlInt(root.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return source{}, fmt.Errorf("duplicate descriptor of root image: %w", err)
	}
	return source{
		image: image, root: os.NewFile(uintptr(fd), root.Name()), fd: fd, //nolint:gosec // G115: descriptors are not negative
		frames: uint32(frames), blocks: uint32(blocks), //nolint:gosec // G115: at most MaxPages
	}, nil
}

// total is the number of IDs there are, and one more than the largest.
func (s *source) total() uint32 { return s.frames + s.blocks }

// idBits is how many bits the largest ID of this template needs.
func (s *source) idBits() uint { return bitsFor(s.total()) }

// describe names a public page in an error.
func (s *source) describe(id ID) string {
	if uint32(id) < s.frames {
		return fmt.Sprintf("page %#x of the template's memory", uint32(id))
	}
	return fmt.Sprintf("block %d of the root image %s", uint32(id)-s.frames, s.root.Name())
}

// readRoot reads a block of the root image into dst.
//
// Preconditions: frames <= id < total.
func (s *source) readRoot(dst *units.Page, id ID) error {
	if err := readPoint.Err(); err != nil {
		return err
	}
	off := int64(uint32(id)-s.frames) * units.PageSize
	for at := 0; at < len(dst); {
		n, err := unix.Pread(s.fd, dst[at:], off+int64(at))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return errShort
		default:
			at += n
		}
	}
	return nil
}

var errShort = errors.New("the file ends before it: it was truncated")

// load reads any page of the source, unverified.
//
// Preconditions: id < total, and not a hole of the image.
func (s *source) load(dst *units.Page, id ID) error {
	if uint32(id) < s.frames {
		*dst = *s.image.Page(units.Frame(id))
		return nil
	}
	if err := s.readRoot(dst, id); err != nil {
		return fmt.Errorf("read %s: %w", s.describe(id), err)
	}
	return nil
}

// Find returns the public page whose content is page; sum is codec.Checksum of it.
// The bytes were compared. Pages of zeros are never found. Of several public pages
// with that content it is always the same one, a template page if there is one.
//
// A block of the root image that cannot be read, or has changed, is not found.
func (l *Library) Find(page *units.Page, sum uint32) (ID, bool) {
	for i, end := l.table.bucket(sum); i < end; i++ {
		if id, ok := l.table.match(i, sum); ok && l.equal(id, page) {
			return id, true
		}
	}
	return 0, false
}

func (l *Library) equal(id ID, page *units.Page) bool {
	if uint32(id) < l.frames {
		return *l.image.Page(units.Frame(id)) == *page
	}
	return l.equalRoot(id, page)
}

// equalRoot is a function of its own so that only those who read a block pay for
// clearing its 4 KiB of stack.
//
//go:noinline
func (l *Library) equalRoot(id ID, page *units.Page) bool {
	var block units.Page
	return l.readRoot(&block, id) == nil && block == *page
}

// Read fills dst with a public page and checks it. It fails with ErrDamaged if the
// page is not what it was when the library was built, cannot be read, or was never
// named by Find; dst is garbage then.
func (l *Library) Read(dst *units.Page, id ID) error {
	if uint32(id) < l.frames {
		page := l.Template(units.Frame(id))
		if page == nil {
			return l.damaged(id, "it is all zeros, which no reference names")
		}
		*dst = *page
	} else {
		if uint32(id) >= l.total() {
			return fmt.Errorf("read public page %#x: there are only %#x: %w", uint32(id), l.total(), ErrDamaged)
		}
		if err := l.readRoot(dst, id); err != nil {
			return l.damaged(id, err.Error())
		}
	}
	if !l.table.has(codec.Checksum(dst), id) {
		return l.damaged(id, "its checksum is not the one in the index")
	}
	return nil
}

func (l *Library) damaged(id ID, why string) error {
	return fmt.Errorf("read %s: %s: build the template again (agentzip template build): %w", l.describe(id), why, ErrDamaged)
}

// Template returns the page of a frame of the template's memory, nil if it is all zeros
// or there is no such frame. It is read-only and valid until the image is closed.
func (l *Library) Template(f units.Frame) *units.Page {
	if uint32(f) >= l.frames {
		return nil
	}
	return l.image.Page(f)
}

// All calls yield for each page that Find can return, with its checksum, in the order
// of the checksums.
func (l *Library) All(yield func(id ID, sum uint32) bool) { l.table.all(yield) }

// Pages returns how many distinct pages Find knows.
func (l *Library) Pages() int { return l.table.entries }

// Size returns the memory the library occupies in this process, the template's own
// memory and the page cache not counted.
func (l *Library) Size() units.Bytes { return l.table.size() }

// Close frees the library. The image stays open, and so does the caller's root file.
//
// Preconditions: nobody uses the library any more.
func (l *Library) Close() error { return errors.Join(l.table.close(), l.root.Close()) }
