package template

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// smallFile is the size up to which a file is always hashed, whatever is remembered of it.
const smallFile = 1 << 20

// Load verifies a template and returns it, locked against removal. Errors wrap
// ErrBadName, ErrNotFound, ErrInUse, ErrFormat, ErrDamaged or ErrOtherHost.
//
// All files are hashed the first time (about a second); later only their size, times and inode
// are compared with those of the verified files, and small files hashed again.
func (s *Store) Load(ctx context.Context, name string) (*Template, error) {
	if err := s.exists(name); err != nil {
		return nil, err
	}
	lock, err := s.lockFolder(name, unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	m, err := s.verify(ctx, name)
	if err != nil {
		_ = lock.Close()
		return nil, err
	}
	return &Template{Manifest: *m, dir: s.folder(name), lock: lock}, nil
}

// verify checks the template in its folder, which the caller has locked.
func (s *Store) verify(ctx context.Context, name string) (*Manifest, error) {
	dir := s.folder(name)
	m, err := readManifest(dir, name)
	if err != nil {
		return nil, err
	}
	if err := checkFiles(dir, m); err != nil {
		return nil, err
	}
	if err := s.checkContent(ctx, dir, m); err != nil {
		return nil, err
	}
	here, err := s.host(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.fits(here); err != nil {
		return nil, err
	}
	return m, nil
}

// checkFiles compares the list of files and their sizes with the manifest.
func checkFiles(dir string, m *Manifest) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read template %s: %w", m.Name, err)
	}
	for _, e := range entries {
		if _, ok := m.Files[e.Name()]; !ok && e.Name() != manifestFile && e.Name() != sumFile {
			return damaged(m.Name, e.Name(), "does not belong to it")
		}
	}
	for file, want := range m.Files {
		st, err := os.Lstat(filepath.Join(dir, file))
		if err != nil {
			return unreadable(m.Name, file, err)
		}
		if !st.Mode().IsRegular() {
			return damaged(m.Name, file, "is not a regular file")
		}
		if st.Size() != want.Size {
			return damaged(m.Name, file, fmt.Sprintf("has %d bytes instead of %d", st.Size(), want.Size))
		}
	}
	return nil
}

// A seen file was verified when it had these properties. The change time cannot be set
// back by a program, so a file that was written since shows.
type seen struct {
	Dev, Ino     uint64
	Size         int64
	Mtime, Ctime int64 // ns
}

// A verifiedSet is what cache/verified/NAME.json holds.
type verifiedSet struct {
	Input   string // of the manifest: a rebuilt template starts over
	Created int64  // ns
	Files   map[string]seen
}

func (s *Store) verifiedPath(name string) string {
	return filepath.Join(s.cache("verified"), name+".json")
}

func (s *Store) checkContent(ctx context.Context, dir string, m *Manifest) error {
	old := s.readVerified(m)
	now := map[string]seen{}
	var todo []string
	for file := range m.Files {
		is, err := look(filepath.Join(dir, file))
		if err != nil {
			return unreadable(m.Name, file, err)
		}
		now[file] = is
		if old[file] != is || is.Size <= smallFile {
			todo = append(todo, file)
		}
	}
	slices.Sort(todo)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(2)
	for _, file := range todo {
		g.Go(func() error {
			got, err := digestFile(gctx, filepath.Join(dir, file))
			if gctx.Err() != nil {
				return gctx.Err()
			}
			if err != nil {
				return unreadable(m.Name, file, err)
			}
			if got != m.Files[file] {
				return damaged(m.Name, file, "has changed since the build")
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return fmt.Errorf("verify template %s: %w", m.Name, err)
		}
		return err
	}
	s.writeVerified(m, now)
	return nil
}

func look(path string) (seen, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return seen{}, err
	}
	return seen{Dev: st.Dev, Ino: st.Ino, Size: st.Size, Mtime: st.Mtim.Nano(), Ctime: st.Ctim.Nano()}, nil
}

// readVerified returns what is remembered of a template, nothing when in doubt.
func (s *Store) readVerified(m *Manifest) map[string]seen {
	data, err := os.ReadFile(s.verifiedPath(m.Name))
	if err != nil {
		return nil
	}
	var v verifiedSet
	if json.Unmarshal(data, &v) != nil || v.Input != m.Input || v.Created != m.Created.UnixNano() {
		return nil
	}
	return v.Files
}

// writeVerified remembers; when that fails (a read-only store, a full disk) the next Load hashes again.
func (s *Store) writeVerified(m *Manifest, files map[string]seen) {
	data, err := json.Marshal(verifiedSet{Input: m.Input, Created: m.Created.UnixNano(), Files: files})
	if err != nil {
		return
	}
	tmp, err := os.CreateTemp(s.cache("verified"), ".tmp-*")
	if err != nil {
		return
	}
	_, werr := tmp.Write(data)
	if cerr := tmp.Close(); werr != nil || cerr != nil || os.Rename(tmp.Name(), s.verifiedPath(m.Name)) != nil {
		_ = os.Remove(tmp.Name())
	}
}
