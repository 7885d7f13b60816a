package boot

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// settle prepares the running system for commands. Nothing here is worth
// failing a boot for: each thing that cannot be done is said on the console.
func settle() {
	mountVolatile()
	linkStandardFiles()
	nameHost()
	if err := RaiseLoopback(); err != nil {
		say("raise loopback: %v", err)
	}
	limitResources()
	for _, s := range settings {
		err := os.WriteFile(s.path, []byte(s.value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			say("set %s: %v", s.path, err)
		}
	}
}

// settings are kernel knobs. Most of them stop periodic work: an idle guest
// that wakes up dirties pages the host has just compressed.
var settings = []struct{ path, value string }{
	{"/proc/sys/kernel/watchdog", "0"},                         // soft-lockup timer, every 4 s on each CPU
	{"/proc/sys/vm/compaction_proactiveness", "0"},             // kcompactd looks twice a second
	{"/proc/sys/vm/stat_interval", "60"},                       // per-CPU counters are folded each second by default
	{"/sys/kernel/mm/transparent_hugepage/enabled", "madvise"}, // a 2 MiB page makes 512 pages private for one write
	{"/sys/kernel/mm/transparent_hugepage/khugepaged/defrag", "0"},
	{"/proc/sys/net/ipv4/ping_group_range", "0 2147483647"}, // ping without root
	// The agent writes files as root where their user may not; a link to a file
	// of root must then not be there (guestagent/rights.go).
	{"/proc/sys/fs/protected_hardlinks", "1"},
	{"/proc/sys/fs/protected_symlinks", "1"},
	{"/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"}, // loopback keeps its ::1; others would solicit routers
	{"/proc/sys/fs/inotify/max_user_watches", "65536"},
	{"/proc/sys/fs/inotify/max_user_instances", "1024"},
}

func mountVolatile() {
	for _, m := range []struct {
		kind, target string
		mode         os.FileMode
		flags        uintptr
		data         string
	}{
		{"tmpfs", "/run", 0o755, unix.MS_NOSUID | unix.MS_NODEV, "mode=0755,size=20%"},
		{"tmpfs", "/dev/shm", 0o1777, unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"devpts", "/dev/pts", 0o755, unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"},
		{"mqueue", "/dev/mqueue", 0o1777, unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"cgroup2", "/sys/fs/cgroup", 0o755, unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	} {
		if err := os.MkdirAll(m.target, m.mode); err != nil && !errors.Is(err, fs.ErrExist) {
			say("make %s: %v", m.target, err)
			continue
		}
		if err := unix.Mount(m.kind, m.target, m.kind, m.flags, m.data); err != nil {
			say("mount %s: %v", m.target, err)
		}
	}
	for dir, mode := range map[string]os.FileMode{"/run/lock": 0o777 | os.ModeSticky, "/tmp": 0o777 | os.ModeSticky, "/run/agentzip": 0o755} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			say("make %s: %v", dir, err)
			continue
		}
		if st, err := os.Stat(dir); err == nil && st.Mode()&(os.ModePerm|os.ModeSticky) != mode {
			if err := os.Chmod(dir, mode); err != nil {
				say("set mode of %s: %v", dir, err)
			}
		}
	}
}

// linkStandardFiles makes what udev makes elsewhere; bash needs /dev/fd for <(...).
func linkStandardFiles() {
	for name, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, name); err != nil && !errors.Is(err, fs.ErrExist) {
			say("link %s: %v", name, err)
		}
	}
}

func nameHost() {
	name := "agentzip"
	if b, err := os.ReadFile("/etc/hostname"); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		name = strings.TrimSpace(string(b))
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		say("set host name: %v", err)
	}
}

// RaiseLoopback is "ip link set lo up"; the kernel adds 127.0.0.1 by itself. The replay of
// calls without a VM needs it too.
func RaiseLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// limitResources sets what the agent's commands inherit.
func limitResources() {
	for _, l := range []struct {
		what       int
		soft, hard uint64
	}{
		{unix.RLIMIT_NOFILE, 65536, 524288},
		{unix.RLIMIT_CORE, 0, unix.RLIM_INFINITY},
	} {
		if err := unix.Setrlimit(l.what, &unix.Rlimit{Cur: l.soft, Max: l.hard}); err != nil {
			say("set resource limit %d: %v", l.what, err)
		}
	}
}
