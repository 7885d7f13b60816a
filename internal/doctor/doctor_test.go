package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

// files is a fake root file system.
type files map[string]string

func (f files) read(path string) ([]byte, error) {
	text, there := f[path]
	if !there {
		return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
	}
	return []byte(text), nil
}

const allDevices = `name "nvdimm"
name "virtio-blk-pci", bus PCI
name "virtio-serial-pci", bus PCI
name "virtio-rng-pci", bus PCI
name "virtserialport", bus virtio-serial-bus
`

// goodFiles is a host on which every check says ok.
func goodFiles() files {
	return files{
		"/proc/sys/kernel/osrelease":                        "6.12.1\n",
		"/proc/meminfo":                                     "MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\nSwapTotal: 0 kB\n",
		"/proc/pressure/memory":                             "some avg10=0.12 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n",
		"/sys/fs/cgroup/cgroup.controllers":                 "cpuset cpu io memory pids\n",
		"/sys/kernel/mm/transparent_hugepage/enabled":       "always [madvise] never\n",
		"/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
		"/sys/kernel/mm/ksm/run":                            "0\n",
		"/lib/agentzip-guest":                               "elf",
		"/lib/agentzip-shim.so":                             "elf",
	}
}

// goodHost returns a fake host and its files, for a test to break.
func goodHost() (*Host, files) {
	f := goodFiles()
	return &Host{
		GOOS: "linux", GOARCH: "amd64", PageSize: 4096, StateDir: "/state", LibDir: "/lib",
		ReadFile: f.read,
		LookPath: func(name string) (string, error) { return "/usr/bin/" + name, nil },
		Output: func(_ context.Context, _ string, args ...string) (string, error) {
			switch args[len(args)-1] {
			case "--version":
				return "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright\n", nil
			case "help":
				if args[len(args)-2] == "-machine" {
					return "Supported machines are:\nmicrovm              microvm (i386)\npc                   Standard PC (alias of pc-i440fx-7.2)\n", nil
				}
				return allDevices, nil
			}
			return "", errors.New("unexpected arguments: " + strings.Join(args, " "))
		},
		FreeDisk: func(string) (units.Bytes, error) { return 50 * units.GiB, nil },
		Userfault: func() (FaultTimes, error) {
			return FaultTimes{time.Microsecond, time.Microsecond, time.Microsecond}, nil
		},
		UserfaultDevice: func() error { return nil },
		PagemapScan:     func() (bool, error) { return true, nil },
		KVMLoop:         func(uint32, time.Duration) (time.Duration, error) { return 22 * time.Millisecond, nil },
		NativeLoop:      func(uint32) time.Duration { return 20 * time.Millisecond },
		MakeCgroup:      func(string) error { return nil },
		LoopMount:       func(context.Context) error { return nil },
	}, f
}

func TestAHostWithEverythingIsOK(t *testing.T) {
	h, _ := goodHost()
	rep, err := Run(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rep.Results {
		if r.Level != OK || r.Detail == "" || r.Why != "" || r.Fix != "" {
			t.Errorf("%s: %+v, want ok with a detail and nothing to fix", r.Name, r.Finding)
		}
	}
	if rep.Overall != OK || len(rep.Results) != len(checks()) {
		t.Errorf("overall %s with %d results, want ok with %d", rep.Overall, len(rep.Results), len(checks()))
	}
}

func TestEachThingThatCanBeWrongIsNamedWithItsFix(t *testing.T) {
	tests := []struct {
		name   string
		hurt   func(*Host, files)
		check  string
		level  Level
		detail string // part of the detail
		fix    string // part of the fix
	}{
		{
			"an ARM machine is refused", func(h *Host, _ files) { h.GOARCH = "arm64" },
			"platform", Missing, "linux/arm64", "use such a machine",
		},
		{
			"pages of 64 KiB are refused", func(h *Host, _ files) { h.PageSize = 65536 },
			"platform", Missing, "65536", "use such a machine",
		},
		{
			"a user who is not root is told to use sudo", func(h *Host, _ files) { h.EUID = 1000 },
			"root", Missing, "uid 1000", "sudo",
		},
		{
			"a userfaultfd that does not raise minor faults is a missing one",
			func(h *Host, _ files) {
				h.Userfault = func() (FaultTimes, error) { return FaultTimes{}, errors.New("no minor faults") }
			},
			"userfaultfd", Missing, "no minor faults", "CONFIG_USERFAULTFD",
		},
		{
			"a userfaultfd that is forbidden needs root, not a kernel",
			func(h *Host, _ files) {
				h.Userfault = func() (FaultTimes, error) { return FaultTimes{}, fs.ErrPermission }
			},
			"userfaultfd", Missing, "permission", "run as root",
		},
		{
			"no permission for the device is not the same as no device",
			func(h *Host, _ files) { h.UserfaultDevice = func() error { return fs.ErrPermission } },
			"/dev/userfaultfd", Missing, "permission", "run as root",
		},
		{
			"no device asks for a newer kernel",
			func(h *Host, _ files) { h.UserfaultDevice = func() error { return fs.ErrNotExist } },
			"/dev/userfaultfd", Missing, "not exist", "6.1",
		},
		{
			"an old kernel without PAGEMAP_SCAN is slower",
			func(h *Host, _ files) { h.PagemapScan = func() (bool, error) { return false, nil } },
			"PAGEMAP_SCAN", Degraded, "one by one", "6.7",
		},
		{
			"a page table that cannot be read stops everything",
			func(h *Host, _ files) { h.PagemapScan = func() (bool, error) { return false, errors.New("denied") } },
			"PAGEMAP_SCAN", Missing, "denied", "root",
		},
		{
			"no QEMU", func(h *Host, _ files) { h.LookPath = lacks("qemu-system-x86_64") },
			"QEMU", Missing, "not in PATH", "apt-get install qemu-system-x86",
		},
		{
			"a QEMU without NVDIMMs", func(h *Host, _ files) {
				h.Output = replace(h.Output, allDevices, strings.ReplaceAll(allDevices, "nvdimm", "x"))
			},
			"QEMU", Missing, "lacks nvdimm", "apt-get install",
		},
		{
			"a QEMU without seccomp", func(h *Host, _ files) {
				good := h.Output
				h.Output = func(ctx context.Context, name string, args ...string) (string, error) {
					if args[0] == "-sandbox" {
						return "-sandbox support is not enabled in this QEMU binary", errors.New("exit status 1")
					}
					return good(ctx, name, args...)
				}
			},
			"QEMU", Missing, "not enabled", "seccomp",
		},
		{
			"a QEMU without machine pc", func(h *Host, _ files) {
				good := h.Output
				h.Output = func(ctx context.Context, name string, args ...string) (string, error) {
					if args[0] == "-machine" {
						return "pc-i440fx-7.2   Standard PC\nq35  Q35\n", nil
					}
					return good(ctx, name, args...)
				}
			},
			"QEMU", Missing, `no machine "pc"`, "apt-get install",
		},
		{
			"an old QEMU was not tried", func(h *Host, _ files) {
				h.Output = replace(h.Output, "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright\n", "QEMU emulator version 5.2.0\n")
			},
			"QEMU", Degraded, "5.2", "apt-get install",
		},
		{
			"no KVM means TCG", func(h *Host, _ files) { h.KVMLoop = kvm(0, fs.ErrNotExist) },
			"KVM", Degraded, "/dev/kvm is absent", "bare metal",
		},
		{
			"a KVM that never finishes emulates", func(h *Host, _ files) { h.KVMLoop = kvm(0, errVCPUSlow) },
			"KVM", Degraded, "emulates", "bare metal",
		},
		{
			"a KVM that is more than 5 times slower emulates", func(h *Host, _ files) { h.KVMLoop = kvm(101*time.Millisecond, nil) },
			"KVM", Degraded, "took 101ms, natively 20ms", "bare metal",
		},
		{
			"a KVM that refuses is named", func(h *Host, _ files) { h.KVMLoop = kvm(0, errors.New("KVM_CREATE_VM: device busy")) },
			"KVM", Degraded, "KVM_CREATE_VM", "bare metal",
		},
		{
			"a binary alone cannot start sandboxes", func(_ *Host, f files) { delete(f, "/lib/agentzip-shim.so") },
			"agent and shim", Missing, "agentzip-shim.so not in /lib", "make build",
		},
		{
			"without mmdebstrap other sources work", func(h *Host, _ files) { h.LookPath = lacks("mmdebstrap") },
			"template tools", Degraded, "mmdebstrap", "apt-get install mmdebstrap",
		},
		{
			"without mke2fs there is no root image", func(h *Host, _ files) { h.LookPath = lacks("mke2fs") },
			"template tools", Missing, "mke2fs", "e2fsprogs",
		},
		{
			"without a compiler it cannot be built", func(h *Host, _ files) { h.LookPath = lacks("gcc") },
			"C compiler", Degraded, "gcc", "libzstd-dev",
		},
		{
			"2 GiB are too little for the demo", func(_ *Host, f files) { f["/proc/meminfo"] = "MemAvailable: 2097152 kB\nSwapTotal: 0 kB\n" },
			"memory", Degraded, "2.0 GiB", "more memory",
		},
		{
			"half a GiB is too little for a sandbox", func(_ *Host, f files) { f["/proc/meminfo"] = "MemAvailable: 524288 kB\n" },
			"memory", Missing, "512.0 MiB", "more memory",
		},
		{
			"a kernel without pressure stall information has MemAvailable", func(_ *Host, f files) { delete(f, "/proc/pressure/memory") },
			"memory pressure", Degraded, "not measured", "psi=1",
		},
		{
			"no /proc is named", func(_ *Host, f files) { delete(f, "/proc/meminfo") },
			"memory", Missing, "/proc/meminfo", "mount /proc",
		},
		{
			"3 GiB of disk are too little for a template",
			func(h *Host, _ files) { h.FreeDisk = func(string) (units.Bytes, error) { return 3 * units.GiB, nil } },
			"disk", Degraded, "3.0 GiB free for /state", "AGENTZIP_STATE_DIR",
		},
		{
			"a full disk stops everything",
			func(h *Host, _ files) { h.FreeDisk = func(string) (units.Bytes, error) { return units.MiB, nil } },
			"disk", Missing, "1.0 MiB", "AGENTZIP_STATE_DIR",
		},
		{
			"no cgroup at all", func(_ *Host, f files) {
				delete(f, "/sys/fs/cgroup/cgroup.controllers")
				f["/proc/self/mounts"] = "proc /proc proc rw 0 0\n"
			},
			"cgroups", Missing, "no cgroup tree", "mount -t cgroup2",
		},
		{
			"a read-only cgroup tree", func(h *Host, _ files) { h.MakeCgroup = func(string) error { return fs.ErrPermission } },
			"cgroups", Missing, "permission", "writable",
		},
		{
			"a missing controller is named", func(_ *Host, f files) { f["/sys/fs/cgroup/cgroup.controllers"] = "cpu pids" },
			"cgroups", Degraded, "without memory", "subtree_control",
		},
		{
			"swap makes figures doubtful", func(_ *Host, f files) {
				f["/proc/meminfo"] = "MemAvailable: 8000000 kB\nSwapTotal: 1048576 kB\n"
				f["/sys/module/zswap/parameters/enabled"] = "Y\n"
			},
			"swap", Degraded, "1.0 GiB, zswap on", "swapoff",
		},
		{
			"huge pages everywhere make heaps bigger",
			func(_ *Host, f files) {
				f["/sys/kernel/mm/transparent_hugepage/enabled"] = "[always] madvise never"
			},
			"huge pages", Degraded, "anonymous always", "echo madvise",
		},
		{
			"huge pages in shmem fill holes",
			func(_ *Host, f files) {
				f["/sys/kernel/mm/transparent_hugepage/shmem_enabled"] = "[always] never"
			},
			"huge pages", Degraded, "shmem always", "shmem_enabled",
		},
		{
			"KSM makes accounting doubtful", func(_ *Host, f files) { f["/sys/kernel/mm/ksm/run"] = "1\n" },
			"KSM", Degraded, "on", "echo 0",
		},
		{
			"no loop mount means no native timing", func(h *Host, _ files) {
				h.LoopMount = func(context.Context) error { return errors.New("no loop device") }
			},
			"loop mount", Degraded, "no loop device", "loop module",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h, f := goodHost()
			tt.hurt(h, f)
			rep, err := Run(t.Context(), h)
			if err != nil {
				t.Fatal(err)
			}
			got := result(t, rep, tt.check)
			if got.Level != tt.level || !strings.Contains(got.Detail, tt.detail) || !strings.Contains(got.Fix, tt.fix) || got.Why == "" {
				t.Errorf("got %+v\nwant %s with %q in the detail, %q in the fix, and a reason", got.Finding, tt.level, tt.detail, tt.fix)
			}
			if rep.Overall != tt.level {
				t.Errorf("overall %s, want %s", rep.Overall, tt.level)
			}
		})
	}
}

func TestVersionOneCgroupsAreFoundInTheMountTable(t *testing.T) {
	h, f := goodHost()
	delete(f, "/sys/fs/cgroup/cgroup.controllers")
	f["/proc/self/mounts"] = `tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,nosuid,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,nosuid,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,nosuid,pids 0 0
`
	var made []string
	h.MakeCgroup = func(controller string) error {
		made = append(made, controller)
		return nil
	}
	if got := checkCgroups(t.Context(), h); got.Level != OK || !strings.Contains(got.Detail, "v1") {
		t.Errorf("got %+v, want ok with v1", got)
	}
	if d := cmp.Diff([]string{"cpu", "memory", "pids"}, made); d != "" {
		t.Errorf("cgroups that were tried (-want +got):\n%s", d)
	}
}

func TestAReportIsCutShortWhenItsContextEnds(t *testing.T) {
	h, _ := goodHost()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the person has left")
	h.UserfaultDevice = func() error { cancel(why); return nil }
	rep, err := Run(ctx, h)
	if !errors.Is(err, why) {
		t.Errorf("error %v, want one because %v", err, why)
	}
	if len(rep.Results) == 0 || len(rep.Results) == len(checks()) {
		t.Errorf("%d of %d checks ran, want some", len(rep.Results), len(checks()))
	}
}

func TestTheJSONFormUsesWordsForLevels(t *testing.T) {
	rep := Report{Overall: Degraded, Results: []Result{{Name: "KVM", Finding: degraded("absent", "slow", "buy one"), Millis: 1.5}}}
	got, err := json.Marshal(rep)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"overall":"degraded","results":[{"name":"KVM","level":"degraded","detail":"absent","why":"slow","fix":"buy one","millis":1.5}]}`
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("JSON (-want +got):\n%s", d)
	}
}

func TestTheTextFormShowsReasonAndFixBelowTheLine(t *testing.T) {
	rep := Report{Overall: Missing, Results: []Result{{Name: "root", Finding: missing("uid 5", "needs root", "use sudo")}}}
	var b strings.Builder
	if err := rep.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"missing   root ", "uid 5", "why: needs root", "fix: use sudo", "cannot run sandboxes yet"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in:\n%s", want, b.String())
		}
	}
}

func result(t *testing.T, rep Report, name string) Result {
	t.Helper()
	for _, r := range rep.Results {
		if r.Name == name {
			return r
		}
	}
	t.Fatalf("no result %q", name)
	return Result{}
}

func lacks(program string) func(string) (string, error) {
	return func(name string) (string, error) {
		if filepath.Base(name) == program {
			return "", exec.ErrNotFound
		}
		return "/usr/bin/" + name, nil
	}
}

type outputFunc = func(context.Context, string, ...string) (string, error)

// replace changes one answer of a fake Output.
func replace(good outputFunc, from, to string) outputFunc {
	return func(ctx context.Context, name string, args ...string) (string, error) {
		out, err := good(ctx, name, args...)
		if out == from {
			out = to
		}
		return out, err
	}
}

func kvm(took time.Duration, err error) func(uint32, time.Duration) (time.Duration, error) {
	return func(uint32, time.Duration) (time.Duration, error) { return took, err }
}
