package rootfs

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentzip/agentzip/internal/template/step"
)

// Directory is a root file system that lies unpacked in a folder of the host.
type Directory struct {
	Path string
}

// walk calls visit for each entry that goes into an image: sockets are left out,
// other file systems below the folder are not entered.
func (d Directory) walk(ctx context.Context, visit func(rel, full string, st fs.FileInfo) error) error {
	top, err := os.Stat(d.Path)
	if err != nil {
		return fmt.Errorf("read source folder: %w", err)
	}
	if !top.IsDir() {
		return fmt.Errorf("read source folder: %s is not a folder", d.Path)
	}
	device := deviceOf(top)
	return filepath.WalkDir(d.Path, func(full string, e fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("read source folder: %w", err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return fmt.Errorf("read source folder: %w", err)
		}
		if st.Mode()&fs.ModeSocket != 0 {
			return nil
		}
		rel, err := filepath.Rel(d.Path, full)
		if err != nil {
			return fmt.Errorf("read source folder: %w", err)
		}
		if err := visit(rel, full, st); err != nil {
			return err
		}
		if e.IsDir() && deviceOf(st) != device {
			return filepath.SkipDir // the mount point itself stays, empty
		}
		return nil
	})
}

// Digest names the state of the folder by names, owners, modes, sizes and times,
// not by content: reading it all would take longer than most builds it saves.
func (d Directory) Digest(ctx context.Context) (string, error) {
	h := sha256.New()
	err := d.walk(ctx, func(rel, _ string, st fs.FileInfo) error {
		sys, ok := st.Sys().(*syscall.Stat_t)
		if !ok {
			return errors.New("file information without a stat structure")
		}
		_, _ = fmt.Fprintf(h, "%q %v %d %d %d %d\n", rel, st.Mode(), sys.Uid, sys.Gid, st.Size(), st.ModTime().UnixNano())
		return nil
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Unpack copies the folder into the tree, by way of a tar stream so that the rules of
// layers hold here too.
func (d Directory) Unpack(ctx context.Context, tree *Tree, limits Limits, report step.Func) error {
	src, err := filepath.EvalSymlinks(d.Path)
	if err != nil {
		return fmt.Errorf("read source folder: %w", err)
	}
	inside, err := filepath.Rel(src, tree.Dir())
	if err == nil && inside != ".." && !strings.HasPrefix(inside, "../") {
		return fmt.Errorf("source folder %s holds the build's own folder %s: choose a folder outside the state directory", src, tree.Dir())
	}
	pulse := report.Heartbeat(ctx, "root image", "copying "+d.Path)
	defer pulse.Stop()
	r, w := io.Pipe()
	failed := make(chan error, 1)
	go func() {
		err := d.writeTar(ctx, w)
		_ = w.CloseWithError(err)
		failed <- err
	}()
	err = newUnpacker(tree, limits, false).apply(ctx, r)
	_ = r.CloseWithError(errors.New("unpacking has stopped"))
	if werr := <-failed; err == nil {
		err = werr
	}
	return err
}

func (d Directory) writeTar(ctx context.Context, w io.Writer) error {
	tw := tar.NewWriter(w)
	type inode struct{ dev, ino uint64 }
	first := map[inode]string{}
	err := d.walk(ctx, func(rel, full string, st fs.FileInfo) error {
		link := ""
		if st.Mode()&fs.ModeSymlink != 0 {
			var err error
			if link, err = os.Readlink(full); err != nil {
				return fmt.Errorf("read source folder: %w", err)
			}
		}
		hdr, err := tar.FileInfoHeader(st, link)
		if err != nil {
			return fmt.Errorf("describe %s: %w", full, err)
		}
		hdr.Name, hdr.Uname, hdr.Gname, hdr.Format = rel, "", "", tar.FormatPAX
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && st.Mode().IsRegular() && sys.Nlink > 1 {
			id := inode{sys.Dev, sys.Ino}
			if name, seen := first[id]; seen {
				hdr.Typeflag, hdr.Linkname, hdr.Size = tar.TypeLink, name, 0
			} else {
				first[id] = rel
			}
		}
		if err := tw.WriteHeader(hdr); err != nil {
			return fmt.Errorf("copy %s: %w", full, err)
		}
		if hdr.Typeflag != tar.TypeReg {
			return nil
		}
		return copyInto(tw, full, hdr.Size)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func copyInto(w io.Writer, name string, size int64) error {
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("read source folder: %w", err)
	}
	defer func() { _ = f.Close() }()
	if _, err := io.CopyN(w, f, size); err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return nil
}

func deviceOf(st fs.FileInfo) uint64 {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return sys.Dev
	}
	return 0
}
