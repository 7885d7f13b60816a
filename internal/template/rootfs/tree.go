package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/agentzip/agentzip/internal/units"
)

// ErrUnsafe says that an image holds an entry that must not be unpacked on this
// host. The tree is half-filled and good for nothing.
var ErrUnsafe = errors.New("image is not safe to unpack")

// ErrTooLarge says that an image goes past a limit. The tree is half-filled.
var ErrTooLarge = errors.New("image is too large")

// Limits bound what an image may unpack to.
type Limits struct {
	Bytes units.Bytes // content of all files together, holes included
	Files int         // entries of all kinds
}

// DefaultLimits fit the largest images agents are run in (8 GiB) with room.
var DefaultLimits = Limits{Bytes: 16 * units.GiB, Files: 2_000_000}

// Tree is a root file system unpacked into a folder of the host.
//
// Names are relative to the root, with slashes. Every access goes through an
// os.Root, so that no symbolic link of the tree leads out of it; links in the
// middle of a name are resolved as the guest would (an absolute target starts
// at the tree's root, ".." stops there).
type Tree struct {
	dir     string
	root    *os.Root
	parents map[string]string // folder as named -> the same without links; emptied whenever a link or folder goes
}

// NewTree makes the folder dir, readable by root only (it may come to hold
// set-uid programs), and opens it.
func NewTree(dir string) (*Tree, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make tree: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open tree: %w", err)
	}
	return &Tree{dir: dir, root: root, parents: map[string]string{}}, nil
}

// Dir returns the folder of the host.
func (t *Tree) Dir() string { return t.dir }

// Close gives back the handle; the files stay.
func (t *Tree) Close() error { return t.root.Close() }

// maxLinks is the kernel's own limit for symbolic links in one name.
const maxLinks = 40

// resolve returns name with every symbolic link in its folders (not in its last
// part) replaced. The folders need not exist.
func (t *Tree) resolve(name string) (string, error) {
	dir, base := path.Split(name)
	dir = strings.TrimSuffix(dir, "/")
	if dir == "" {
		return base, nil
	}
	real, ok := t.parents[dir]
	if !ok {
		var err error
		if real, err = t.follow(dir); err != nil {
			return "", err
		}
		t.parents[dir] = real
	}
	return path.Join(real, base), nil
}

// follow returns the folder name without links. Parts that do not exist are kept as they are.
func (t *Tree) follow(name string) (string, error) {
	todo := strings.Split(name, "/")
	done := ""
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if done = path.Dir(done); done == "." {
				done = ""
			}
			continue
		}
		next := path.Join(done, part)
		st, err := t.root.Lstat(next)
		if err != nil || st.Mode()&fs.ModeSymlink == 0 {
			done = next // missing parts are made by the caller; real errors meet it again there
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("resolve %q: more than %d symbolic links: %w", name, maxLinks, ErrUnsafe)
		}
		target, err := t.root.Readlink(next)
		if err != nil {
			return "", fmt.Errorf("resolve %q: %w", name, err)
		}
		if strings.HasPrefix(target, "/") {
			done = ""
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return done, nil
}

// forget drops cached folder names after a link or a folder was replaced or removed.
func (t *Tree) forget() { clear(t.parents) }

// Lstat describes name, not following a link in its last part.
func (t *Tree) Lstat(name string) (fs.FileInfo, error) {
	p, err := t.resolve(name)
	if err != nil {
		return nil, err
	}
	return t.root.Lstat(orDot(p))
}

// Exists reports whether name exists, following all links inside the tree.
func (t *Tree) Exists(name string) bool {
	p, err := t.follow(name)
	if err != nil {
		return false
	}
	_, err = t.root.Lstat(orDot(p))
	return err == nil
}

// ReadFile returns the content of a regular file, following links inside the tree.
// A missing file gives fs.ErrNotExist.
func (t *Tree) ReadFile(name string) ([]byte, error) {
	p, err := t.follow(name)
	if err != nil {
		return nil, err
	}
	if st, err := t.root.Lstat(orDot(p)); err != nil {
		return nil, err
	} else if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", name)
	}
	return t.root.ReadFile(p)
}

// WriteFile replaces name with a new regular file, owner and mode as given. It
// makes missing folders. What was there before, a link for instance, is removed, not followed.
func (t *Tree) WriteFile(name string, data []byte, mode fs.FileMode, uid, gid int) error {
	p, err := t.resolve(name)
	if err != nil {
		return err
	}
	if err := t.mkdirs(path.Dir(p)); err != nil {
		return err
	}
	if err := t.root.RemoveAll(p); err != nil {
		return fmt.Errorf("replace %s: %w", name, err)
	}
	t.forget()
	f, err := t.root.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("make %s: %w", name, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = own(f, mode, uid, gid)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Mkdir makes name a folder with this owner and mode, whatever it was before;
// an existing folder keeps its content. A link to a folder is followed.
func (t *Tree) Mkdir(name string, mode fs.FileMode, uid, gid int) error {
	p, err := t.follow(name)
	if err != nil {
		return err
	}
	if st, err := t.root.Lstat(orDot(p)); err == nil && !st.IsDir() {
		if err := t.root.RemoveAll(p); err != nil {
			return fmt.Errorf("replace %s: %w", name, err)
		}
		t.forget()
	}
	if err := t.mkdirs(p); err != nil {
		return err
	}
	f, err := t.root.Open(orDot(p))
	if err != nil {
		return fmt.Errorf("open folder %s: %w", name, err)
	}
	defer func() { _ = f.Close() }()
	if err := own(f, mode, uid, gid); err != nil {
		return fmt.Errorf("own folder %s: %w", name, err)
	}
	return nil
}

// mkdirs makes the resolved folder p and those above it, 0755 and root's.
func (t *Tree) mkdirs(p string) error {
	if p == "." || p == "" || p == "/" {
		return nil
	}
	if err := t.root.MkdirAll(p, 0o755); err != nil {
		return fmt.Errorf("make folder %s: %w", p, err)
	}
	return nil
}

// own sets the owner first: chown clears the set-uid and set-gid bits.
func own(f *os.File, mode fs.FileMode, uid, gid int) error {
	if err := f.Chown(uid, gid); err != nil {
		return err
	}
	return f.Chmod(mode)
}

func orDot(p string) string {
	if p == "" {
		return "."
	}
	return p
}

// reset removes everything in the tree.
func (t *Tree) reset() error {
	f, err := t.root.Open(".")
	if err != nil {
		return fmt.Errorf("open tree: %w", err)
	}
	names, err := f.Readdirnames(-1)
	_ = f.Close()
	if err != nil {
		return fmt.Errorf("list tree: %w", err)
	}
	t.forget()
	for _, n := range names {
		if err := t.root.RemoveAll(n); err != nil {
			return fmt.Errorf("empty tree: %w", err)
		}
	}
	return nil
}
