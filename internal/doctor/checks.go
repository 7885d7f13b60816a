package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

const (
	needMemory = 4 * units.GiB // the demo's 4 sandboxes without compression, and their VMMs
	minMemory  = 1 * units.GiB // one sandbox
	needDisk   = 6 * units.GiB // root image, template, caches, overlays of 4 sandboxes
	minDisk    = 1 * units.GiB // overlays, once a template is there
)

func checkPlatform(_ context.Context, h *Host) Finding {
	if h.GOOS != "linux" || h.GOARCH != "amd64" || h.PageSize != units.PageSize {
		return missing(fmt.Sprintf("%s/%s with pages of %d bytes", h.GOOS, h.GOARCH, h.PageSize),
			"userfaultfd and the guests need 64-bit x86 Linux with 4 KiB pages", "use such a machine")
	}
	kernel := "unknown"
	if text, err := h.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		kernel = strings.TrimSpace(string(text))
	}
	return ok("linux/amd64, kernel %s", kernel)
}

func checkRoot(_ context.Context, h *Host) Finding {
	if h.EUID != 0 {
		return missing(fmt.Sprintf("running as uid %d", h.EUID),
			"cgroups, userfaultfd and switching VMMs to users of their own need root; other checks fail because of it too",
			"run it with sudo or as root")
	}
	return ok("running as root")
}

func checkUserfault(_ context.Context, h *Host) Finding {
	times, err := h.Userfault()
	if err != nil {
		fix := "use kernel 6.1 or newer with CONFIG_USERFAULTFD"
		if errors.Is(err, fs.ErrPermission) {
			fix = "run as root; in a container, allow userfaultfd in its seccomp profile"
		}
		return missing(err.Error(), "evicted pages come back through MISSING, MINOR and WP faults of a sealed private mapping", fix)
	}
	return ok("served a minor fault in %s, a missing one in %s, a write-protect one in %s",
		round(times.Minor), round(times.Missing), round(times.WriteProtect))
}

func checkUserfaultDevice(_ context.Context, h *Host) Finding {
	if err := h.UserfaultDevice(); err != nil {
		fix := "load a kernel with CONFIG_USERFAULTFD, 6.1 or newer"
		if errors.Is(err, fs.ErrPermission) {
			fix = "run as root, or allow /dev/userfaultfd in the container's device list"
		}
		return missing(err.Error(), "an unprivileged VMM gets its userfaultfd through this device", fix)
	}
	return ok("hands out a userfaultfd")
}

func checkPagemapScan(_ context.Context, h *Host) Finding {
	exact, err := h.PagemapScan()
	switch {
	case err != nil:
		return missing(err.Error(), "the pages to compress are found this way", "run as root, on kernel 6.7 or newer")
	case !exact:
		return degraded("not in this kernel; reading page table entries one by one works",
			"looking for private pages takes longer", "use kernel 6.7 or newer")
	}
	return ok("found the one private page of a mapping")
}

// qemuDevices are the devices of every sandbox.
var qemuDevices = []string{"nvdimm", "virtio-blk-pci", "virtio-serial-pci", "virtio-rng-pci", "virtserialport"}

var qemuVersion = regexp.MustCompile(`version (\d+)\.(\d+)[^\s(]*`)

func checkQEMU(ctx context.Context, h *Host) Finding {
	const install = "apt-get install qemu-system-x86"
	path, err := h.LookPath("qemu-system-x86_64")
	if err != nil {
		return missing("qemu-system-x86_64 is not in PATH", "it runs the sandboxes", install)
	}
	text, err := h.Output(ctx, path, "--version")
	version := qemuVersion.FindStringSubmatch(text)
	if err != nil || version == nil {
		return missing(fmt.Sprintf("%s --version says %q (%v)", path, lastLine(text), err), "it runs the sandboxes", install)
	}
	// -sandbox on comes first: a QEMU without seccomp refuses it here.
	devices, err := h.Output(ctx, path, "-sandbox", "on", "-device", "help")
	if err != nil {
		return missing(fmt.Sprintf("%s -sandbox on: %s (%v)", path, lastLine(devices), err),
			"VMMs are confined with seccomp", "use a QEMU built with seccomp: "+install)
	}
	var absent []string
	for _, d := range qemuDevices {
		if !strings.Contains(devices, `name "`+d+`"`) {
			absent = append(absent, d)
		}
	}
	if len(absent) > 0 {
		return missing(fmt.Sprintf("QEMU %s.%s lacks %s", version[1], version[2], strings.Join(absent, ", ")),
			"every sandbox has these devices", install)
	}
	machines, err := h.Output(ctx, path, "-machine", "help")
	if err != nil || !regexp.MustCompile(`(?m)^pc\s`).MatchString(machines) {
		return missing(fmt.Sprintf("QEMU %s.%s has no machine \"pc\"", version[1], version[2]), "sandboxes are of this type", install)
	}
	if major, _ := strconv.Atoi(version[1]); major < 7 {
		return degraded(fmt.Sprintf("QEMU %s.%s", version[1], version[2]),
			"developed and tested with 7.2; older ones were not tried", install)
	}
	return ok("%s, version %s.%s: machine pc, nvdimm, virtio blk, serial, rng, seccomp", path, version[1], version[2])
}

// loopCount is about 20 ms of native time: long against the cost of entering a
// guest, short for a person who waits.
const loopCount = 50_000_000

// loopLimit is what a CPU that emulates is given. Hardware needs 1 % of it.
const loopLimit = 2 * time.Second

// slowFactor is what separates hardware, even nested and with a noisy
// neighbour, from emulation (20 times slower and more).
const slowFactor = 5

func checkKVM(_ context.Context, h *Host) Finding {
	const why = "guests run under TCG, QEMU's translator: 10-20 times slower code, more VMM memory"
	const fix = "nothing has to be done; for speed use bare metal or a VM with nested virtualisation"
	// The best of three: this CPU may be busy with other things for one of them.
	native := min(h.NativeLoop(loopCount), h.NativeLoop(loopCount), h.NativeLoop(loopCount))
	took, err := h.KVMLoop(loopCount, loopLimit)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return degraded("/dev/kvm is absent", why, fix)
	case errors.Is(err, errVCPUSlow):
		return degraded(fmt.Sprintf("a 64-bit loop of %s native had not finished after %s: /dev/kvm emulates", round(native), loopLimit), why, fix)
	case err != nil:
		return degraded(fmt.Sprintf("no 64-bit guest runs: %v", err), why, fix)
	case took > slowFactor*native:
		return degraded(fmt.Sprintf("a 64-bit loop took %s, natively %s: /dev/kvm emulates", round(took), round(native)), why, fix)
	}
	return ok("a 64-bit loop took %s, natively %s", round(took), round(native))
}

func checkLibFiles(_ context.Context, h *Host) Finding {
	var absent []string
	for _, name := range []string{"agentzip-guest", "agentzip-shim.so"} {
		if _, err := h.ReadFile(filepath.Join(h.LibDir, name)); err != nil {
			absent = append(absent, name)
		}
	}
	if len(absent) > 0 {
		return missing(strings.Join(absent, " and ")+" not in "+h.LibDir,
			"one is the agent inside guests, the other hands the pager its userfaultfd",
			"make build, or set AGENTZIP_LIBDIR to the folder they are in")
	}
	return ok("both in %s", h.LibDir)
}

func checkTemplateTools(_ context.Context, h *Host) Finding {
	var absent []string
	for program, pkg := range map[string]string{"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"} {
		if _, err := h.LookPath(program); err != nil {
			absent = append(absent, pkg)
		}
	}
	switch {
	case len(absent) == 0:
		return ok("mmdebstrap and mke2fs")
	case absent[0] == "mmdebstrap" && len(absent) == 1:
		return degraded("mmdebstrap is not installed",
			"templates can be built from OCI images and folders, not from Debian packages (the demo's is)", "apt-get install mmdebstrap")
	default:
		return missing("mke2fs is not installed", "root images are made with it", "apt-get install e2fsprogs mmdebstrap")
	}
}

func checkCompiler(_ context.Context, h *Host) Finding {
	if path, err := h.LookPath("gcc"); err == nil {
		return ok("%s", path)
	}
	return degraded("gcc is not installed", "AgentZip itself cannot be built here (it can run)", "apt-get install gcc libc6-dev libzstd-dev")
}

func checkMemory(_ context.Context, h *Host) Finding {
	available, err := meminfo(h, "MemAvailable")
	if err != nil {
		return missing(err.Error(), "it says how many sandboxes fit", "mount /proc")
	}
	switch fix := "stop other programs or use a machine with more memory"; {
	case available < minMemory:
		return missing(fmt.Sprintf("%s available", available), "a sandbox and its VMM may need 1 GiB", fix)
	case available < needMemory:
		return degraded(fmt.Sprintf("%s available", available), "the demo's run without compression needs 4 GiB", fix)
	}
	return ok("%s available", available)
}

func checkDisk(_ context.Context, h *Host) Finding {
	free, err := h.FreeDisk(h.StateDir)
	if err != nil {
		return missing(err.Error(), "templates and overlays live there", "set AGENTZIP_STATE_DIR to a folder on a local disk")
	}
	switch fix := "free some, or set AGENTZIP_STATE_DIR to a folder on a larger disk"; {
	case free < minDisk:
		return missing(fmt.Sprintf("%s free for %s", free, h.StateDir), "sandboxes' overlays grow there", fix)
	case free < needDisk:
		return degraded(fmt.Sprintf("%s free for %s", free, h.StateDir), "building a template needs 6 GiB", fix)
	}
	return ok("%s free for %s", free, h.StateDir)
}

// meminfo returns a field of /proc/meminfo.
func meminfo(h *Host, field string) (units.Bytes, error) {
	text, err := h.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read /proc/meminfo: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) >= 2 && f[0] == field+":" {
			kb, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read %s of /proc/meminfo: %w", field, err)
			}
			return units.Bytes(kb) * units.KiB, nil
		}
	}
	return 0, fmt.Errorf("read %s of /proc/meminfo: %w", field, os.ErrNotExist)
}

// round keeps a duration readable: three digits at most.
func round(d time.Duration) time.Duration {
	switch {
	case d > time.Second:
		return d.Round(10 * time.Millisecond)
	case d > 100*time.Millisecond:
		return d.Round(time.Millisecond)
	case d > time.Millisecond:
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(100 * time.Nanosecond)
}
