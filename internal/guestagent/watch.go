package guestagent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	fspb "github.com/agentzip/agentzip/api/gen/filesystem"
)

// watchMask is what inotify(7) is asked for in each watched folder.
const watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_ATTRIB |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW

// eventHeader is the size of struct inotify_event without its name.
const eventHeader = 16

// errEventsLost says that more happened than the kernel's queue holds (16384
// events, fs.inotify.max_queued_events) while nobody took any.
var errEventsLost = errors.New("events were lost: they came faster than they were read")

// watch reports what happens in a folder, and below it if recursive. Not
// fsnotify: that package knows no recursion on Linux, and cannot say which
// files were already in a new folder before it was watched.
//
// Owned by one goroutine; Close may be called from any.
type watch struct {
	file      *os.File // the inotify instance
	root      string   // real path, below which new folders are watched
	reported  string   // what the client calls it
	recursive bool
	describe  bool // events carry the entry
	names     entries

	folders map[int32]string // by watch descriptor: path below root, "" for root
	// announced are entries found in a new folder when it was watched; before, those
	// from before the queue was last empty. The kernel may report their creation
	// too, and then it is not said twice.
	announced, before map[string]bool
}

// newWatch watches path from now on. The account's rights decide whether it may.
func newWatch(a Account, path string, recursive, describe bool) (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	w := &watch{
		file: os.NewFile(uintptr(fd), "inotify"), reported: path, recursive: recursive, describe: describe,
		folders: map[int32]string{}, announced: map[string]bool{}, before: map[string]bool{},
	}
	err = a.perform(path, goalTarget, func(p place) error {
		root, err := filepath.EvalSymlinks(p.path)
		if err != nil {
			return err
		}
		if st, err := os.Stat(root); err != nil {
			return err
		} else if !st.IsDir() {
			return unix.ENOTDIR
		}
		w.root = root
		return w.add("", nil)
	})
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// Close ends the watch; a read in progress returns.
func (w *watch) Close() { _ = w.file.Close() }

// add watches a folder and, if recursive, what is below it. found is called
// with each entry that is already in it, nil for none. A folder that went away
// meanwhile is no error, except the root.
func (w *watch) add(below string, found func(below string, dir bool)) error {
	path := filepath.Join(w.root, below)
	var wd int
	err := control(w.file, func(fd int) error {
		var err error
		wd, err = unix.InotifyAddWatch(fd, path, watchMask)
		return err
	})
	if below != "" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EACCES)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch %s: %w", filepath.Join(w.reported, below), err)
	}
	w.folders[int32(wd)] = below
	if !w.recursive && found == nil {
		return nil
	}
	children, err := os.ReadDir(path)
	if err != nil {
		return nil //nolint:nilerr // it went away, or holds nothing we may see
	}
	for _, c := range children {
		child := filepath.Join(below, c.Name())
		if found != nil {
			found(child, c.IsDir())
		}
		if c.IsDir() && w.recursive {
			if err := w.add(child, found); err != nil {
				return err
			}
		}
	}
	return nil
}

// forget ends the watches of a folder that was moved away and of what is below it.
func (w *watch) forget(below string) {
	for wd, folder := range w.folders {
		if folder != below && !strings.HasPrefix(folder, below+"/") {
			continue
		}
		delete(w.folders, wd)
		_ = control(w.file, func(fd int) error {
			_, err := unix.InotifyRmWatch(fd, uint32(wd))
			return err
		})
	}
}

// run calls emit with every event until emit fails, the watch is closed
// (os.ErrClosed) or events were lost (errEventsLost).
func (w *watch) run(emit func(*fspb.FilesystemEvent) error) error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			return err
		}
		for rest := buf[:n]; len(rest) >= eventHeader; {
			length := int(binary.NativeEndian.Uint32(rest[12:]))
			if len(rest) < eventHeader+length {
				return errors.New("inotify: a cut event")
			}
			wd, mask := int32(binary.NativeEndian.Uint32(rest)), binary.NativeEndian.Uint32(rest[4:])
			name, _, _ := bytes.Cut(rest[eventHeader:eventHeader+length], []byte{0})
			rest = rest[eventHeader+length:]
			if err := w.handle(wd, mask, string(name), emit); err != nil {
				return err
			}
		}
		// What the kernel has to say of an entry we announced was in its queue by
		// then: with this read, if it took all there was, it has been said of those
		// announced before it.
		if n < len(buf)-eventHeader-unix.NAME_MAX {
			clear(w.before)
			w.before, w.announced = w.announced, w.before
		}
	}
}

// handle turns one event of the kernel into those of E2B.
func (w *watch) handle(wd int32, mask uint32, name string, emit func(*fspb.FilesystemEvent) error) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return errEventsLost
	}
	folder, known := w.folders[wd]
	if !known {
		return nil // what was queued when its watch ended
	}
	if mask&unix.IN_IGNORED != 0 {
		delete(w.folders, wd)
		return nil
	}
	if name == "" {
		if folder != "" {
			return nil // the folder above reports it
		}
		switch {
		case mask&unix.IN_DELETE_SELF != 0:
			return w.send(emit, ".", fspb.EventType_EVENT_TYPE_REMOVE)
		case mask&unix.IN_MOVE_SELF != 0:
			return w.send(emit, ".", fspb.EventType_EVENT_TYPE_RENAME)
		}
		return nil
	}
	below := filepath.Join(folder, name)
	dir := mask&unix.IN_ISDIR != 0
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		if w.announced[below] || w.before[below] {
			w.unannounce(below)
			return nil
		}
		enter := dir && w.recursive
		if enter && mask&unix.IN_MOVED_TO != 0 {
			// What it holds is not reported, so it is watched first: else what a
			// client writes into it as soon as it hears of it would be lost.
			if err := w.add(below, nil); err != nil {
				return err
			}
			enter = false
		}
		if err := w.send(emit, below, fspb.EventType_EVENT_TYPE_CREATE); err != nil || !enter {
			return err
		}
		return w.enter(below, emit)
	case mask&unix.IN_MODIFY != 0:
		return w.send(emit, below, fspb.EventType_EVENT_TYPE_WRITE)
	case mask&unix.IN_DELETE != 0:
		w.unannounce(below)
		return w.send(emit, below, fspb.EventType_EVENT_TYPE_REMOVE)
	case mask&unix.IN_MOVED_FROM != 0:
		if dir {
			w.forget(below)
		}
		return w.send(emit, below, fspb.EventType_EVENT_TYPE_RENAME)
	case mask&unix.IN_ATTRIB != 0:
		return w.send(emit, below, fspb.EventType_EVENT_TYPE_CHMOD)
	}
	return nil
}

func (w *watch) unannounce(below string) {
	delete(w.announced, below)
	delete(w.before, below)
}

// enter watches a folder that was just made: what is already in it was made after it,
// and nobody else would report it.
func (w *watch) enter(below string, emit func(*fspb.FilesystemEvent) error) error {
	var failed error
	err := w.add(below, func(child string, _ bool) {
		if failed != nil || w.announced[child] {
			return
		}
		w.announced[child] = true
		failed = w.send(emit, child, fspb.EventType_EVENT_TYPE_CREATE)
	})
	return errors.Join(failed, err)
}

func (w *watch) send(emit func(*fspb.FilesystemEvent) error, below string, kind fspb.EventType) error {
	event := &fspb.FilesystemEvent{Name: strings.ToValidUTF8(below, "\uFFFD"), Type: kind}
	if w.describe && kind != fspb.EventType_EVENT_TYPE_REMOVE && kind != fspb.EventType_EVENT_TYPE_RENAME {
		// Gone again: the event says less.
		event.Entry, _ = w.names.describe(filepath.Join(w.root, below), filepath.Join(w.reported, below))
	}
	return emit(event)
}

// networkFileSystems are those where other hosts change files without the
// kernel of this one noticing (linux/magic.h).
var networkFileSystems = map[int64]bool{
	unix.NFS_SUPER_MAGIC: true, unix.SMB_SUPER_MAGIC: true, unix.CIFS_SUPER_MAGIC: true, unix.SMB2_SUPER_MAGIC: true,
	unix.AFS_FS_MAGIC: true, unix.CODA_SUPER_MAGIC: true, unix.V9FS_MAGIC: true, unix.CEPH_SUPER_MAGIC: true, unix.FUSE_SUPER_MAGIC: true,
}

// onNetwork says whether the file system of path is one of them.
func onNetwork(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && networkFileSystems[st.Type]
}
