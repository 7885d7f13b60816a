// Package cgroup confines processes, counts what they use, and ends them.
//
// It finds out by itself whether the host has the memory, pids and cpu
// controllers as version 1 hierarchies, in the version 2 tree, or not at all. A
// controller that is missing, or that this process may not use, costs a warning
// and never an error: a sandbox without a limit is better than none, and its end
// is guaranteed by other means as well.
//
// A group is named by a path that is the same in each hierarchy, for example
// agentzip/RUN/MACHINE. Values are immutable after Create; any goroutine may use them.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// A Controller is a kernel resource controller that this package uses.
type Controller string

const (
	Memory Controller = "memory"
	Pids   Controller = "pids"
	CPU    Controller = "cpu"
)

var wanted = []Controller{Memory, Pids, CPU}

// settleTimeout bounds the wait for killed processes to leave a group, and for the
// kernel to let an empty group go. A process in uninterruptible I/O can exceed it;
// then the group stays for the next sweep.
const settleTimeout = 10 * time.Second

// Limits of a group. A zero value sets no limit.
type Limits struct {
	Memory units.Bytes
	Pids   int
	CPUs   int // weight: as many default shares
}

// A hierarchy is one mounted tree of groups.
type hierarchy struct {
	dir         string
	v2          bool
	controllers []Controller // those of wanted that it serves
}

// Tree is the host's control groups.
type Tree struct {
	hierarchies []hierarchy
}

// Detect reads the mounted hierarchies of this process.
func Detect() (*Tree, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	defer f.Close()
	return detect(f)
}

// detect reads mountinfo (proc_pid_mountinfo(5)) from r.
func detect(r io.Reader) (*Tree, error) {
	t := &Tree{}
	var v2 string
	taken := map[Controller]bool{}
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		dash := slices.Index(fields, "-")
		if dash < 5 || len(fields) < dash+4 {
			continue
		}
		dir, kind, options := fields[4], fields[dash+1], strings.Split(fields[dash+3], ",")
		switch kind {
		case "cgroup2":
			if v2 == "" {
				v2 = dir
			}
		case "cgroup":
			h := hierarchy{dir: dir}
			for _, c := range wanted {
				if !taken[c] && slices.Contains(options, string(c)) {
					taken[c] = true
					h.controllers = append(h.controllers, c)
				}
			}
			if len(h.controllers) > 0 {
				t.hierarchies = append(t.hierarchies, h)
			}
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	if v2 != "" {
		h := hierarchy{dir: v2, v2: true}
		available := strings.Fields(readString(filepath.Join(v2, "cgroup.controllers")))
		for _, c := range wanted {
			if !taken[c] && slices.Contains(available, string(c)) {
				h.controllers = append(h.controllers, c)
			}
		}
		// A version 2 tree without controllers still finds and kills processes.
		if len(h.controllers) > 0 || len(t.hierarchies) == 0 {
			t.hierarchies = append(t.hierarchies, h)
		}
	}
	return t, nil
}

// Dirs returns the directories that group name has, or would have.
func (t *Tree) Dirs(name string) []string {
	dirs := make([]string, 0, len(t.hierarchies))
	for _, h := range t.hierarchies {
		dirs = append(dirs, filepath.Join(h.dir, name))
	}
	return dirs
}

// Group is one group, present in all hierarchies that could be used.
type Group struct {
	name    string
	members []hierarchy // dir is the group's own directory
}

// Create makes the group and its parents and sets the limits. The warnings name
// each limit that is not in force.
func (t *Tree) Create(name string, limits Limits) (g *Group, warnings []string) {
	g = &Group{name: name}
	known := map[Controller]bool{}
	for _, h := range t.hierarchies {
		for _, c := range h.controllers {
			known[c] = true
		}
		dir := filepath.Join(h.dir, name)
		err := makeGroup(h, name)
		for try := 0; errors.Is(err, fs.ErrNotExist) && try < 10; try++ {
			err = makeGroup(h, name) // another process pruned an upper level it had just emptied
		}
		if err != nil {
			warnings = append(warnings, fmt.Sprintf("no cgroup %s: %v", dir, err))
			continue
		}
		member := hierarchy{dir: dir, v2: h.v2}
		for _, c := range h.controllers {
			if err := setLimit(dir, h.v2, c, limits); err != nil {
				warnings = append(warnings, fmt.Sprintf("no %s limit: %v", c, err))
				continue
			}
			member.controllers = append(member.controllers, c)
		}
		g.members = append(g.members, member)
	}
	for _, c := range wanted {
		if !known[c] {
			warnings = append(warnings, fmt.Sprintf("no %s limit: the host has no such cgroup controller", c))
		}
	}
	return g, warnings
}

// makeGroup creates the directories of a group from the hierarchy's root down. In
// version 2 each level hands its controllers on. The upper levels get shares for
// all processors, else all sandboxes together would weigh as much as one process.
func makeGroup(h hierarchy, name string) error {
	parts := strings.Split(name, "/")
	dir := h.dir
	for i, part := range parts {
		if h.v2 {
			for _, c := range h.controllers {
				// Refused where a level holds processes; setLimit reports what that costs.
				_ = write(filepath.Join(dir, "cgroup.subtree_control"), "+"+string(c))
			}
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if i < len(parts)-1 && slices.Contains(h.controllers, CPU) {
			_ = setLimit(dir, h.v2, CPU, Limits{CPUs: runtime.NumCPU()})
		}
	}
	return nil
}

func setLimit(dir string, v2 bool, c Controller, l Limits) error {
	switch {
	case c == Memory && l.Memory > 0:
		file := "memory.limit_in_bytes"
		if v2 {
			file = "memory.max"
		}
		return write(filepath.Join(dir, file), strconv.FormatInt(int64(l.Memory), 10))
	case c == Pids && l.Pids > 0:
		return write(filepath.Join(dir, "pids.max"), strconv.Itoa(l.Pids))
	case c == CPU && l.CPUs > 0 && v2:
		return write(filepath.Join(dir, "cpu.weight"), strconv.Itoa(min(100*l.CPUs, 10000)))
	case c == CPU && l.CPUs > 0:
		return write(filepath.Join(dir, "cpu.shares"), strconv.Itoa(min(1024*l.CPUs, 262144)))
	}
	return nil
}

// Add moves a process into the group.
func (g *Group) Add(pid int) error {
	var errs []error
	for _, m := range g.members {
		if err := write(filepath.Join(m.dir, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			errs = append(errs, fmt.Errorf("add process %d to cgroup: %w", pid, err))
		}
	}
	return errors.Join(errs...)
}

// OOMKills returns how many of the group's processes the OOM killer has ended, be
// it for the group's limit or the host's memory. 0 without a memory controller.
func (g *Group) OOMKills() int {
	file := map[bool]string{false: "memory.oom_control", true: "memory.events"}
	for _, m := range g.members {
		if !slices.Contains(m.controllers, Memory) {
			continue
		}
		for line := range strings.Lines(readString(filepath.Join(m.dir, file[m.v2]))) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
				v, _ := strconv.Atoi(strings.TrimSpace(n))
				return v
			}
		}
	}
	return 0
}

// MemoryCurrent returns what is charged to the group, page cache and kernel memory
// included; 0 without a memory controller.
func (g *Group) MemoryCurrent() units.Bytes {
	file := map[bool]string{false: "memory.usage_in_bytes", true: "memory.current"}
	for _, m := range g.members {
		if slices.Contains(m.controllers, Memory) {
			v, _ := strconv.ParseInt(strings.TrimSpace(readString(filepath.Join(m.dir, file[m.v2]))), 10, 64)
			return units.Bytes(v)
		}
	}
	return 0
}

// MemoryKernel returns the kernel memory that is charged to the group (page tables, stacks,
// slabs); 0 without a memory controller.
func (g *Group) MemoryKernel() units.Bytes {
	for _, m := range g.members {
		if !slices.Contains(m.controllers, Memory) {
			continue
		}
		if !m.v2 {
			v, _ := strconv.ParseInt(strings.TrimSpace(readString(filepath.Join(m.dir, "memory.kmem.usage_in_bytes"))), 10, 64)
			return units.Bytes(v)
		}
		for line := range strings.Lines(readString(filepath.Join(m.dir, "memory.stat"))) {
			if n, ok := strings.CutPrefix(line, "kernel "); ok {
				v, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
				return units.Bytes(v)
			}
		}
	}
	return 0
}

// Remove kills what is left in the group and removes it.
func (g *Group) Remove() error {
	dirs := make([]string, 0, len(g.members))
	for _, m := range g.members {
		dirs = append(dirs, m.dir)
	}
	return Destroy(dirs)
}

// Destroy kills every process in the group directories and the groups below them,
// and removes the directories. Missing ones are no error.
func Destroy(dirs []string) error {
	var errs []error
	for _, dir := range dirs {
		if err := destroy(dir); err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

// Prune removes a group directory if it is empty, and says nothing if it is not.
func Prune(dirs []string) {
	for _, dir := range dirs {
		_ = unix.Rmdir(dir)
	}
}

func destroy(dir string) error {
	deadline := time.Now().Add(settleTimeout)
	for wait := 500 * time.Microsecond; ; wait = min(2*wait, 50*time.Millisecond) {
		groups, err := below(dir)
		if err != nil {
			return err
		}
		left := 0
		for _, g := range groups {
			left += killAll(g)
		}
		if left == 0 {
			err = removeAll(groups)
			if err == nil || !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
				return err
			}
		} else {
			err = fmt.Errorf("%d processes survive SIGKILL", left)
		}
		if time.Now().After(deadline) {
			return err
		}
		time.Sleep(wait)
	}
}

// below returns dir and all groups below it, deepest last; none if dir is gone.
func below(dir string) ([]string, error) {
	var groups []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && d.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	return groups, err
}

// killAll sends SIGKILL to every process of one group and returns how many there were.
func killAll(dir string) int {
	_ = write(filepath.Join(dir, "cgroup.kill"), "1") // version 2, 5.14 and later: forks included
	n := 0
	for field := range strings.FieldsSeq(readString(filepath.Join(dir, "cgroup.procs"))) {
		// 0 stands for a process outside our pid namespace: not ours to kill.
		if pid, err := strconv.Atoi(field); err == nil && pid > 1 && pid != os.Getpid() {
			n++
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	return n
}

func removeAll(groups []string) error {
	for _, g := range slices.Backward(groups) {
		if err := unix.Rmdir(g); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// write stores a value in a file that must exist: O_CREATE would make plain files
// in a directory that is no control group.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func readString(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(b)
}
