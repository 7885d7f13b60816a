package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// This file looks at kernel settings that sandboxes run with in any case, but
// that change what a sandbox costs or what a figure means.

// wantControllers are what a VMM is confined with.
var wantControllers = []string{"memory", "cpu", "pids"}

func checkCgroups(_ context.Context, h *Host) Finding {
	const why = "each VMM is confined in a cgroup, and killed through it"
	if text, err := h.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return judgeCgroups(h, "v2", strings.Fields(string(text)), []string{""}, why)
	}
	mounts, err := h.ReadFile("/proc/self/mounts")
	if err != nil {
		return missing(fmt.Sprintf("read mounts: %v", err), why, "mount /proc")
	}
	var have []string
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line) // device, mount point, type, options
		if len(f) < 4 || f[2] != "cgroup" || !strings.HasPrefix(f[1], "/sys/fs/cgroup/") {
			continue
		}
		for c := range strings.SplitSeq(f[3], ",") {
			if slices.Contains(wantControllers, c) && !slices.Contains(have, c) {
				have = append(have, c)
			}
		}
	}
	return judgeCgroups(h, "v1", have, have, why)
}

// judgeCgroups compares the controllers with those wanted and makes one cgroup
// in each of the given trees.
func judgeCgroups(h *Host, version string, have, trees []string, why string) Finding {
	if len(trees) == 0 {
		return missing("no cgroup tree is mounted", why, "mount -t cgroup2 none /sys/fs/cgroup")
	}
	for _, tree := range trees {
		if err := h.MakeCgroup(tree); err != nil {
			return missing(fmt.Sprintf("cgroup %s: making one failed: %v", version, err), why,
				"run as root; in a container, mount /sys/fs/cgroup writable")
		}
	}
	var absent []string
	for _, c := range wantControllers {
		if !slices.Contains(have, c) {
			absent = append(absent, c)
		}
	}
	if len(absent) > 0 {
		return degraded(fmt.Sprintf("cgroup %s without %s", version, strings.Join(absent, ", ")),
			"these limits of a VMM are not enforced", "enable them: the kernel's command line or the parent's cgroup.subtree_control")
	}
	return ok("cgroup %s with %s; making one works", version, strings.Join(wantControllers, ", "))
}

func checkPressure(_ context.Context, h *Host) Finding {
	text, err := h.ReadFile("/proc/pressure/memory")
	if err != nil {
		return degraded(fmt.Sprintf("not measured by this kernel (%v)", err),
			"how short the host is of memory is judged by MemAvailable alone", "boot with psi=1, on a kernel with CONFIG_PSI")
	}
	some, _, _ := strings.Cut(string(text), " avg60")
	return ok("measured: %s %% of the last 10 s", strings.Replace(some, " avg10=", " tasks waited ", 1))
}

func checkSwap(_ context.Context, h *Host) Finding {
	total, err := meminfo(h, "SwapTotal")
	if err != nil {
		return degraded(err.Error(), "whether pages can be swapped is unknown", "mount /proc")
	}
	if total == 0 {
		return ok("off")
	}
	zswap := "zswap off"
	if chosenWord(h, "/sys/module/zswap/parameters/enabled") == "Y" {
		zswap = "zswap on"
	}
	return degraded(fmt.Sprintf("%s, %s", total, zswap),
		"the kernel may swap guest pages behind the pager: figures then measure the disk", "swapoff -a while measuring")
}

func checkTHP(_ context.Context, h *Host) Finding {
	anon := chosenWord(h, "/sys/kernel/mm/transparent_hugepage/enabled")
	shmem := chosenWord(h, "/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	switch {
	case anon == "":
		return ok("not in this kernel")
	case shmem == "always" || shmem == "force":
		return degraded(fmt.Sprintf("anonymous %s, shmem %s", anon, shmem),
			"a template's memory in 2 MiB pages keeps holes resident",
			"echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled")
	case anon == "always":
		return degraded(fmt.Sprintf("anonymous %s, shmem %s", anon, orUnknown(shmem)),
			"VMM heaps are rounded up to 2 MiB pages: a bigger idle footprint",
			"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
	}
	return ok("anonymous %s, shmem %s", anon, orUnknown(shmem))
}

func checkKSM(_ context.Context, h *Host) Finding {
	text, err := h.ReadFile("/sys/kernel/mm/ksm/run")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ok("not in this kernel")
	case err != nil:
		return degraded(err.Error(), "whether KSM merges pages is unknown", "run as root")
	case strings.TrimSpace(string(text)) == "1":
		return degraded("on", "it merges private pages behind the pager: accounting counts them twice",
			"echo 0 > /sys/kernel/mm/ksm/run while measuring")
	}
	return ok("off")
}

func checkLoopMount(ctx context.Context, h *Host) Finding {
	if err := h.LoopMount(ctx); err != nil {
		return degraded(err.Error(), "the demo cannot time its commands natively on the template's root image",
			"load the loop module; in a container, allow loop devices and mounts")
	}
	return ok("an ext4 file was mounted and unmounted")
}

// chosenWord returns the word in brackets of a sysfs file such as
// "always [madvise] never", the whole text of one without brackets, "" if the
// file is not there.
func chosenWord(h *Host, path string) string {
	text, err := h.ReadFile(path)
	if err != nil {
		return ""
	}
	if _, rest, found := strings.Cut(string(text), "["); found {
		word, _, _ := strings.Cut(rest, "]")
		return word
	}
	return strings.TrimSpace(string(text))
}

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
