package template

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/library"
)

// writeIndex makes the index of public pages, of root image and memory as they were written.
func (b *build) writeIndex(ctx context.Context) (err error) {
	pulse := b.report.Heartbeat(ctx, "index", "indexing pages of root image and memory")
	defer pulse.Stop()
	image, err := guestmem.LoadImage(b.outFile(memoryFile), b.spec.Hardware.Memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, image.Close()) }()
	root, err := os.Open(b.outFile(rootFile))
	if err != nil {
		return fmt.Errorf("open root image: %w", err)
	}
	defer func() { _ = root.Close() }()
	l, err := library.Build(ctx, image, root)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := l.WriteIndex(b.outFile(indexFile)); err != nil {
		return err
	}
	b.report.Done("index", "%d distinct pages, %v of memory once for all clones", l.Pages(), l.Size())
	return nil
}

// OpenLibrary opens the index of the pages that every clone may read: those of image, as
// OpenMemory gave it, and of root, RootFile opened. One process should share one. It must
// be closed before image is; root it does not need any more. It takes some 50 ms, and for a
// template that was built before there was an index 0.2 to 1 s: the index is made
// anew then, in memory.
//
// Errors wrap ErrDamaged or ErrFormat if it is the index, or what it describes, that is wrong.
func (t *Template) OpenLibrary(ctx context.Context, image *guestmem.Image, root *os.File) (*library.Library, error) {
	if _, ok := t.Files[indexFile]; !ok {
		l, err := library.Build(ctx, image, root)
		if err != nil {
			return nil, fmt.Errorf("template %s: %w", t.Name, err)
		}
		return l, nil
	}
	l, err := library.Open(ctx, t.IndexFile(), image, root)
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, library.ErrFormat):
		return nil, fmt.Errorf("template %s: %w: %w", t.Name, err, ErrFormat)
	case errors.Is(err, library.ErrDamaged), errors.Is(err, library.ErrMismatch):
		return nil, fmt.Errorf("template %s: %w: %w", t.Name, err, ErrDamaged)
	}
	return nil, fmt.Errorf("template %s: %w", t.Name, err)
}
