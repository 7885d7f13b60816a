package capture

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/units"
)

// Template writes the template's memory and root image. The image is sealed.
func (w *Writer) Template(ctx context.Context, image *guestmem.Image, root *os.File) error {
	err := w.usable()
	if err != nil {
		return err
	}
	st, err := root.Stat()
	if err != nil {
		return fmt.Errorf("capture root image: %w", err)
	}
	memory, err := w.content(memoryFile, kindMemory, image.Size(), imagePages(ctx, image))
	if err != nil {
		return fmt.Errorf("capture template memory: %w", err)
	}
	size := units.Bytes(st.Size())
	rootContent, err := w.content(rootFile, kindRoot, size, filePages(ctx, root, size))
	if err != nil {
		return fmt.Errorf("capture root image: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.info.Memory, w.info.Root = memory, rootContent
	return nil
}

func imagePages(ctx context.Context, image *guestmem.Image) Pages {
	return func(visit func(units.Frame, *units.Page) error) error {
		for f := range units.Frame(image.Frames()) {
			if f%4096 == 0 && ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if page := image.Page(f); page != nil {
				if err := visit(f, page); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// filePages reads the parts of file that are not holes. A part of a page at the end is
// filled up with zeros.
func filePages(ctx context.Context, file *os.File, size units.Bytes) Pages {
	return func(visit func(units.Frame, *units.Page) error) error {
		var page units.Page
		for off := int64(0); off < int64(size); {
			start, end, err := hostmem.NextData(file, off, int64(size))
			if err != nil {
				return err
			}
			for off = max(off, start&^(units.PageSize-1)); off < end; off += units.PageSize {
				if off%(4096*units.PageSize) == 0 && ctx.Err() != nil {
					return context.Cause(ctx)
				}
				n, err := file.ReadAt(page[:], off)
				if err != nil && !errors.Is(err, io.EOF) {
					return fmt.Errorf("read %s: %w", file.Name(), err)
				}
				clear(page[n:])
				if err := visit(units.Frame(off/units.PageSize), &page); err != nil {
					return err
				}
			}
		}
		return nil
	}
}

// content writes pages that are not all zeros to a file of its own.
func (w *Writer) content(name string, k kind, size units.Bytes, pages Pages) (c Content, err error) {
	f, err := w.create(name)
	if err != nil {
		return Content{}, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	p := <-w.idle
	defer func() { w.idle <- p }()
	c.Size = size
	sum := newBlockSum()
	out := &counter{w: f}
	err = p.pack(out, header{kind: k, frames: uint64(blocks(size))}, func(r *recordWriter) error {
		return pages(func(f units.Frame, page *units.Page) error {
			if *page == zeroPage {
				return nil
			}
			c.Pages++
			sum.add(f, page, size)
			return r.add(opContent, f, page)
		})
	})
	if err != nil {
		return Content{}, err
	}
	c.Length, c.Blocks = out.n, sum.hex()
	return c, f.Sync()
}

var zeroPage units.Page

// A blockSum is the digest of a template's manifest: SHA-256 over each page that is not
// all zeros, preceded by its number (8 bytes, little-endian).
type blockSum struct{ h hash.Hash }

func newBlockSum() blockSum { return blockSum{sha256.New()} }

func (s blockSum) add(f units.Frame, page *units.Page, size units.Bytes) {
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], uint64(f))
	s.h.Write(number[:])                                          // a hash never fails
	s.h.Write(page[:min(units.PageSize, int64(size)-f.Offset())]) // a part of a page at the end
}

func (s blockSum) hex() string { return hex.EncodeToString(s.h.Sum(nil)) }

// Image returns the template's memory, sealed. The caller closes it.
func (s *Set) Image() (*guestmem.Image, error) {
	image, err := guestmem.NewImage(s.info.Memory.Size)
	if err != nil {
		return nil, fmt.Errorf("load template memory of capture: %w", err)
	}
	err = s.load(memoryFile, kindMemory, s.info.Memory, image.File())
	if err == nil {
		err = image.Seal()
	}
	if err != nil {
		return nil, errors.Join(err, image.Close())
	}
	return image, nil
}

// Root returns the template's root image as a memory file without a name, sealed. The
// caller closes it.
func (s *Set) Root() (*os.File, error) {
	file, err := hostmem.NewMemfd("agentzip-captured-root", s.info.Root.Size)
	if err != nil {
		return nil, fmt.Errorf("load root image of capture: %w", err)
	}
	err = s.load(rootFile, kindRoot, s.info.Root, file)
	if err == nil {
		err = hostmem.Seal(file)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// load unpacks a content into dst, which is all zeros, and checks its digest.
func (s *Set) load(name string, k kind, c Content, dst *os.File) (err error) {
	defer func() {
		if err != nil {
			err = s.damaged(name, err)
		}
	}()
	f, err := s.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	u, err := newUnpacker()
	if err != nil {
		return err
	}
	defer u.close()
	if err := u.begin(io.NewSectionReader(f, 0, c.Length), header{kind: k, frames: uint64(blocks(c.Size))}); err != nil {
		return err
	}
	sum, pages := newBlockSum(), int64(0)
	var page units.Page
	for {
		o, start, n, err := u.record.run()
		switch {
		case err != nil:
			return err
		case o == opEnd && pages != c.Pages:
			return fmt.Errorf("it has %d pages, not %d", pages, c.Pages)
		case o == opEnd && sum.hex() != c.Blocks:
			return errors.New("its content does not match its digest")
		case o == opEnd:
			return nil
		case o != opContent:
			return fmt.Errorf("a run of kind %d has no place there", o)
		}
		for ; n > 0; n-- {
			if err := u.record.page(&page); err != nil {
				return err
			}
			frame := units.Frame(start)
			sum.add(frame, &page, c.Size)
			if _, err := dst.WriteAt(page[:min(units.PageSize, int64(c.Size)-frame.Offset())], frame.Offset()); err != nil {
				return err
			}
			start++
			pages++
		}
	}
}
