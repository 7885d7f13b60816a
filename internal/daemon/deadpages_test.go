package daemon

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

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pager"
	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// churn allocates, checks and frees memory in which every number is known, and leaves free
// memory alone for longer than the guest's kernel takes to report it. It reports single pages,
// not only blocks of 2 MiB, and those in the lists of a CPU too: there up to 24 MB wait.
const churn = `
order=/sys/module/page_reporting/parameters/page_reporting_order lists=/proc/sys/vm/percpu_pagelist_high_fraction
echo "order $(<$order), lists $(<$lists)"
echo 0 > $order && echo 1000 > $lists || exit 3
made() { printf -v "$1" "$2 %s;" {1..10000}; }
check() {
	made want "$2"
	[[ "${!1}" == "$want" ]] || { echo "wrong: $1 of $2 $3"; exit 7; }
}
for round in 1 2 3; do
	for i in 0 1 2; do made "keep$i" "$round.$i"; done
	( # its memory is freed with it
		for i in 3 4 5 6; do made "gone$i" "$round.$i"; done
		for i in 3 4 5 6; do check "gone$i" "$round.$i" "at once"; done
		for i in 0 1 2; do check "keep$i" "$round.$i" "in the child"; done
	) || exit
	read -rt 3 <> <(:) # sleeps: there is no other program
	for i in 0 1 2; do check "keep$i" "$round.$i" "after a pause"; done
done
echo all right`

// Without init_on_free reports meet evicted pages above all. With it passes are faster than
// reports wherever they can be: so they come seldom, and reports meet private pages.
func TestAGuestThatReportsItsFreePagesWhileItIsEvictedKeepsEveryByte(t *testing.T) {
	for _, tt := range []struct {
		dead   template.DeadPages
		kernel string        // what the guest's kernel was told
		pause  time.Duration // between two passes
	}{{template.DeadReport, "order 0, lists 1000\n", 200 * time.Millisecond}, {template.DeadBoth, "order 9, lists 0\n", 5 * time.Second}} {
		t.Run(string(tt.dead), func(t *testing.T) { churnWhileEvicted(t, tt.dead, tt.kernel, tt.pause) })
	}
}

func churnWhileEvicted(t *testing.T, dead template.DeadPages, kernel string, pause time.Duration) {
	t.Helper()
	d := openDaemon(t, 0)
	tmpl := buildShell(t, d, dead)
	im, err := tmpl.OpenMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := im.Close(); err != nil {
			t.Error(err)
		}
	})
	m := startClone(t, d, tmpl, im)
	p := servePager(t, m, im)
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	link := guestlink.New(m.Link())
	defer link.Close() //nolint:errcheck // the VMM goes first
	err = link.Personalize(ctx, guestlink.Identity{
		Entropy: bytes.Repeat([]byte{7}, 64), Hostname: "clone", MachineID: strings.Repeat("ab", 16), BootID: "01234567-89ab-cdef-0123-456789abcdef",
	})
	if err != nil {
		t.Fatalf("personalise: %v; console: %s", err, m.Console())
	}
	evicting, stop := context.WithCancel(ctx)
	passes := make(chan error, 1)
	go func() {
		var err error
		for err == nil {
			_, err = p.Evict(evicting)
			select {
			case <-time.After(pause): // the guest must get on too
			case <-evicting.Done():
			}
		}
		passes <- err
	}()
	var out bytes.Buffer
	exit, err := link.Run(ctx, guestlink.Command{Shell: churn, Cwd: "/", User: "root"}, &out, &out)
	stop()
	if perr := <-passes; !errors.Is(perr, context.Canceled) {
		t.Errorf("evict: %v", perr)
	}
	if err != nil || exit.Code != 0 || out.String() != kernel+"all right\n" {
		t.Fatalf("the guest: %+v, %v: %s\nVMM: %s\nconsole: %s", exit, err, out.String(), m.Log(), m.Console())
	}
	s := p.Stats()
	t.Logf("%d passes, %d reports of %d pages dropped %d pages and %d entries, p99 %v", s.Passes, s.Reports.Count, s.Reported, s.Discarded, s.DiscardedEntries, s.Reports.P99())
	if s.Discarded+s.DiscardedEntries == 0 || s.Encoded == 0 || s.Mismatches != 0 {
		t.Errorf("%d pages encoded, %d mismatches; want some encoded, some discarded and no mismatch", s.Encoded, s.Mismatches)
	}
	if strings.Contains(string(m.Log()), "ram_block_discard_range") {
		t.Errorf("the VMM met a refusal: %s", m.Log())
	}
}

// buildShell builds a template with nothing but a shell.
func buildShell(t *testing.T, d *Daemon, dead template.DeadPages) *template.Template {
	t.Helper()
	lib := os.Getenv("AGENTZIP_LIBDIR")
	store, err := template.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// Downloads are borrowed from the host's own store.
	home := os.Getenv("AGENTZIP_STATE_DIR")
	if home == "" {
		home = vmm.DefaultStateDir
	}
	ours := filepath.Join(store.Dir(), "cache", "kernel")
	if err := errors.Join(os.Remove(ours), os.Symlink(filepath.Join(home, "cache", "kernel"), ours)); err != nil {
		t.Fatal(err)
	}
	tmpl, err := store.Build(t.Context(), template.BuildSpec{
		Name: "shell", Source: template.Source{Directory: shellRoot(t)}, Agent: filepath.Join(lib, "agentzip-guest"),
		Launcher: d.host, Hardware: vmm.Hardware{Memory: 128 * units.MiB}, Disk: 64 * units.MiB, DeadPages: dead,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tmpl.Close() })
	return tmpl
}

// shellRoot makes a folder with this host's bash and the libraries it needs.
func shellRoot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.CommandContext(t.Context(), "ldd", "/bin/bash").Output()
	if err != nil {
		t.Skipf("look for bash's libraries: %v", err)
	}
	for f := range strings.FieldsSeq("/bin/bash " + string(out)) {
		if !strings.HasPrefix(f, "/") {
			continue
		}
		data, err := os.ReadFile(f)
		err = errors.Join(err, os.MkdirAll(filepath.Join(dir, filepath.Dir(f)), 0o755), os.WriteFile(filepath.Join(dir, f), data, 0o755))
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("bash", filepath.Join(dir, "bin/sh")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// startClone starts a clone, paused, with a shim.
func startClone(t *testing.T, d *Daemon, tmpl *template.Template, im *guestmem.Image) vmm.Machine {
	t.Helper()
	open := func(path string) *os.File {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	disk, err := d.host.TempFile("disk")
	if err == nil {
		err = vmm.CopySparse(open(tmpl.DiskFile()), disk)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = disk.Close() })
	m, err := d.host.Start(t.Context(), vmm.Spec{
		Mode: vmm.Clone, Hardware: tmpl.Hardware, Memory: im.File(), Root: open(tmpl.RootFile()), Disk: disk,
		State: open(tmpl.StateFile()), Shim: filepath.Join(os.Getenv("AGENTZIP_LIBDIR"), "agentzip-shim.so"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	return m
}

// servePager puts the clone under a pager whose faults are served.
func servePager(t *testing.T, m vmm.Machine, im *guestmem.Image) *pager.Pager {
	t.Helper()
	mem, err := guestmem.Attach(m.Shim(), m.PID(), im)
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.CreateTemp(t.TempDir(), "root") // empty: there are no blocks to refer to
	if err != nil {
		t.Fatal(err)
	}
	lib, err := library.Build(t.Context(), im, root)
	if err != nil {
		t.Fatal(err)
	}
	set, err := cohort.New(cohort.Options{Library: lib})
	if err != nil {
		t.Fatal(err)
	}
	p, err := pager.New(pager.Options{Name: "test", Guest: mem, Image: im, Cohort: set, OnFatal: func(err error) { t.Error(err) }})
	if err != nil {
		t.Fatal(err)
	}
	server := pager.NewServer(pager.ServerOptions{})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() {
		m.Kill()
		server.Remove(p)
		cancel()
		if err := errors.Join(<-ended, p.Close(), mem.Close(), set.Close(), lib.Close(), root.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := server.Add(p); err != nil {
		t.Fatal(err)
	}
	return p
}
