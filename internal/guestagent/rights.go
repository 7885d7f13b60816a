package guestagent

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Whose rights a request about files has.
//
// The agent is root, and who asks is the owner of the sandbox, who may name any
// user of the guest, root too. What has to be kept out is a process in the guest
// that places a link where the owner's next request will go: a root that follows
// it would write to a file the process could not.
//
// So a request acts with the rights of the user it names: the thread takes the
// user's ids for file access (setfsuid(2), as the kernel's NFS server does), and
// whatever the kernel allows that user happens, owners included. Where that is
// refused, the request is tried again as root, because E2B's clients write to
// places like /app as "user"; but then only links of root are followed, in any
// part of the path, and what is made is given to the user. A hard link cannot
// take a link's place: boot sets fs.protected_hardlinks.

// as runs f on one thread, with the account's rights to files and its ownership
// of new ones. f must not start goroutines that count on them.
func (a Account) as(f func() error) (err error) {
	if a.Own || a.UID == 0 {
		return f()
	}
	runtime.LockOSThread()
	defer func() {
		if restoreErr := restoreRights(); restoreErr != nil {
			// The thread stays locked and ends with this goroutine.
			err = errors.Join(err, fmt.Errorf("restore rights: %w", restoreErr))
			return
		}
		runtime.UnlockOSThread()
	}()
	if err := setThreadGroups(a.Groups); err != nil {
		return fmt.Errorf("take groups of %s: %w", a.Name, err)
	}
	if err := setRights(int(a.UID), int(a.GID)); err != nil {
		return err
	}
	return f()
}

// ownGroups are the agent's supplementary groups.
var ownGroups = sync.OnceValue(func() []uint32 {
	groups, err := unix.Getgroups()
	if err != nil {
		return nil
	}
	own := make([]uint32, len(groups))
	for i, g := range groups {
		own[i] = uint32(g)
	}
	return own
})

func restoreRights() error {
	return errors.Join(setRights(0, 0), setThreadGroups(ownGroups()))
}

// setRights sets the ids this thread accesses files with. The calls report no
// errors (setfsuid(2)), so a second, invalid one reads what is in force.
func setRights(uid, gid int) error {
	if _, err := unix.SetfsgidRetGid(gid); err != nil {
		return fmt.Errorf("take group %d: %w", gid, err)
	}
	if _, err := unix.SetfsuidRetUid(uid); err != nil {
		return fmt.Errorf("take user %d: %w", uid, err)
	}
	nowGID, _ := unix.SetfsgidRetGid(-1)
	nowUID, _ := unix.SetfsuidRetUid(-1)
	if nowUID != uid || nowGID != gid {
		return fmt.Errorf("take user %d, group %d: the kernel refused", uid, gid)
	}
	return nil
}

// A place is where an operation on a path acts.
type place struct {
	path string // for system calls
	// asRoot: the user's own rights were not enough. path's last part must not be
	// followed if it is a link, and what is made has to be given to the user.
	asRoot bool
}

// A goal says what an operation does with the last part of a path.
type goal int

const (
	goalTarget goal = iota // it is followed if it is a link
	goalEntry              // it is the entry itself, or is made
	goalMake               // as goalEntry; missing folders above it are made
	goalWrite              // as goalTarget; missing folders above it are made
)

func (g goal) follows() bool { return g == goalTarget || g == goalWrite }
func (g goal) makes() bool   { return g == goalMake || g == goalWrite }

// perform runs op at path with the account's rights, and again as root where
// those are not enough. op may have done a part of its work the first time.
func (a Account) perform(path string, g goal, op func(place) error) error {
	err := a.as(func() error {
		if g.makes() {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
		}
		return op(place{path: path})
	})
	if a.Own || a.UID == 0 || !isRefusal(err) {
		return err
	}
	dir, base, rootErr := a.openTrusted(path, g)
	if rootErr != nil {
		if isRefusal(rootErr) {
			return err
		}
		return rootErr
	}
	defer dir.Close()
	return op(place{path: descriptorPath(dir, base), asRoot: true})
}

func isRefusal(err error) bool { return errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) }

// descriptorPath names an entry of an open folder, whatever happens to the folder's own path.
func descriptorPath(dir *os.File, base string) string {
	var fd int
	_ = control(dir, func(n int) error { fd = n; return nil })
	return fmt.Sprintf("/proc/self/fd/%d/%s", fd, base)
}

// maxLinks is the kernel's limit on links in one path (MAXSYMLINKS).
const maxLinks = 40

// openTrusted opens the folder of path's last part as root, following only
// links that belong to root. It returns the name to use in that folder, "." for
// the folder itself.
func (a Account) openTrusted(path string, g goal) (*os.File, string, error) {
	w := &walk{account: a, goal: g, rest: splitPath(path)}
	if err := w.restart(); err != nil {
		return nil, "", err
	}
	for len(w.rest) > 0 {
		done, err := w.step()
		if err != nil {
			w.dir.Close()
			return nil, "", &os.PathError{Op: "open", Path: path, Err: err}
		}
		if done {
			return w.dir, w.rest[0], nil
		}
	}
	return w.dir, ".", nil
}

func splitPath(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" || s == "." })
}

// walk is one run of openTrusted.
type walk struct {
	account Account
	goal    goal
	dir     *os.File // an O_PATH descriptor
	rest    []string // parts to go
	links   int
}

// restart goes to the root folder.
func (w *walk) restart() error {
	root, err := openPart(unix.AT_FDCWD, "/")
	if err != nil {
		return err
	}
	w.enter(root)
	return nil
}

func (w *walk) enter(dir *os.File) {
	if w.dir != nil {
		w.dir.Close()
	}
	w.dir = dir
}

func openPart(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// step takes the next part. done says that it is the last one, stays in rest
// and is to be used as it is.
func (w *walk) step() (done bool, err error) {
	name, last := w.rest[0], len(w.rest) == 1
	if last && !w.goal.follows() && name != ".." {
		return true, nil
	}
	var next *os.File
	err = control(w.dir, func(at int) error {
		var err error
		next, err = openPart(at, name)
		if errors.Is(err, unix.ENOENT) && !last && w.goal.makes() {
			next, err = w.account.makeAt(at, name)
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) && last {
		return true, nil // whoever asked says so, or makes it
	}
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	var target string
	err = control(next, func(fd int) error {
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return err
		}
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		target = string(buf[:max(n, 0)])
		return err
	})
	switch kind := st.Mode & unix.S_IFMT; {
	case err != nil:
		next.Close()
		return false, err
	case kind == unix.S_IFLNK:
		next.Close()
		return false, w.follow(st.Uid, target)
	case last && kind != unix.S_IFDIR:
		next.Close()
		return true, nil
	case kind != unix.S_IFDIR:
		next.Close()
		return false, unix.ENOTDIR
	}
	w.enter(next)
	w.rest = w.rest[1:]
	return false, nil
}

// follow replaces the part in hand by the target of the link that it is.
func (w *walk) follow(owner uint32, target string) error {
	if owner != 0 {
		return unix.EACCES // anybody may have placed it
	}
	if w.links++; w.links > maxLinks {
		return unix.ELOOP
	}
	w.rest = append(splitPath(target), w.rest[1:]...)
	if strings.HasPrefix(target, "/") {
		return w.restart()
	}
	return nil
}

// makeAt makes a folder that belongs to the account.
func (a Account) makeAt(at int, name string) (*os.File, error) {
	if err := unix.Mkdirat(at, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	} else if err == nil {
		if err := unix.Fchownat(at, name, int(a.UID), int(a.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, err
		}
	}
	return openPart(at, name)
}

// give makes the entry at p the account's if root made it.
func (a Account) give(p place) error {
	if !p.asRoot {
		return nil
	}
	return os.Lchown(p.path, int(a.UID), int(a.GID))
}

// resolve makes a path of a request absolute: "~" and relative paths start at
// the account's home; workdir stands for a path that is empty ("": the home).
func (a Account) resolve(path, workdir string) (string, error) {
	if path == "" {
		path = workdir
	}
	switch {
	case strings.ContainsRune(path, 0):
		return "", errors.New("a path must not contain NUL")
	case len(path) > math.MaxUint16:
		return "", errors.New("the path is too long")
	case path == "~" || path == "":
		path = a.Home
	case strings.HasPrefix(path, "~/"):
		path = filepath.Join(a.Home, path[2:])
	case path[0] == '~':
		return "", fmt.Errorf("cannot expand '%s': only the user's own home is known", path)
	case !filepath.IsAbs(path):
		path = filepath.Join(a.Home, path)
	}
	return filepath.Clean(path), nil
}
