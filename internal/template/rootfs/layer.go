package rootfs

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// An unpacker applies tar streams to a tree, one after another.
//
// What an entry can do is bounded by these rules, each with a test:
//
//   - A name or hard-link target with a ".." part is refused, "/" at its start is dropped.
//   - Links in the folders of a name are resolved inside the tree (Tree.resolve); then the
//     name is used through os.Root, which would refuse a link that appeared since.
//   - A symbolic link may say what it wants; only the guest will follow it.
//   - A hard link needs a target that exists in the tree and is a file or a link.
//   - Device nodes are refused, except below /dev, where they are left out: the guest
//     mounts devtmpfs there.
//   - Files and bytes are counted before they are written, holes of sparse files too.
type unpacker struct {
	tree      *Tree
	limits    Limits
	whiteouts bool // .wh. names remove what lower layers made

	bytes int64
	files int
	made  map[string]bool // resolved names this layer made: its whiteouts spare them
	dirs  []dirTime       // set last: making a child changes them
}

type dirTime struct {
	name string
	time time.Time
}

func newUnpacker(tree *Tree, limits Limits, whiteouts bool) *unpacker {
	return &unpacker{tree: tree, limits: limits, whiteouts: whiteouts}
}

// apply unpacks one layer. Errors name the entry. ctx is looked at between entries
// and between the pieces of a large one.
func (u *unpacker) apply(ctx context.Context, r io.Reader) error {
	u.made = map[string]bool{}
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if err := u.entry(ctx, hdr, tr); err != nil {
			return fmt.Errorf("unpack %q: %w", hdr.Name, err)
		}
	}
	// Whatever follows the end mark belongs to the stream, whose digest the caller checks.
	_, err := io.Copy(io.Discard, r)
	if err != nil {
		return fmt.Errorf("read archive: %w", err)
	}
	return u.finish()
}

// finish sets the times of folders, deepest last in, first out.
func (u *unpacker) finish() error {
	for _, d := range slices.Backward(u.dirs) {
		if err := u.tree.root.Chtimes(orDot(d.name), d.time, d.time); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set time of %s: %w", d.name, err)
		}
	}
	u.dirs = nil
	return nil
}

// cleanName returns an entry's name relative to the root, "" for the root itself.
func cleanName(name string) (string, error) {
	if strings.ContainsRune(name, 0) || len(name) > 4096 {
		return "", fmt.Errorf("bad name: %w", ErrUnsafe)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("name leads out of the image: %w", ErrUnsafe)
		}
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

func (u *unpacker) entry(ctx context.Context, hdr *tar.Header, r io.Reader) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := cleanName(hdr.Name)
	if err != nil {
		return err
	}
	if u.files++; u.files > u.limits.Files {
		return fmt.Errorf("more than %d files: %w", u.limits.Files, ErrTooLarge)
	}
	if u.whiteouts && strings.HasPrefix(path.Base(name), whiteoutPrefix) {
		return u.whiteout(name)
	}
	p, err := u.tree.resolve(name)
	if err != nil {
		return err
	}
	if p == "" && hdr.Typeflag != tar.TypeDir {
		return fmt.Errorf("the root is not a folder: %w", ErrUnsafe)
	}
	if hdr.Typeflag == tar.TypeChar || hdr.Typeflag == tar.TypeBlock {
		if strings.HasPrefix(p, "dev/") {
			return nil
		}
		return fmt.Errorf("device node outside /dev: %w", ErrUnsafe)
	}
	if err := u.tree.mkdirs(path.Dir(p)); err != nil {
		return err
	}
	if err := u.clear(p, hdr.Typeflag); err != nil {
		return err
	}
	u.mark(p)
	switch hdr.Typeflag {
	case tar.TypeDir:
		return u.dir(p, hdr)
	case tar.TypeReg:
		return u.file(ctx, p, hdr, r)
	case tar.TypeSymlink:
		return u.symlink(p, hdr)
	case tar.TypeLink:
		return u.hardlink(p, hdr)
	case tar.TypeFifo:
		return u.fifo(p, hdr)
	}
	return fmt.Errorf("entry of unknown type %q: %w", hdr.Typeflag, ErrUnsafe)
}

// mark notes that this layer made p and, perhaps silently, the folders above it.
func (u *unpacker) mark(p string) {
	for ; p != "" && p != "." && !u.made[p]; p = path.Dir(p) {
		u.made[p] = true
	}
}

// clear removes what stands where the entry goes, unless both are folders.
func (u *unpacker) clear(p string, kind byte) error {
	if p == "" {
		return nil
	}
	st, err := u.tree.root.Lstat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.IsDir() && kind == tar.TypeDir {
		return nil
	}
	u.tree.forget()
	return u.tree.root.RemoveAll(p)
}

func (u *unpacker) dir(p string, hdr *tar.Header) error {
	if p != "" {
		if err := u.tree.root.Mkdir(p, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	f, err := u.tree.root.Open(orDot(p))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	u.dirs = append(u.dirs, dirTime{p, hdr.ModTime})
	return dress(f, hdr)
}

func (u *unpacker) file(ctx context.Context, p string, hdr *tar.Header, r io.Reader) error {
	if hdr.Size < 0 || hdr.Size > int64(u.limits.Bytes)-u.bytes {
		return fmt.Errorf("more than %v of content: %w", u.limits.Bytes, ErrTooLarge)
	}
	u.bytes += hdr.Size
	f, err := u.tree.root.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, ctxReader{ctx, r})
	if err == nil {
		err = dress(f, hdr)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return u.tree.root.Chtimes(p, hdr.ModTime, hdr.ModTime)
}

func (u *unpacker) symlink(p string, hdr *tar.Header) error {
	if hdr.Linkname == "" || strings.ContainsRune(hdr.Linkname, 0) {
		return fmt.Errorf("symbolic link without a target: %w", ErrUnsafe)
	}
	if err := u.tree.root.Symlink(hdr.Linkname, p); err != nil {
		return err
	}
	u.tree.forget()
	return u.tree.root.Lchown(p, hdr.Uid, hdr.Gid)
}

func (u *unpacker) hardlink(p string, hdr *tar.Header) error {
	target, err := cleanName(hdr.Linkname)
	if err != nil {
		return fmt.Errorf("hard link to %q: %w", hdr.Linkname, err)
	}
	if target, err = u.tree.resolve(target); err != nil {
		return err
	}
	st, err := u.tree.root.Lstat(orDot(target))
	if err != nil {
		return fmt.Errorf("hard link to %q, which is not in the image: %w", hdr.Linkname, ErrUnsafe)
	}
	if !st.Mode().IsRegular() && st.Mode()&fs.ModeSymlink == 0 {
		return fmt.Errorf("hard link to %q, which is no file: %w", hdr.Linkname, ErrUnsafe)
	}
	return u.tree.root.Link(target, p)
}

func (u *unpacker) fifo(p string, hdr *tar.Header) error {
	parent, err := u.tree.root.Open(path.Dir(p))
	if err != nil {
		return err
	}
	defer func() { _ = parent.Close() }()
	if err := unix.Mkfifoat(int(parent.Fd()), path.Base(p), 0o600); err != nil {
		return err
	}
	if err := u.tree.root.Lchown(p, hdr.Uid, hdr.Gid); err != nil {
		return err
	}
	return u.tree.root.Chmod(p, hdr.FileInfo().Mode().Perm())
}

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// whiteout removes what lower layers put at the name, or in the folder when it is opaque.
func (u *unpacker) whiteout(name string) error {
	dir, base := path.Split(name)
	dir, err := u.tree.follow(dir)
	if err != nil {
		return err
	}
	if base == whiteoutOpaque {
		return u.empty(dir)
	}
	base = strings.TrimPrefix(base, whiteoutPrefix)
	if base == "" || base == "." || base == ".." {
		return fmt.Errorf("removal mark without a name: %w", ErrUnsafe)
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return nil // AUFS's own files (.wh..wh.plnk); they name nothing in the image
	}
	return u.remove(path.Join(dir, base))
}

// empty removes what lower layers put into a folder and keeps what this one made.
func (u *unpacker) empty(dir string) error {
	f, err := u.tree.root.Open(orDot(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := u.remove(path.Join(dir, n)); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) remove(p string) error {
	if !u.made[p] {
		u.tree.forget()
		return u.tree.root.RemoveAll(p)
	}
	if st, err := u.tree.root.Lstat(p); err == nil && st.IsDir() {
		return u.empty(p)
	}
	return nil
}

// dress gives an open file or folder its owner, mode and the extended attributes
// that mean something in a guest (capabilities of programs).
func dress(f *os.File, hdr *tar.Header) error {
	if err := own(f, hdr.FileInfo().Mode(), hdr.Uid, hdr.Gid); err != nil {
		return err
	}
	const capability = "security.capability"
	if v, ok := hdr.PAXRecords["SCHILY.xattr."+capability]; ok {
		err := unix.Fsetxattr(int(f.Fd()), capability, []byte(v), 0)
		if err != nil && !errors.Is(err, syscall.ENOTSUP) {
			return fmt.Errorf("set %s: %w", capability, err)
		}
	}
	return nil
}

// ctxReader ends a long copy when ctx does.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
