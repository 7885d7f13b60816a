package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

func TestDetectFindsEachControllerOnce(t *testing.T) {
	v2 := t.TempDir()
	empty := t.TempDir()
	for dir, controllers := range map[string]string{v2: "cpuset cpu io memory pids\n", empty: "\n"} {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.controllers"), []byte(controllers), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const v1 = "30 29 0:26 / %s rw,relatime shared:5 - cgroup cgroup rw,%s\n"
	const unified = "40 29 0:36 / %s rw,relatime - cgroup2 cgroup2 rw\n"
	for _, tc := range []struct {
		name  string
		mount string
		want  []hierarchy
	}{
		{"nothing", "20 1 8:1 / / rw - ext4 /dev/sda rw\n", nil},
		{
			"version 1", fmt.Sprintf(v1+v1+v1, "/c/cpu,cpuacct", "cpu,cpuacct", "/c/memory", "memory", "/c/freezer", "freezer"),
			[]hierarchy{{"/c/cpu,cpuacct", false, []Controller{CPU}}, {"/c/memory", false, []Controller{Memory}}},
		},
		{"version 2", fmt.Sprintf(unified, v2), []hierarchy{{v2, true, []Controller{Memory, Pids, CPU}}}},
		{
			"both, split", fmt.Sprintf(v1+unified, "/c/memory", "memory", v2),
			[]hierarchy{{"/c/memory", false, []Controller{Memory}}, {v2, true, []Controller{Pids, CPU}}},
		},
		{
			"version 1 beside an empty version 2", fmt.Sprintf(unified+v1, empty, "/c/memory", "memory"),
			[]hierarchy{{"/c/memory", false, []Controller{Memory}}},
		},
		{"an empty version 2 alone", fmt.Sprintf(unified, empty), []hierarchy{{empty, true, nil}}},
		{"lines cut short", "1 2 3\n30 29 0:26 / /x rw - cgroup\n", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := detect(strings.NewReader(tc.mount))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got.hierarchies, cmp.AllowUnexported(hierarchy{})); diff != "" {
				t.Errorf("hierarchies differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAGroupOfVersion2GetsItsLimits(t *testing.T) {
	// Plain files stand for the kernel's; a real version 2 tree with controllers is
	// not to be had where version 1 holds them.
	root := t.TempDir()
	dir := filepath.Join(root, "a/b")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"cgroup.subtree_control", "a/cgroup.subtree_control", "a/cpu.weight", "a/b/memory.max", "a/b/pids.max", "a/b/cpu.weight", "a/b/cgroup.procs"} {
		if err := os.WriteFile(filepath.Join(root, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tree := &Tree{[]hierarchy{{root, true, []Controller{Memory, Pids, CPU}}}}
	g, warnings := tree.Create("a/b", Limits{Memory: 3 * units.MiB, Pids: 7, CPUs: 2})
	if len(warnings) > 0 {
		t.Errorf("warnings: %q", warnings)
	}
	if err := g.Add(12345); err != nil {
		t.Error(err)
	}
	for file, want := range map[string]string{
		"a/b/memory.max": "3145728", "a/b/pids.max": "7", "a/b/cpu.weight": "200", "a/b/cgroup.procs": "12345",
		"cgroup.subtree_control": "+cpu", "a/cgroup.subtree_control": "+cpu",
	} {
		if got := readString(filepath.Join(root, file)); got != want {
			t.Errorf("%s holds %q, want %q", file, got, want)
		}
	}
	for file, text := range map[string]string{"memory.events": "low 0\noom 2\noom_kill 3\n", "memory.current": "4096\n", "memory.stat": "anon 1\nkernel 8192\nkernel_stack 3\n"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if n := g.OOMKills(); n != 3 {
		t.Errorf("%d OOM kills, want 3", n)
	}
	if n := g.MemoryCurrent(); n != 4096 {
		t.Errorf("memory use %d, want 4096", n)
	}
	if n := g.MemoryKernel(); n != 8192 {
		t.Errorf("kernel memory %d, want 8192", n)
	}
}

func TestAMissingControllerIsAWarning(t *testing.T) {
	g, warnings := (&Tree{}).Create("a/b", Limits{Memory: 1, Pids: 1, CPUs: 1})
	if len(warnings) != 3 {
		t.Errorf("warnings: %q, want one for each controller", warnings)
	}
	if err := errors.Join(g.Add(1), g.Remove()); err != nil {
		t.Errorf("a group that is nowhere: %v", err)
	}
	tree := &Tree{[]hierarchy{{"/proc/no-such-hierarchy", false, []Controller{Memory, Pids, CPU}}}}
	if _, warnings := tree.Create("a/b", Limits{}); len(warnings) != 1 {
		t.Errorf("warnings of a hierarchy that cannot be used: %q, want one", warnings)
	}
}

// realTree returns the host's groups or skips the test.
func realTree(t *testing.T) *Tree {
	t.Helper()
	tree, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.hierarchies) == 0 || os.Geteuid() != 0 {
		t.Skip("needs root and a mounted cgroup hierarchy")
	}
	return tree
}

// unified returns the host's version 2 tree alone, with or without controllers, or
// nil: killing and removing works in it even where version 1 has the controllers.
func unified(t *testing.T) *Tree {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " - cgroup2 ") {
			lines.WriteString(line)
		}
	}
	tree, err := detect(strings.NewReader(lines.String()))
	if err != nil || len(tree.hierarchies) == 0 {
		return nil
	}
	return tree
}

func TestAGroupIsKilledAndRemovedWithItsChildren(t *testing.T) {
	t.Run("in the controllers' hierarchies", func(t *testing.T) { killAndRemove(t, realTree(t)) })
	t.Run("in version 2 alone", func(t *testing.T) {
		tree := unified(t)
		if tree == nil || os.Geteuid() != 0 {
			t.Skip("needs root and a mounted version 2 tree")
		}
		killAndRemove(t, tree)
	})
}

func killAndRemove(t *testing.T, tree *Tree) {
	t.Helper()
	name := fmt.Sprintf("agentzip-test-%d", os.Getpid())
	parent := tree.Dirs(name)
	g, warnings := tree.Create(name+"/inner", Limits{Pids: 50})
	t.Logf("warnings: %q", warnings)
	defer func() { _ = Destroy(parent) }()
	if len(g.members) == 0 {
		t.Skip("this process may not make cgroups")
	}
	// A process that ignores what can be ignored, and its children.
	cmd := exec.Command("sh", "-c", "trap '' TERM INT HUP; read x; sleep 1000 & sleep 1000 & wait")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(in, "go")
	died := make(chan struct{})
	go func() { _ = cmd.Wait(); close(died) }()
	time.Sleep(50 * time.Millisecond)
	if err := Destroy(parent); err != nil {
		t.Fatal(err)
	}
	select {
	case <-died:
	case <-time.After(5 * time.Second):
		t.Error("the process survives its group")
	}
	for _, dir := range parent {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left (%v)", dir, err)
		}
	}
	if err := Destroy(parent); err != nil {
		t.Errorf("a group that is gone: %v", err)
	}
}

func TestTheLimitsOfARealGroupHold(t *testing.T) {
	tree := realTree(t)
	name := fmt.Sprintf("agentzip-test-%d-limits", os.Getpid())
	g, warnings := tree.Create(name, Limits{Memory: 16 * units.MiB, Pids: 8, CPUs: 1})
	defer func() { _ = g.Remove() }()
	if len(warnings) > 0 {
		t.Skipf("this host cannot limit: %q", warnings)
	}
	cmd := exec.Command("sh", "-c", "read x; exec tail /dev/zero") // grows without end
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(in, "go")
	_ = cmd.Wait()
	if n := g.OOMKills(); n == 0 {
		t.Errorf("a process beyond its limit was not OOM-killed: %v", cmd.ProcessState)
	}
	for _, m := range g.members {
		if slices.Contains(m.controllers, Pids) {
			if got := strings.TrimSpace(readString(filepath.Join(m.dir, "pids.max"))); got != "8" {
				t.Errorf("pids.max is %q, want 8", got)
			}
		}
	}
}
