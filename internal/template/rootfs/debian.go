package rootfs

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentzip/agentzip/internal/template/step"
	"github.com/agentzip/agentzip/internal/template/tool"
)

// Debian describes a root file system made of Debian packages.
type Debian struct {
	Suite    string   `json:"suite"`    // "bookworm"
	Packages []string `json:"packages"` // beside the essential ones and apt
	// Setup are shell scripts, run as root in the new root (a chroot, without
	// network set-up), in order, before it is cached. They must not start daemons.
	Setup []string `json:"setup,omitempty"`
}

// recipe changes whenever the same Debian would give another tree: it is part of the digest.
const recipe = 1

// trim keeps out of the image what no program reads: manuals, translations, package
// notes (70 of 310 MB with Python and git). It costs disk, page cache at build time and
// time in dpkg. Copyright files stay, they are the licences. Compiled Python
// files stay too: without them each start of pytest compiles all it imports.
var trim = []string{
	"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/locale/*", "path-include=/usr/share/locale/locale.alias",
	"path-exclude=/usr/share/lintian/*", "path-exclude=/usr/share/bug/*",
	"path-exclude=/usr/share/doc-base/*", "path-exclude=/usr/share/linda/*",
	// A build that dies is thrown away whole, so nothing needs to reach the disk in order.
	"force-unsafe-io",
}

// Digest names the tree this description gives. Package versions are not part of
// it: the archive's next point release does not rebuild every template.
func (d Debian) Digest() string {
	d.Packages = slices.Compact(slices.Sorted(slices.Values(d.Packages)))
	data, err := json.Marshal(struct {
		Recipe int
		Debian Debian
		Trim   []string
	}{recipe, d, trim})
	if err != nil {
		panic("rootfs: strings do not marshal: " + err.Error())
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func (d Debian) cachePath(cache string) string {
	return filepath.Join(cache, "debian-"+d.Digest()[:16]+".tar")
}

// Cached reports whether the tree can be had from the cache folder without a network.
func (d Debian) Cached(cache string) bool {
	_, err := os.Stat(d.cachePath(cache) + ".sha256")
	return err == nil
}

// Unpack fills the tree with the packages. The unpacked archive is kept in the
// folder cache and used again by the next call with an equal Digest; a damaged
// one is thrown away and made anew. scratch is a folder for temporary files, on
// the file system of cache, which the caller removes.
func (d Debian) Unpack(ctx context.Context, tree *Tree, cache, scratch string, report step.Func) error {
	archive := d.cachePath(cache)
	if d.Cached(cache) {
		err := d.unpackCached(ctx, tree, archive, report)
		if err == nil || ctx.Err() != nil {
			return err
		}
		report.Say("root image", "cached packages are unusable (%v), making them again", err)
		if err := tree.reset(); err != nil {
			return err
		}
	}
	_ = os.Remove(archive + ".sha256")
	if err := d.bootstrap(ctx, archive, scratch, report); err != nil {
		return fmt.Errorf("install Debian packages: %w", explainApt(err))
	}
	return d.unpackCached(ctx, tree, archive, report)
}

func (d Debian) unpackCached(ctx context.Context, tree *Tree, archive string, report step.Func) error {
	want, err := os.ReadFile(archive + ".sha256")
	if err != nil {
		return fmt.Errorf("read digest of cached packages: %w", err)
	}
	f, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("open cached packages: %w", err)
	}
	defer func() { _ = f.Close() }()
	pulse := report.Heartbeat(ctx, "root image", "unpacking packages")
	defer pulse.Stop()
	sum := sha256.New()
	u := newUnpacker(tree, DefaultLimits, false)
	if err := u.apply(ctx, io.TeeReader(bufio.NewReaderSize(f, 1<<20), sum)); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != strings.TrimSpace(string(want)) {
		return errors.New("cached packages have changed on disk")
	}
	return nil
}

// bootstrap runs mmdebstrap into scratch and moves the result to archive, its digest last.
func (d Debian) bootstrap(ctx context.Context, archive, scratch string, report step.Func) error {
	tmp := filepath.Join(scratch, "packages.tar")
	args, err := d.arguments(ctx, tmp, scratch)
	if err != nil {
		return err
	}
	pulse := report.Heartbeat(ctx, "root image", "installing packages")
	log := &bootstrapLog{pulse: pulse}
	err = tool.Run(ctx, tool.Command{
		Name: "mmdebstrap", Args: args, OnLine: log.line, OwnMounts: true,
		Env: []string{"TMPDIR=" + scratch},
	})
	pulse.Stop()
	if err != nil {
		return log.explain(err)
	}
	sum, err := hashFile(ctx, tmp)
	if err != nil {
		return err
	}
	if err := os.Rename(tmp, archive); err != nil {
		return fmt.Errorf("cache packages: %w", err)
	}
	if err := os.WriteFile(archive+".sha256", []byte(sum+"\n"), 0o600); err != nil {
		return fmt.Errorf("cache packages: %w", err)
	}
	return nil
}

func (d Debian) arguments(ctx context.Context, out, scratch string) ([]string, error) {
	args := []string{"--mode=root", "--format=tar", "--variant=minbase", "--verbose", "--components=main"}
	for _, o := range trim {
		args = append(args, "--dpkgopt="+o)
	}
	for _, o := range []string{`Acquire::Languages "none"`, `APT::Install-Recommends "false"`, `Acquire::Retries "3"`} {
		args = append(args, "--aptopt="+o)
	}
	args = append(args, hostAptOptions(ctx)...)
	for i, s := range d.Setup {
		script := filepath.Join(scratch, fmt.Sprintf("setup-%d.sh", i))
		if err := os.WriteFile(script, []byte(s), 0o600); err != nil {
			return nil, fmt.Errorf("write set-up script: %w", err)
		}
		args = append(args, fmt.Sprintf(
			`--customize-hook=cp '%s' "$1/tmp/setup.sh" && chroot "$1" /bin/sh -eu /tmp/setup.sh && rm "$1/tmp/setup.sh"`, script))
	}
	args = append(args, `--customize-hook=rm -rf "$1"/var/log/apt "$1"/var/log/*.log "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old`)
	if len(d.Packages) > 0 {
		args = append(args, "--include="+strings.Join(d.Packages, ","))
	}
	args = append(args, d.Suite, out)
	return append(args, hostMirrors(ctx, d.Suite)...), nil
}

// hostMirrors returns source lines for the suite from the mirrors this host uses;
// none (mmdebstrap then takes deb.debian.org) where apt knows nothing of the suite.
func hostMirrors(ctx context.Context, suite string) []string {
	out, err := tool.Output(ctx, tool.Command{Name: "apt-get", Args: []string{
		"indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)", "Created-By: Packages",
	}})
	if err != nil {
		return nil
	}
	return mirrorsFrom(out, suite)
}

func mirrorsFrom(indexTargets, suite string) []string {
	var lines []string
	main := false
	for l := range strings.SplitSeq(indexTargets, "\n") {
		f := strings.Fields(l)
		if len(f) != 4 || f[2] != "main" || f[3] != "Debian" {
			continue
		}
		if f[1] != suite && f[1] != suite+"-updates" && f[1] != suite+"-security" {
			continue
		}
		main = main || f[1] == suite
		lines = append(lines, fmt.Sprintf("deb %s %s main", f[0], f[1]))
	}
	if !main {
		return nil
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// hostAptOptions passes on how this host reaches its mirrors.
func hostAptOptions(ctx context.Context) []string {
	out, err := tool.Output(ctx, tool.Command{Name: "apt-config", Args: []string{"dump"}})
	if err != nil {
		return nil
	}
	var args []string
	for l := range strings.SplitSeq(out, "\n") {
		low := strings.ToLower(l)
		for _, p := range []string{"acquire::http::proxy", "acquire::https::proxy", "acquire::check-valid-until", "acquire::check-date"} {
			if strings.HasPrefix(low, p+" ") || strings.HasPrefix(low, p+"::") {
				args = append(args, "--aptopt="+l)
			}
		}
	}
	return args
}

// bootstrapLog turns mmdebstrap's lines into progress and keeps the line that explains a failure.
type bootstrapLog struct {
	pulse *step.Pulse
	cause string

	fetched, unpacked, setUp int64
}

func (b *bootstrapLog) line(l string) {
	switch {
	case strings.HasPrefix(l, "E: mmdebstrap"), strings.HasPrefix(l, "E: run_chroot"):
	case strings.HasPrefix(l, "E:") || strings.HasPrefix(l, "Err:"):
		if b.cause == "" || strings.HasPrefix(b.cause, "Err:") {
			b.cause = l
		}
	case strings.HasPrefix(l, "I: "):
		stage := strings.TrimSuffix(strings.TrimPrefix(l, "I: "), "...")
		if strings.HasPrefix(stage, "running --customize-hook") {
			stage = "running set-up scripts"
		}
		b.pulse.Set(0, 0, "%s", stage)
	case strings.HasPrefix(l, "Get:"):
		b.count(&b.fetched, "fetching packages")
	case strings.HasPrefix(l, "Unpacking "):
		b.count(&b.unpacked, "unpacking packages")
	case strings.HasPrefix(l, "Setting up "):
		b.count(&b.setUp, "setting up packages")
	}
}

func (b *bootstrapLog) count(n *int64, what string) {
	*n++
	if *n%10 == 0 {
		b.pulse.Set(*n, 0, "%s", what)
	}
}

func (b *bootstrapLog) explain(err error) error {
	if b.cause == "" {
		return err
	}
	return fmt.Errorf("%s: %w", strings.TrimSpace(strings.TrimPrefix(b.cause, "E:")), err)
}

// explainApt adds what to do to the failures people meet.
func explainApt(err error) error {
	text := err.Error()
	if te, ok := errors.AsType[*tool.Error](err); ok {
		text += "\n" + te.Tail
	}
	switch {
	case errors.Is(err, tool.ErrMissing):
		return fmt.Errorf("%w (run `agentzip setup`)", err)
	case strings.Contains(text, "No space left on device"):
		return fmt.Errorf("no space left on disk: %w", err)
	case strings.Contains(text, "Could not resolve"), strings.Contains(text, "Temporary failure resolving"),
		strings.Contains(text, "Could not connect"), strings.Contains(text, "Connection timed out"),
		strings.Contains(text, "Failed to fetch"):
		return fmt.Errorf("the package mirror does not answer (check the network and /etc/apt/sources.list*): %w", err)
	case strings.Contains(text, "Unable to locate package"):
		return fmt.Errorf("a package does not exist in this suite: %w", err)
	}
	return err
}

// Package is one installed Debian package.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Packages lists what dpkg has installed in the tree, sorted; none in trees without dpkg.
func (t *Tree) Packages() ([]Package, error) {
	status, err := t.ReadFile("var/lib/dpkg/status")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read package list: %w", err)
	}
	var list []Package
	for para := range bytes.SplitSeq(status, []byte("\n\n")) {
		var p Package
		installed := false
		for line := range bytes.SplitSeq(para, []byte("\n")) {
			switch k, v, _ := bytes.Cut(line, []byte(": ")); string(k) {
			case "Package":
				p.Name = string(v)
			case "Version":
				p.Version = string(v)
			case "Status":
				installed = bytes.HasSuffix(v, []byte(" installed"))
			}
		}
		if installed {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b Package) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

func hashFile(ctx context.Context, name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", fmt.Errorf("hash file: %w", err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, ctxReader{ctx, f}); err != nil {
		return "", fmt.Errorf("hash %s: %w", name, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
