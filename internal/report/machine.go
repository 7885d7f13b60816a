package report

import (
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ThisMachine describes the host as far as it can be read; what cannot is left
// empty. QEMU and Accel are the caller's to fill in.
func ThisMachine() Machine {
	m := Machine{Cores: runtime.NumCPU(), OS: runtime.GOOS}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if v := field("/etc/os-release", "PRETTY_NAME", "="); v != "" {
		m.OS = strings.Trim(v, `"`)
	}
	m.CPU = field("/proc/cpuinfo", "model name", ":")
	if f := strings.Fields(field("/proc/meminfo", "MemTotal", ":")); len(f) > 0 {
		if kb, err := strconv.ParseInt(f[0], 10, 64); err == nil {
			m.MemoryMB = kb / 1024
		}
	}
	return m
}

// field returns the value of the first line "key<sep>value" of a file.
func field(file, key, sep string) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(line, sep); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
