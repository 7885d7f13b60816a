package vmm

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/agentzip/agentzip/internal/units"
)

// LinkPort is the name of the virtio-serial port that Link talks to: the guest
// finds it as /dev/virtio-ports/agentzip.link.
const LinkPort = "agentzip.link"

// rootAlign is what the size of a root image must be a multiple of: the guest
// refuses a persistent memory region that ends within a 2 MiB section.
const rootAlign = 2 * units.MiB

// deviceMemory is the guest's physical address of the root image: `-M pc` puts device
// memory at 4 GiB if no RAM is above, which Hardware.fill sees to.
const deviceMemory = "4G"

// tbSize is the size of TCG's translation buffer, in MiB. It is the largest part
// of a TCG VMM's own memory; the default would be a quarter of a gigabyte.
const tbSize = 32

// Descriptors a VMM inherits, by their number in the VMM. 0 is /dev/null, 1 and 2
// are its log. An absent one leaves a gap.
const (
	fdQMP = iota + 3
	fdConsole
	fdLink
	fdMemory
	fdRoot
	fdDisk
	fdKernel
	fdInitrd
	fdShimLib
	fdShim
	fdUserfault
	fdCount
)

// diskSet is the number of QEMU's descriptor set that holds the disk; stateSet
// the one a state file is put into for the time of a save. Through a set QEMU
// duplicates the descriptor, while opening /proc/self/fd would need permission.
const (
	diskSet   = 1
	stateSet  = 2
	swapSet   = 3
	backupSet = 4
)

func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// layout is what the command line needs to know beside the Hardware.
type layout struct {
	id      string
	hw      Hardware
	mode    Mode
	root    units.Bytes // size of the root image; 0: none
	disk    bool
	kernel  bool
	initrd  bool
	cmdline string
}

// args returns QEMU's arguments. Everything the guest sees is said here, once, in
// one order for both modes: PCI addresses follow the order of the devices, and
// device state loads only into equal devices.
func (l layout) args() []string {
	accel := string(l.hw.Accel)
	if l.hw.Accel == TCG {
		accel += ",thread=multi,tb-size=" + strconv.Itoa(tbSize)
	}
	mib := func(b units.Bytes) string { return strconv.FormatInt(int64(b/units.MiB), 10) + "M" }
	// Device memory is laid out between size and maxmem: room for the root image
	// and its alignment.
	maxmem := (l.hw.Memory+l.root+2*units.GiB-1)/units.GiB*units.GiB + units.GiB
	machine := "pc,memory-backend=mem,vmport=off,hpet=on,suppress-vmdesc=on,dump-guest-core=off"
	if l.root > 0 {
		machine += ",nvdimm=on"
	}
	share := "on"
	if l.mode == Clone {
		share = "off"
	}
	a := []string{
		"-name", l.id + ",process=agentzip-vm,debug-threads=on",
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-S",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-M", machine,
		"-global", "migration.send-configuration=off",
		"-accel", accel, "-cpu", l.hw.CPU, "-smp", strconv.Itoa(l.hw.VCPUs),
		"-m", fmt.Sprintf("%s,slots=2,maxmem=%s", mib(l.hw.Memory), mib(maxmem)),
		"-object", fmt.Sprintf("memory-backend-file,id=mem,size=%s,mem-path=%s,share=%s,merge=off", mib(l.hw.Memory), procFD(fdMemory), share),
		"-chardev", "socket,id=qmp,fd=" + strconv.Itoa(fdQMP), "-mon", "chardev=qmp,mode=control",
		"-chardev", "socket,id=console,fd=" + strconv.Itoa(fdConsole), "-serial", "chardev:console",
		"-chardev", "socket,id=link,fd=" + strconv.Itoa(fdLink),
		"-device", "pvpanic",
		"-device", "virtio-serial-pci,id=serial,max_ports=2",
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=link,id=" + linkDevice + ",name=" + LinkPort,
		"-object", "rng-builtin,id=entropy", "-device", "virtio-rng-pci,rng=entropy",
	}
	if l.root > 0 {
		// Not virtio-pmem: QEMU 7.2 does not save its state, so a flush of a clone is
		// never answered, and the guest's own reboot and power-off, which flush all
		// persistent memory, hang for ever. An NVDIMM has no queue and no state to lose.
		// Unarmed means read-only.
		a = append(a,
			"-object", fmt.Sprintf("memory-backend-file,id=root,size=%s,mem-path=%s,share=on,readonly=on", mib(l.root), procFD(fdRoot)),
			"-device", "nvdimm,memdev=root,id=root-device,unarmed=on")
	}
	if l.disk {
		// Never O_DIRECT or io_uring: they pin guest pages (docs/architecture.md,
		// invariant 7). Flushes are ignored: a sandbox does not outlive its host's crash.
		a = append(a,
			"-add-fd", fmt.Sprintf("set=%d,fd=%d", diskSet, fdDisk),
			"-blockdev", fmt.Sprintf("driver=file,node-name=diskfile,filename=/dev/fdset/%d,aio=threads,cache.direct=off,cache.no-flush=on,discard=unmap,locking=off,auto-read-only=off", diskSet),
			"-blockdev", "driver=raw,node-name=disk,file=diskfile,cache.direct=off,cache.no-flush=on,discard=unmap,detect-zeroes=off",
			// QEMU's default would stop the machine, for ever, when the host's disk is full.
			"-device", "virtio-blk-pci,drive=disk,discard=on,write-zeroes=on,werror=report,rerror=report")
	}
	if l.hw.Network {
		a = append(a, "-netdev", "user,id="+netDevice+",restrict=off,ipv6=off", "-device", "virtio-net-pci,netdev="+netDevice+",romfile=")
	}
	if l.hw.Reporting {
		// Last, so that the others are where they are without it. Page poison stays on: with
		// it the guest says that freed pages are zeros (init_on_free), else it would not report.
		a = append(a, "-device", "virtio-balloon-pci,id=balloon,free-page-reporting=on,page-poison=on")
	}
	// A clone's kernel is in its memory; QEMU would only keep a copy on its heap.
	if l.mode == Boot && l.kernel {
		cmdline := l.cmdline
		if l.root > 0 {
			// Described as an NVDIMM (module nfit) the image has no struct pages and
			// Linux refuses DAX; as memory of the e820 map it has them.
			cmdline += fmt.Sprintf(" memmap=%s!%s", mib(l.root), deviceMemory)
		}
		a = append(a, "-kernel", procFD(fdKernel), "-append", cmdline)
		if l.initrd {
			a = append(a, "-initrd", procFD(fdInitrd))
		}
	}
	if l.mode == Clone {
		a = append(a, "-incoming", "defer")
	}
	return a
}

// linkDevice is the QEMU id of the link's port, netDevice that of the network's host end.
const (
	linkDevice = "link0"
	netDevice  = "net"
)

// fill replaces the zero values of a Hardware by their meaning and checks the rest.
func (h Hardware) fill() (Hardware, error) {
	if h.VCPUs == 0 {
		h.VCPUs = 1
	}
	if h.Accel == "" {
		h.Accel = TCG
	}
	if h.CPU == "" {
		h.CPU = "max"
		if h.Accel == KVM {
			h.CPU = "host"
		}
	}
	switch {
	case h.Memory < 64*units.MiB || h.Memory%(2*units.MiB) != 0:
		return h, fmt.Errorf("guest memory of %s: must be at least 64 MiB and a multiple of 2 MiB", h.Memory)
	case h.Memory > 3*units.GiB:
		// Above that `-M pc` splits memory around the PCI hole.
		return h, fmt.Errorf("guest memory of %s: more than 3 GiB is not supported", h.Memory)
	case h.VCPUs < 1 || h.VCPUs > 64:
		return h, fmt.Errorf("%d vCPUs: must be 1 to 64", h.VCPUs)
	case h.Accel != TCG && h.Accel != KVM:
		return h, fmt.Errorf("accelerator %q: must be tcg or kvm", h.Accel)
	case strings.ContainsAny(h.CPU, " \n"):
		return h, fmt.Errorf("CPU model %q: must have no spaces", h.CPU)
	}
	return h, nil
}
