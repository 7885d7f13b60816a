package hostmem

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxVectors is how many ranges one process_vm_readv takes (IOV_MAX).
const maxVectors = 1024

// ReadProcess reads the ranges of process pid, one after the other, into dst. All
// or an error: a short read leaves dst undefined. len(dst) must be the sum of the
// ranges. remote is scratch of at least len(ranges), so that the call does not allocate.
//
// The read goes through the page tables of that process: a page that is not
// mapped there makes it fault, and with a userfaultfd wait to be served.
func ReadProcess(pid int, dst []byte, ranges []Range, remote []unix.RemoteIovec) error {
	if len(ranges) > maxVectors || len(ranges) > len(remote) {
		return fmt.Errorf("read memory of process %d: %d ranges are too many", pid, len(ranges))
	}
	for i, r := range ranges {
		remote[i] = unix.RemoteIovec{Base: uintptr(r.Addr), Len: int(r.Len)}
	}
	local := [1]unix.Iovec{}
	local[0].Base = &dst[0]
	local[0].SetLen(len(dst))
	n, err := unix.ProcessVMReadv(pid, local[:], remote[:len(ranges)], 0)
	if errors.Is(err, unix.ESRCH) {
		return ErrGone
	}
	if err != nil {
		return fmt.Errorf("read memory of process %d: %w", pid, err)
	}
	if n != len(dst) {
		return fmt.Errorf("read memory of process %d: got %d of %d bytes", pid, n, len(dst))
	}
	return nil
}

// FindPrivate finds the one private mapping of the whole of file (length bytes
// from offset 0) in process pid. None or several are an error: with two, nobody
// could say which of them the guest runs on.
func FindPrivate(pid int, file *os.File, length uint64) (addr uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", file.Name(), err)
	}
	dev := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if gone(err) {
		return 0, fmt.Errorf("find %s in process %d: %w", file.Name(), pid, ErrGone)
	}
	if err != nil {
		return 0, fmt.Errorf("find %s in process %d: %w", file.Name(), pid, err)
	}
	defer maps.Close() //nolint:errcheck // read only
	var found []uint64
	var refused []string
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		m, ok := parseMap(lines.Text())
		if !ok || m.dev != dev || m.inode != st.Ino {
			continue
		}
		if !m.private || m.offset != 0 || m.end-m.start != length {
			refused = append(refused, lines.Text())
			continue
		}
		found = append(found, m.start)
	}
	if err := lines.Err(); gone(err) {
		return 0, fmt.Errorf("find %s in process %d: %w", file.Name(), pid, ErrGone)
	} else if err != nil {
		return 0, fmt.Errorf("find %s in process %d: %w", file.Name(), pid, err)
	}
	if len(found) != 1 || len(refused) != 0 {
		return 0, fmt.Errorf("find %s in process %d: want exactly one private mapping of %d bytes, found %d, and %d others %q",
			file.Name(), pid, length, len(found), len(refused), refused)
	}
	return found[0], nil
}

// gone reports whether a file of /proc/PID failed because the process is dead: reaped
// (ENOENT) or not yet (ESRCH).
func gone(err error) bool { return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// mapLine is one line of /proc/PID/maps, proc_pid_maps(5).
type mapLine struct {
	start, end, offset, inode uint64
	private                   bool
	dev                       string
}

func parseMap(line string) (mapLine, bool) {
	f := strings.Fields(line)
	if len(f) < 5 || len(f[1]) != 4 {
		return mapLine{}, false
	}
	from, to, ok := strings.Cut(f[0], "-")
	if !ok {
		return mapLine{}, false
	}
	var m mapLine
	var errs [4]error
	m.start, errs[0] = strconv.ParseUint(from, 16, 64)
	m.end, errs[1] = strconv.ParseUint(to, 16, 64)
	m.offset, errs[2] = strconv.ParseUint(f[2], 16, 64)
	m.inode, errs[3] = strconv.ParseUint(f[4], 10, 64)
	m.private, m.dev = f[1][3] == 'p', f[3]
	return m, errors.Join(errs[:]...) == nil
}

// Mergeable reports whether the mapping that starts at addr in process pid is open to KSM
// (flag "mg", proc_pid_smaps(5)). KSM replaces equal pages by one and forgets their
// userfaultfd write protection (mm/ksm.c, replace_page).
func Mergeable(pid int, addr uint64) (bool, error) {
	smaps, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if gone(err) {
		return false, fmt.Errorf("read flags of a mapping of process %d: %w", pid, ErrGone)
	}
	if err != nil {
		return false, fmt.Errorf("read flags of a mapping: %w", err)
	}
	defer smaps.Close() //nolint:errcheck // read only
	inside := false
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		if m, ok := parseMap(lines.Text()); ok {
			inside = m.start == addr
			continue
		}
		flags, ok := strings.CutPrefix(lines.Text(), "VmFlags:")
		if inside && ok {
			return slices.Contains(strings.Fields(flags), "mg"), nil
		}
	}
	if err := lines.Err(); gone(err) {
		return false, fmt.Errorf("read flags of a mapping of process %d: %w", pid, ErrGone)
	} else if err != nil {
		return false, fmt.Errorf("read flags of a mapping of process %d: %w", pid, err)
	}
	return false, fmt.Errorf("read flags of process %d: it has no mapping at %#x", pid, addr)
}

// SetRealtime gives the calling thread a first-in-first-out real-time priority (1 lowest,
// 99 highest; sched(7)). It needs CAP_SYS_NICE and, in a cgroup v1 cpu controller, a
// real-time budget. The caller has locked its goroutine to the thread.
func SetRealtime(priority uint32) error {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: priority, Flags: unix.SCHED_FLAG_RESET_ON_FORK}
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return os.NewSyscallError("sched_setattr", err)
	}
	return nil
}
