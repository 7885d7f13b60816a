// Package kernel provides the guest's kernel and its initial ramdisk.
//
// The kernel is Debian's cloud kernel, unpacked from its package, never installed on
// the host. What is kept in the cache is the kernel image and the few modules a
// guest needs; the ramdisk is written anew for each template, because it carries the
// guest agent as /init.
//
//	cache/kernel/<package>_<version>/kernel.json   written last: without it the folder does not exist
//	                                vmlinuz
//	                                <module>.ko
//
// Functions keep no state between calls; two processes that fetch the same kernel at
// once both succeed (rename decides).
package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentzip/agentzip/internal/template/step"
	"github.com/agentzip/agentzip/internal/template/tool"
)

// MetaPackage is the Debian package that depends on the current cloud kernel.
const MetaPackage = "linux-image-cloud-amd64"

// cacheFormat changes when what is kept of a kernel changes.
const cacheFormat = 1

// ErrDamaged says that a cached kernel differs from what was downloaded. Fetch heals it.
var ErrDamaged = errors.New("cached kernel is damaged")

// Kernel is one kernel in the cache.
type Kernel struct {
	Format  int      `json:"format"`
	Package string   `json:"package"` // "linux-image-6.1.0-57-cloud-amd64"
	Version string   `json:"version"` // Debian's version of the package
	Release string   `json:"release"` // what uname -r says in the guest
	Wanted  []string `json:"wanted"`  // the modules it was asked for, by kernel name
	Modules []string `json:"modules"` // file names in load order, dependencies included
	// Sums maps each file to its SHA-256, in hex.
	Sums map[string]string `json:"sums"`

	dir string
}

// Image returns the path of the kernel image.
func (k *Kernel) Image() string { return filepath.Join(k.dir, "vmlinuz") }

// ID names package and version.
func (k *Kernel) ID() string { return k.Package + "_" + k.Version }

// Fetch returns the kernel the host's package lists name as current, from the folder
// cache or, the first time, from the mirror. Without a usable package
// list the newest kernel of the cache will do. scratch is a folder for temporary
// files on the file system of cache, which the caller removes.
func Fetch(ctx context.Context, cache, scratch string, report step.Func) (*Kernel, error) {
	const name = "kernel"
	pkg, version, err := current(ctx)
	if err != nil && ctx.Err() == nil {
		if k, cerr := newest(ctx, cache); cerr == nil {
			report.Done(name, "%s, cached (package lists are unusable: %v)", k.ID(), err)
			return k, nil
		}
		report.Say(name, "reading package lists")
		if uerr := tool.Run(ctx, tool.Command{Name: "apt-get", Args: []string{"update", "-q"}}); uerr != nil {
			return nil, fmt.Errorf("find the kernel package: the package mirror does not answer (check the network and /etc/apt/sources.list*): %w", uerr)
		}
		pkg, version, err = current(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("find the kernel package: %w", err)
	}
	dir := filepath.Join(cache, strings.ReplaceAll(pkg+"_"+version, ":", "."))
	k, err := load(ctx, dir)
	if err == nil {
		report.Done(name, "%s, cached", k.ID())
		return k, nil
	}
	if errors.Is(err, ErrDamaged) {
		report.Say(name, "%v, fetching it again", err)
	}
	k, err = fetch(ctx, pkg, version, dir, scratch, report)
	if err != nil {
		return nil, fmt.Errorf("fetch kernel %s: %w", pkg, err)
	}
	report.Done(name, "%s", k.ID())
	return k, nil
}

// current asks apt which kernel package, in which version, the meta package stands for. One
// question, because each costs a second where apt keeps no cache (containers).
func current(ctx context.Context) (pkg, version string, err error) {
	out, err := tool.Output(ctx, tool.Command{Name: "apt-cache", Args: []string{"show", "--no-all-versions", MetaPackage}})
	if err != nil {
		return "", "", err
	}
	if pkg, version = dependency(out); pkg == "" {
		return "", "", fmt.Errorf("apt does not say what %s stands for: run `apt-get update`, and check that /etc/apt/sources.list* names Debian's main archive", MetaPackage)
	}
	return pkg, version, nil
}

// dependency finds the kernel among the dependencies of the meta package:
// "Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)".
func dependency(record string) (pkg, version string) {
	for l := range strings.SplitSeq(record, "\n") {
		list, ok := strings.CutPrefix(l, "Depends: ")
		if !ok {
			continue
		}
		for d := range strings.SplitSeq(list, ",") {
			name, rest, _ := strings.Cut(strings.TrimSpace(d), " ")
			v, exact := strings.CutPrefix(rest, "(= ")
			if strings.HasPrefix(name, "linux-image-") && exact {
				return name, strings.TrimSuffix(v, ")")
			}
		}
	}
	return "", ""
}

// newest returns the last intact kernel of the cache by file time.
func newest(ctx context.Context, cache string) (*Kernel, error) {
	dirs, err := filepath.Glob(filepath.Join(cache, "*", "kernel.json"))
	if err != nil {
		return nil, err
	}
	slices.SortFunc(dirs, func(a, b string) int { return modTime(b) - modTime(a) })
	for _, d := range dirs {
		if k, err := load(ctx, filepath.Dir(d)); err == nil {
			return k, nil
		}
	}
	return nil, os.ErrNotExist
}

func modTime(path string) int {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return int(st.ModTime().Unix())
}

// load reads a kernel of the cache and checks all its files.
func load(ctx context.Context, dir string) (*Kernel, error) {
	data, err := os.ReadFile(filepath.Join(dir, "kernel.json"))
	if err != nil {
		return nil, err
	}
	k := &Kernel{dir: dir}
	if err := json.Unmarshal(data, k); err != nil || k.Format != cacheFormat {
		return nil, fmt.Errorf("%s: unreadable description: %w", dir, ErrDamaged)
	}
	if !slices.Equal(k.Wanted, wanted) {
		return nil, fmt.Errorf("%s: has the modules of another AgentZip: %w", dir, ErrDamaged)
	}
	for file, want := range k.Sums {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if got, err := sum(filepath.Join(dir, file)); err != nil || got != want {
			return nil, fmt.Errorf("%s: %s has changed: %w", dir, file, ErrDamaged)
		}
	}
	return k, nil
}

func fetch(ctx context.Context, pkg, version, dir, scratch string, report step.Func) (*Kernel, error) {
	work := filepath.Join(scratch, "kernel")
	if err := os.RemoveAll(work); err != nil {
		return nil, err
	}
	down, unpacked, out := filepath.Join(work, "down"), filepath.Join(work, "unpacked"), filepath.Join(work, "out")
	for _, d := range []string{down, unpacked, out} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("make folder: %w", err)
		}
	}
	pulse := report.Heartbeat(ctx, "kernel", "downloading "+pkg)
	defer pulse.Stop()
	if err := download(ctx, pkg+"="+version, down); err != nil {
		return nil, err
	}
	debs, err := filepath.Glob(filepath.Join(down, "*.deb"))
	if err != nil || len(debs) != 1 {
		return nil, fmt.Errorf("apt-get download left %d packages, want 1", len(debs))
	}
	if err := tool.Run(ctx, tool.Command{Name: "dpkg-deb", Args: []string{"-x", debs[0], unpacked}}); err != nil {
		return nil, fmt.Errorf("unpack package: %w", err)
	}
	k := &Kernel{Format: cacheFormat, Package: pkg, Version: version, Wanted: wanted, Sums: map[string]string{}}
	if err := k.collect(unpacked, out); err != nil {
		return nil, err
	}
	data, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(out, "kernel.json"), append(data, '\n'), 0o600); err != nil {
		return nil, fmt.Errorf("write description: %w", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	if err := os.Rename(out, dir); err != nil {
		return nil, fmt.Errorf("cache kernel: %w", err)
	}
	return load(ctx, dir)
}

// download fetches one package. Old package lists name versions the mirror has dropped: then
// the lists are renewed once.
func download(ctx context.Context, pkg, dir string) error {
	get := tool.Command{Name: "apt-get", Dir: dir, Args: []string{
		// apt's own unprivileged user cannot write into our private folder.
		"-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3", "download", pkg,
	}}
	err := tool.Run(ctx, get)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if uerr := tool.Run(ctx, tool.Command{Name: "apt-get", Args: []string{"update", "-q"}}); uerr != nil {
		return fmt.Errorf("the package mirror does not answer (check the network and /etc/apt/sources.list*): %w", err)
	}
	if err := tool.Run(ctx, get); err != nil {
		return fmt.Errorf("download (a newer kernel may be out; run the command again): %w", err)
	}
	return nil
}

// collect copies the kernel image and the wanted modules out of an unpacked package.
func (k *Kernel) collect(unpacked, out string) error {
	releases, err := filepath.Glob(filepath.Join(unpacked, "lib/modules/*"))
	if err != nil || len(releases) != 1 {
		return fmt.Errorf("package holds %d kernels, want 1", len(releases))
	}
	k.Release = filepath.Base(releases[0])
	if err := k.keep(filepath.Join(unpacked, "boot/vmlinuz-"+k.Release), out, "vmlinuz"); err != nil {
		return err
	}
	order, err := loadOrder(releases[0], wanted)
	if err != nil {
		return fmt.Errorf("order modules: %w", err)
	}
	for _, path := range order {
		name := filepath.Base(path)
		if err := k.keep(path, out, name); err != nil {
			return err
		}
		k.Modules = append(k.Modules, name)
	}
	return nil
}

func (k *Kernel) keep(from, dir, name string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	s := sha256.Sum256(data)
	k.Sums[name] = hex.EncodeToString(s[:])
	return nil
}

func sum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
