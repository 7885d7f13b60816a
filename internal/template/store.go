package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/vmm"
)

// DefaultDir is where templates live unless AGENTZIP_STATE_DIR says otherwise.
const DefaultDir = vmm.DefaultStateDir

// Store is the folder of templates and caches. Safe for concurrent use; several
// processes may have it open.
type Store struct {
	dir string // immutable

	// probe asks for facts of this host; a field so that tests can be another host.
	probe func(context.Context) (HostFacts, error) // immutable after Open

	mu    sync.Mutex
	facts *HostFacts // guarded by mu; what probe said. QEMU is not replaced under a running process
}

// Open opens the store in dir ("" means $AGENTZIP_STATE_DIR or DefaultDir) and
// makes its folders.
func Open(dir string) (*Store, error) {
	if dir == "" {
		dir = os.Getenv("AGENTZIP_STATE_DIR")
	}
	if dir == "" {
		dir = DefaultDir
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open template store: %w", err)
	}
	s := &Store{dir: dir, probe: probeHost}
	for _, d := range []string{s.templates(), s.cache("base"), s.cache("kernel"), s.cache("verified"), filepath.Join(dir, "locks")} {
		if err := os.MkdirAll(d, 0o755); err != nil { //nolint:gosec // G301: nothing secret, and `template list` works for everyone
			return nil, fmt.Errorf("open template store: %w", err)
		}
	}
	return s, nil
}

// Dir returns the state directory.
func (s *Store) Dir() string { return s.dir }

func (s *Store) templates() string         { return filepath.Join(s.dir, "templates") }
func (s *Store) folder(name string) string { return filepath.Join(s.templates(), name) }
func (s *Store) cache(kind string) string  { return filepath.Join(s.dir, "cache", kind) }
func (s *Store) lockOf(name string) string { return filepath.Join(s.dir, "locks", "build-"+name) }

func (s *Store) host(ctx context.Context) (HostFacts, error) {
	s.mu.Lock()
	known := s.facts
	s.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	f, err := s.probe(ctx)
	if err != nil {
		return HostFacts{}, err
	}
	s.mu.Lock()
	s.facts = &f
	s.mu.Unlock()
	return f, nil
}

// Summary is one line of a list.
type Summary struct {
	Name string
	// Manifest is nil when Err is not.
	Manifest *Manifest
	// Disk is what the folder occupies, holes not counted, in bytes.
	Disk int64
	// Err says why the template cannot be used; its files were not hashed for this.
	Err error
}

// List returns all templates, sorted by name, damaged ones included.
func (s *Store) List() ([]Summary, error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	list := make([]Summary, 0, len(names))
	for _, n := range names {
		sum := Summary{Name: n, Disk: diskUsage(s.folder(n))}
		sum.Manifest, sum.Err = readManifest(s.folder(n), n)
		if sum.Err == nil {
			sum.Err = checkFiles(s.folder(n), sum.Manifest)
		}
		if sum.Err != nil {
			sum.Manifest = nil
		}
		list = append(list, sum)
	}
	return list, nil
}

// Inspect returns the manifest of a template without hashing its files.
func (s *Store) Inspect(name string) (*Manifest, error) {
	if err := s.exists(name); err != nil {
		return nil, err
	}
	return readManifest(s.folder(name), name)
}

func (s *Store) names() ([]string, error) {
	entries, err := os.ReadDir(s.templates())
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && namePattern.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// exists checks the name and that it is there; the error lists what is.
func (s *Store) exists(name string) error {
	if err := ValidName(name); err != nil {
		return err
	}
	if st, err := os.Stat(s.folder(name)); err == nil && st.IsDir() {
		return nil
	}
	return s.notFound(name)
}

func (s *Store) notFound(name string) error {
	names, err := s.names()
	if err != nil {
		return err
	}
	there := "there are none yet (run `agentzip setup`)"
	if len(names) > 0 {
		there = "there are " + strings.Join(names, ", ")
	}
	if slices.Contains(BuiltinNames(), name) {
		there += "; build it with `agentzip template build " + name + "`"
	}
	return fmt.Errorf("template %q: %w: %s", name, ErrNotFound, there)
}

// lockFolder opens a template's folder and locks it, shared or exclusively, without waiting.
func (s *Store) lockFolder(name string, how int) (*os.File, error) {
	for {
		f, err := os.Open(s.folder(name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, s.notFound(name)
		}
		if err != nil {
			return nil, fmt.Errorf("open template %s: %w", name, err)
		}
		if err := flock(f, how); err != nil {
			_ = f.Close()
			if errors.Is(err, errLocked) {
				return nil, fmt.Errorf("template %s: sandboxes run from it, or it is being replaced; stop them and try again: %w", name, ErrInUse)
			}
			return nil, err
		}
		// Between open and lock the folder may have been replaced: then this is the lock of the old one.
		var byName, byFile unix.Stat_t
		if unix.Stat(s.folder(name), &byName) == nil && unix.Fstat(int(f.Fd()), &byFile) == nil && byName.Ino == byFile.Ino {
			return f, nil
		}
		_ = f.Close()
	}
}

// Remove deletes a template. It refuses while one is loaded anywhere or being built.
func (s *Store) Remove(name string) error {
	if err := s.exists(name); err != nil {
		return err
	}
	build, err := tryLockFile(s.lockOf(name))
	if errors.Is(err, errLocked) {
		return fmt.Errorf("template %s is being built: %w", name, ErrInUse)
	}
	if err != nil {
		return err
	}
	defer func() { _ = build.Close() }()
	return s.removeLocked(name)
}

// removeLocked deletes a template whose build lock the caller holds.
func (s *Store) removeLocked(name string) error {
	folder, err := s.lockFolder(name, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }()
	// Out of sight in one step: nobody sees a folder that is half gone.
	trash, err := os.MkdirTemp(s.templates(), tempPrefix(name))
	if err != nil {
		return fmt.Errorf("remove template %s: %w", name, err)
	}
	if err := os.Rename(s.folder(name), filepath.Join(trash, "old")); err != nil {
		return fmt.Errorf("remove template %s: %w", name, err)
	}
	_ = os.Remove(s.verifiedPath(name))
	if err := os.RemoveAll(trash); err != nil {
		return fmt.Errorf("remove template %s: %w", name, err)
	}
	return nil
}

// diskUsage adds up the blocks of a folder's files.
func diskUsage(dir string) int64 {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	var n int64
	for _, e := range entries {
		var st unix.Stat_t
		if unix.Lstat(filepath.Join(dir, e.Name()), &st) == nil {
			n += st.Blocks * 512
		}
	}
	return n
}

// tempPrefix starts the names of folders being built or removed. "~" is in no template's name, so
// those of "a" and "a-b" are told apart.
func tempPrefix(name string) string { return ".tmp-" + name + "~" }

// nameOfTemp returns the template name in a temporary folder's name.
func nameOfTemp(folder string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(folder, ".tmp-"), "~")
	return name
}
