package restores

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/agentzip/agentzip/internal/units"
)

// A Process is what a sandbox's VMM occupies that only its owner knows.
type Process struct {
	PID    int         // 0: there is none
	Kernel units.Bytes // charged to its cgroup, page tables included
}

// vmmParts is the anonymous memory of a VMM by what it is for.
type vmmParts struct {
	Guest  units.Bytes // private pages of the guest's memory
	Code   units.Bytes // executable and writable: TCG's buffer of translated code
	Tables units.Bytes // large nameless mappings: TCG's hash table of translations
	Rest   units.Bytes // heap, stacks, relocated data of binary and libraries
}

// tableSize is how much of a nameless mapping must be used for it to count as TCG's table: it
// has 2 MiB, and what the VMM has of others (stacks, arenas of malloc) was below 0.7 MiB.
const tableSize = units.MiB

// guestMemory is in the name of the mapping of a guest's memory.
const guestMemory = "memfd:agentzip-memory"

// readSmaps sorts the anonymous pages of /proc/PID/smaps (proc_pid_smaps(5)).
func readSmaps(r io.Reader) (vmmParts, error) {
	var p vmmParts
	var perms, name string
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 2 {
			continue
		}
		if !strings.HasSuffix(f[0], ":") { // the head of a mapping: address perms offset device inode [name]
			perms, name = f[1], ""
			if len(f) > 5 {
				name = f[5]
			}
			continue
		}
		if f[0] != "Anonymous:" {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return p, fmt.Errorf("read smaps: %w", err)
		}
		n := units.Bytes(kib) * units.KiB
		switch {
		case strings.Contains(name, guestMemory):
			p.Guest += n
		case name == "" && strings.HasPrefix(perms, "rwx"):
			p.Code += n
		case name == "" && n >= tableSize:
			p.Tables += n
		default:
			p.Rest += n
		}
	}
	if err := lines.Err(); err != nil {
		return p, fmt.Errorf("read smaps: %w", err)
	}
	return p, nil
}

// processParts reads the smaps of a process. One that is gone occupies nothing.
func processParts(pid int) (vmmParts, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if errors.Is(err, fs.ErrNotExist) {
		return vmmParts{}, nil
	}
	if err != nil {
		return vmmParts{}, fmt.Errorf("read memory of process %d: %w", pid, err)
	}
	defer f.Close()
	return readSmaps(f)
}

// kibField returns the value of a line "name: value kB" of a file of /proc.
func kibField(file, name string) (units.Bytes, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", name, err)
	}
	for line := range strings.Lines(string(data)) {
		k, v, ok := strings.Cut(line, ":")
		if !ok || k != name {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s of %s: %w", name, file, err)
		}
		return units.Bytes(kib) * units.KiB, nil
	}
	return 0, fmt.Errorf("read %s: not in %s", name, file)
}
