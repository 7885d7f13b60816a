package template

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

func TestMain(m *testing.M) {
	vmm.BecomeGuard()
	goleak.VerifyTestMain(m)
}

// vmStore returns a store in a temporary folder and a host to boot on, or skips. The store borrows the
// caches of the host's own: downloads are not what is tested here.
func vmStore(t *testing.T) (s, real *Store, host *vmm.Host) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts VMs")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if os.Getenv("AGENTZIP_LIBDIR") == "" {
		t.Skip("AGENTZIP_LIBDIR is not set: run `make test`")
	}
	real, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	if s, err = Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"base", "kernel"} {
		if err := errors.Join(os.Remove(s.cache(kind)), os.Symlink(real.cache(kind), s.cache(kind))); err != nil {
			t.Fatal(err)
		}
	}
	if host, err = vmm.OpenHost(vmm.HostOptions{RunDir: t.TempDir(), StateDir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, real, host
}

func guestAgent() string { return filepath.Join(os.Getenv("AGENTZIP_LIBDIR"), "agentzip-guest") }

// shellRoot makes a folder with this host's bash and the libraries it needs: the smallest
// root a template can be built of.
func shellRoot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.CommandContext(t.Context(), "ldd", "/bin/bash").Output()
	if err != nil {
		t.Skipf("look for bash's libraries: %v", err)
	}
	files := []string{"/bin/bash"}
	for f := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(f, "/") {
			files = append(files, f)
		}
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			err = os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f), data, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("bash", filepath.Join(dir, "bin/sh")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestABuiltTemplateBootsOnceAndItsClonesGoOnFromThere(t *testing.T) {
	s, real, host := vmStore(t)
	spec, err := Builtin("tornado")
	if err != nil {
		t.Fatal(err)
	}
	if !spec.Source.Debian.Cached(real.cache("base")) {
		t.Skip("the packages of template tornado are not cached: run `make setup`")
	}
	spec.Agent, spec.Launcher, spec.Hardware.Memory = guestAgent(), host, 256*units.MiB
	spec.WarmUp = []string{`echo warm > /tmp/mark && pwd && id -un && sudo -n id -un`, `git -C /testbed status --porcelain > /tmp/status`}
	tmpl, err := s.Build(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tmpl.Close() }()
	if tmpl.Resident <= 0 || tmpl.Resident > 128*units.MiB {
		t.Errorf("template memory is %v", tmpl.Resident)
	}
	if usage := diskBlocks(t, tmpl.DiskFile()); usage > 4*units.MiB {
		t.Errorf("each clone copies %v of disk, want less than 4 MiB", usage)
	}
	checkIndex(t, tmpl)
	out := runInClone(t, host, tmpl, `cat /tmp/mark /tmp/status; pwd; id -un; git log --format=%s; cut -d" " -f1 /proc/uptime`)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 5 || lines[0] != "warm" || lines[1] != "/testbed" || lines[2] != "user" || !strings.HasPrefix(lines[3], "tornado 6.") {
		t.Errorf("in a clone: got %q", lines)
	}

	begin := time.Now()
	again, err := s.Build(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	if !again.Created.Equal(tmpl.Created) {
		t.Errorf("building again took %v and made another template, want the same one", time.Since(begin))
	}
	spec.WarmUp = []string{"true"}
	if _, err := s.Build(t.Context(), spec, nil); !errors.Is(err, ErrInUse) {
		t.Errorf("replacing a loaded template: got %v, want ErrInUse", err)
	}
}

// checkIndex finds the last block of the root image that is not zero, through the index the build wrote.
func checkIndex(t *testing.T, tmpl *Template) {
	t.Helper()
	if tmpl.Files[indexFile].Size == 0 {
		t.Error("the build wrote no index of public pages")
	}
	im, err := tmpl.OpenMemory()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = im.Close() }()
	root, err := os.ReadFile(tmpl.RootFile())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(tmpl.RootFile())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	l, err := tmpl.OpenLibrary(t.Context(), im, f)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	at := len(root) - units.PageSize
	for codec.IsZero((*units.Page)(root[at:])) {
		at -= units.PageSize
	}
	page := (*units.Page)(root[at:])
	id, ok := l.Find(page, codec.Checksum(page))
	var got units.Page
	if err := l.Read(&got, id); !ok || err != nil || got != *page {
		t.Errorf("root block at %#x: found %v, read %v", at, ok, err)
	}
}

// runInClone starts a clone without a pager, makes it a sandbox of its own and runs one command.
func runInClone(t *testing.T, host *vmm.Host, tmpl *Template, shell string) string {
	t.Helper()
	im, err := tmpl.OpenMemory()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = im.Close() }()
	open := func(path string) *os.File {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	disk, err := host.TempFile("disk")
	if err == nil {
		err = vmm.CopySparse(open(tmpl.DiskFile()), disk)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = disk.Close() }()
	m, err := host.Start(t.Context(), vmm.Spec{
		Mode: vmm.Clone, Hardware: tmpl.Hardware, Memory: im.File(), Root: open(tmpl.RootFile()), Disk: disk, State: open(tmpl.StateFile()),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Kill()
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	link := guestlink.New(m.Link())
	defer func() { _ = link.Close() }()
	err = link.Personalize(ctx, guestlink.Identity{
		Entropy: bytes.Repeat([]byte{7}, 64), Time: time.Now(), Hostname: "clone", MachineID: strings.Repeat("ab", 16), BootID: "01234567-89ab-cdef-0123-456789abcdef",
	})
	if err != nil {
		t.Fatalf("personalize: %v; console: %s", err, m.Console())
	}
	var out bytes.Buffer
	exit, err := link.Run(ctx, guestlink.Command{Shell: shell, Cwd: tmpl.WorkDir, User: "user"}, &out, &out)
	if err != nil || exit.Code != 0 {
		t.Fatalf("run in clone: %+v, %v: %s", exit, err, out.String())
	}
	return out.String()
}

func TestAFailingWarmUpFailsTheBuildWithItsOutputAndLeavesNothing(t *testing.T) {
	s, _, host := vmStore(t)
	_, err := s.Build(t.Context(), BuildSpec{
		Name: "small", Source: Source{Directory: shellRoot(t)}, Agent: guestAgent(), Launcher: host, Hardware: vmm.Hardware{Memory: 128 * units.MiB},
		WarmUp: []string{`test "$PWD" = /home/user`, `echo "it is uid $UID"; echo broken >&2; exit 7`},
	}, nil)
	if !errors.Is(err, ErrWarmUp) || !strings.Contains(err.Error(), "code 7") || !strings.Contains(err.Error(), "broken") || !strings.Contains(err.Error(), "it is uid 1000") {
		t.Errorf("got %v, want ErrWarmUp with code 7 and the output", err)
	}
	wantEmpty(t, s)
}

func TestACancelledBuildLeavesNothing(t *testing.T) {
	s, _, host := vmStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := s.Build(ctx, BuildSpec{
		Name: "small", Source: Source{Directory: shellRoot(t)}, Agent: guestAgent(), Launcher: host, Hardware: vmm.Hardware{Memory: 128 * units.MiB},
	}, func(e Event) {
		if e.Step == "boot" { // the guest is starting
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	wantEmpty(t, s)
}

func wantEmpty(t *testing.T, s *Store) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(s.templates(), "*"))
	hidden, herr := filepath.Glob(filepath.Join(s.templates(), ".*"))
	if err := errors.Join(err, herr); err != nil || len(left)+len(hidden) != 0 {
		t.Errorf("left in the store: %v %v, %v", left, hidden, err)
	}
}

func diskBlocks(t *testing.T, path string) units.Bytes {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return units.Bytes(st.Blocks) * 512
}
