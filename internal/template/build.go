package template

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/template/kernel"
	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// Launcher starts machines; *vmm.Host is the real one.
type Launcher interface {
	Start(ctx context.Context, s vmm.Spec) (vmm.Machine, error)
}

// BuildSpec says what to build.
type BuildSpec struct {
	Name   string
	Source Source
	// Hardware of the guest; zero values mean 512 MiB, 1 vCPU, TCG.
	Hardware vmm.Hardware
	// Disk is the size of the writable disk, sparse; 0 means 4 GiB.
	Disk units.Bytes
	// WarmUp are shell commands, run in order as the user "user" before the snapshot, so that every
	// clone starts with their files and interpreters in memory. One that
	// ends with another code than 0 fails the build.
	WarmUp []string
	// Start is a shell command that is left running in the template, as the user "user", after the
	// warm-up: a server that every clone has at once. "" for none.
	Start string
	// Ready is a shell command that ends with code 0 once Start may be snapshotted.
	// It is tried until it does. "" means that Start needs no time.
	Ready string
	// WorkDir is where warm-up commands start; "" means the user's home.
	WorkDir string
	// Agent is the path of the guest agent's binary.
	Agent string
	// Launcher boots the template once.
	Launcher Launcher
	// DeadPages says what becomes of pages the guest frees; "" means DefaultDeadPages.
	DeadPages DeadPages
	// Force builds even when an equal template is there.
	Force bool
}

const (
	defaultMemory = 512 * units.MiB
	// minMemory: kernel, ramdisk and agent occupy 54 MiB after boot and more during it;
	// 64 MiB never booted.
	minMemory   = 128 * units.MiB
	defaultDisk = 4 * units.GiB
)

// buildRecipe changes when the same inputs would give another template.
const buildRecipe = 2

// fill sets the defaults and checks the rest.
func (b *BuildSpec) fill() error {
	if err := ValidName(b.Name); err != nil {
		return err
	}
	if err := b.Source.check(); err != nil {
		return fmt.Errorf("build template %s: %w", b.Name, err)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("build template %s: must run as root, to keep the owners of files and to start the VMM", b.Name)
	}
	if b.Launcher == nil {
		return fmt.Errorf("build template %s: no launcher given", b.Name)
	}
	h := &b.Hardware
	h.Memory = cmp.Or(h.Memory, defaultMemory)
	if h.Memory < minMemory {
		return fmt.Errorf("build template %s: %v of guest memory are too little to boot: use %v or more", b.Name, h.Memory, minMemory)
	}
	h.VCPUs = cmp.Or(h.VCPUs, 1)
	h.Accel = cmp.Or(h.Accel, vmm.TCG)
	if h.CPU == "" {
		h.CPU = "max"
		if h.Accel == vmm.KVM {
			h.CPU = "host"
		}
	}
	b.DeadPages = cmp.Or(b.DeadPages, DefaultDeadPages)
	if err := b.DeadPages.check(); err != nil {
		return fmt.Errorf("build template %s: %w", b.Name, err)
	}
	h.Reporting = b.DeadPages.reports()
	b.Disk = cmp.Or(b.Disk, defaultDisk)
	if b.WorkDir == "" {
		b.WorkDir = "/" + rootfs.UserHome
	}
	if b.Agent == "" {
		return fmt.Errorf("build template %s: no agentzip-guest: run `make build`, or set AGENTZIP_LIBDIR to the folder that has agentzip-guest", b.Name)
	}
	return nil
}

// A build is one run of Build. Owned by its goroutine.
type build struct {
	store  *Store
	spec   BuildSpec
	report Progress

	temp     string // removed at the end, whatever happens
	source   *opened
	kernel   *kernel.Kernel
	manifest Manifest
	begun    time.Time
}

// Build makes a template, or returns the one that is there if its inputs are the same.
// Progress is reported at least every two seconds. When ctx ends, or on any
// error, nothing is left behind but filled caches, and a template of that name that
// was there before is untouched.
func (s *Store) Build(ctx context.Context, spec BuildSpec, report Progress) (*Template, error) {
	if err := spec.fill(); err != nil {
		return nil, err
	}
	lock, err := lockFile(ctx, s.lockOf(spec.Name), func() {
		report.Say("wait", "another process is building %s", spec.Name)
	})
	if err != nil {
		return nil, fmt.Errorf("build template %s: %w", spec.Name, err)
	}
	defer func() { _ = lock.Close() }()
	if err := s.Sweep(); err != nil {
		return nil, err
	}
	b := &build{store: s, spec: spec, report: report, begun: time.Now()}
	if b.temp, err = os.MkdirTemp(s.templates(), tempPrefix(spec.Name)); err != nil {
		return nil, fmt.Errorf("build template %s: %w", spec.Name, err)
	}
	defer func() { _ = os.RemoveAll(b.temp) }()
	t, err := b.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("build template %s: %w", spec.Name, explainSpace(err, s.dir))
	}
	return t, nil
}

func (b *build) run(ctx context.Context) (*Template, error) {
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	if t := b.upToDate(ctx); t != nil {
		b.report.Done("template", "%s is up to date", b.spec.Name)
		return t, nil
	}
	// Now, not after minutes of work: the template that is there must be free to go.
	if folder, err := b.store.lockFolder(b.spec.Name, unix.LOCK_EX); err == nil {
		_ = folder.Close()
	} else if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if err := needSpace(b.store.dir, b.source.disk+units.Bytes(b.spec.Hardware.Memory)); err != nil {
		return nil, err
	}
	b.manifest.Tools = toolVersions(ctx)
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"root image", b.makeRoot}, {"disks", b.makeDisks}, {"boot", b.boot}, {"index", b.writeIndex}, {"digests", b.seal},
	} {
		begin := time.Now()
		if err := step.do(ctx); err != nil {
			return nil, err
		}
		b.manifest.Seconds[step.name] = int(time.Since(begin).Seconds() + 0.5)
	}
	if err := b.manifest.write(b.out()); err != nil {
		return nil, err
	}
	if err := b.publish(); err != nil {
		return nil, err
	}
	b.report.Done("template", "%s built in %d s: %v of memory shared by its clones", b.spec.Name,
		int(time.Since(b.begun).Seconds()), b.manifest.Resident)
	return b.store.Load(ctx, b.spec.Name)
}

func (b *build) out() string             { return filepath.Join(b.temp, "out") }
func (b *build) outFile(n string) string { return filepath.Join(b.out(), n) }
func (b *build) scratch() string         { return filepath.Join(b.temp, "scratch") }

// prepare learns everything the input digest is made of.
func (b *build) prepare(ctx context.Context) error {
	for _, d := range []string{b.out(), b.scratch()} {
		if err := os.Mkdir(d, 0o755); err != nil { //nolint:gosec // G301: out becomes the template's folder
			return fmt.Errorf("make folder: %w", err)
		}
	}
	host, err := b.store.host(ctx)
	if err != nil {
		return err
	}
	agent, err := os.ReadFile(b.spec.Agent)
	if err != nil {
		return fmt.Errorf("read guest agent: %w", err)
	}
	if b.kernel, err = kernel.Fetch(ctx, b.store.cache("kernel"), b.scratch(), b.report); err != nil {
		return err
	}
	if b.source, err = b.spec.Source.open(ctx, b.scratch()); err != nil {
		return err
	}
	src := b.spec.Source
	src.Digest = b.source.digest
	sum := sha256.Sum256(agent)
	b.manifest = Manifest{
		Format: Format, Name: b.spec.Name, Created: time.Now().UTC().Round(0), Source: src,
		Hardware: b.spec.Hardware, DeadPages: b.spec.DeadPages, Host: host,
		Kernel: KernelFacts{Package: b.kernel.Package, Version: b.kernel.Version, Release: b.kernel.Release, Cmdline: b.spec.DeadPages.cmdline()},
		Agent:  AgentFacts{SHA256: hex.EncodeToString(sum[:])},
		Env:    b.source.env, WarmUp: b.spec.WarmUp, Start: b.spec.Start, Ready: b.spec.Ready, WorkDir: b.spec.WorkDir,
		Seconds: map[string]int{}, Files: map[string]FileSums{},
	}
	b.manifest.Input = inputDigest(&b.manifest, b.spec.Disk)
	return nil
}

// inputDigest names everything a build depends on that can differ between two
// builds. What does not change the result (times, versions of tools that only
// pack files) is left out.
func inputDigest(m *Manifest, disk units.Bytes) string {
	cpu := ""
	if m.Hardware.Accel == vmm.KVM {
		cpu = m.Host.CPU
	}
	data, err := json.Marshal(struct {
		Recipe, Format int
		Source         string
		Hardware       vmm.Hardware
		QEMU, CPU      string
		Kernel         KernelFacts
		Agent          string
		WarmUp         []string
		WorkDir        string
		Disk           units.Bytes
		Start, Ready   string `json:",omitempty"`
	}{buildRecipe, Format, m.Source.Digest, m.Hardware, m.Host.QEMU, cpu, m.Kernel, m.Agent.SHA256, m.WarmUp, m.WorkDir, disk, m.Start, m.Ready})
	if err != nil {
		panic("template: build inputs do not marshal: " + err.Error())
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// upToDate returns the existing template if it is whole and was built from the same inputs.
func (b *build) upToDate(ctx context.Context) *Template {
	if b.spec.Force {
		return nil
	}
	m, err := b.store.Inspect(b.spec.Name)
	if err != nil || m.Input != b.manifest.Input {
		return nil
	}
	t, err := b.store.Load(ctx, b.spec.Name)
	if err != nil {
		b.report.Say("template", "the one that is there cannot be used (%v), building it again", err)
		return nil
	}
	return t
}

// makeRoot fills a tree and writes root.ext4.
func (b *build) makeRoot(ctx context.Context) error {
	dir := filepath.Join(b.scratch(), "tree")
	tree, err := rootfs.NewTree(dir)
	if err != nil {
		return err
	}
	defer func() { _ = tree.Close() }()
	if err := b.source.unpack(ctx, tree, b.store.cache("base"), b.scratch(), b.report); err != nil {
		return err
	}
	if err := rootfs.Prepare(tree, rootfs.Guest{Agent: b.spec.Agent, Env: b.source.env}); err != nil {
		return err
	}
	if b.manifest.Packages, err = tree.Packages(); err != nil {
		return err
	}
	size, err := rootfs.WriteExt4(ctx, tree, b.outFile(rootFile), b.report)
	if err != nil {
		return err
	}
	b.report.Done("root image", "%v", size)
	return os.RemoveAll(dir) // its disk space is needed again soon
}

func (b *build) makeDisks(ctx context.Context) error {
	if err := rootfs.WriteDisk(ctx, b.outFile(diskFile), b.scratch(), b.spec.Disk); err != nil {
		return err
	}
	if err := b.kernel.WriteInitrd(b.spec.Agent, b.outFile(initrdFile)); err != nil {
		return err
	}
	image, err := os.ReadFile(b.kernel.Image())
	if err != nil {
		return fmt.Errorf("copy kernel: %w", err)
	}
	if err := os.WriteFile(b.outFile(kernelFile), image, 0o600); err != nil {
		return fmt.Errorf("copy kernel: %w", err)
	}
	// The VMM runs as a user of its own and opens the image again through its descriptor.
	return os.Chmod(b.outFile(rootFile), 0o444)
}

// seal computes the digests.
func (b *build) seal(ctx context.Context) error {
	pulse := b.report.Heartbeat(ctx, "digests", "hashing files")
	defer pulse.Stop()
	for _, f := range append(slices.Clip(contentFiles), indexFile) {
		sums, err := digestFile(ctx, b.outFile(f))
		if err != nil {
			return err
		}
		b.manifest.Files[f] = sums
	}
	return nil
}

// publish makes the template appear under its name in one step, everything of it on disk before.
func (b *build) publish() error {
	entries, err := os.ReadDir(b.out())
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	for _, e := range entries {
		if err := os.Chmod(b.outFile(e.Name()), 0o444); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		if err := syncPath(b.outFile(e.Name())); err != nil {
			return err
		}
	}
	if err := syncPath(b.out()); err != nil {
		return err
	}
	final := b.store.folder(b.spec.Name)
	old, err := b.store.lockFolder(b.spec.Name, unix.LOCK_EX)
	switch {
	case errors.Is(err, ErrNotFound):
		err = os.Rename(b.out(), final)
	case err != nil:
		return err
	default:
		// Exchanged, so that there is a whole template of this name at every moment.
		// The old one is then in the temporary folder, and goes with it.
		defer func() { _ = old.Close() }()
		err = unix.Renameat2(unix.AT_FDCWD, b.out(), unix.AT_FDCWD, final, unix.RENAME_EXCHANGE)
	}
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	return syncPath(b.store.templates())
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}

// Sweep removes what builds that died left behind: the temporary folders of all
// names nobody is building. They may be large, so each start of a daemon does it.
func (s *Store) Sweep() error {
	dirs, err := filepath.Glob(filepath.Join(s.templates(), ".tmp-*"))
	if err != nil {
		return fmt.Errorf("look for half-written templates: %w", err)
	}
	for _, d := range dirs {
		name := nameOfTemp(filepath.Base(d))
		lock, err := tryLockFile(s.lockOf(name))
		if err != nil {
			continue // being built now
		}
		err = os.RemoveAll(d)
		_ = lock.Close()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove half-written template: %w", err)
		}
	}
	return nil
}
