package vmm

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/units"
)

// machineArgs returns what the guest can see of a command line: machine, CPU, memory
// size and devices, in order.
func machineArgs(args []string) []string {
	var seen []string
	for i, a := range args {
		if slices.Contains([]string{"-M", "-cpu", "-smp", "-m", "-device", "-global"}, a) {
			seen = append(seen, a+" "+args[i+1])
		}
	}
	return seen
}

func TestBothModesShowTheGuestTheSameHardware(t *testing.T) {
	for _, hw := range []Hardware{
		{Memory: 512 * units.MiB},
		{Memory: units.GiB, VCPUs: 2, Network: true},
		{Memory: units.GiB},
		{Memory: units.GiB, Network: true, Reporting: true},
		{Memory: units.GiB, Accel: KVM, CPU: "Skylake-Server"},
	} {
		hw, err := hw.fill()
		if err != nil {
			t.Fatal(err)
		}
		l := layout{id: "x", hw: hw, root: 900 * units.MiB, disk: true, kernel: true, initrd: true, cmdline: "quiet"}
		boot, clone := l, l
		boot.mode, clone.mode = Boot, Clone
		if diff := cmp.Diff(machineArgs(boot.args()), machineArgs(clone.args())); diff != "" {
			t.Errorf("%+v: boot and clone differ (-boot +clone):\n%s", hw, diff)
		}
		if slices.Contains(clone.args(), "-kernel") {
			t.Error("a clone gets a kernel, which only fills its VMM's heap")
		}
	}
}

func TestReportingChangesNothingElseThatTheGuestSees(t *testing.T) {
	hw, err := Hardware{Memory: 512 * units.MiB, Network: true}.fill()
	if err != nil {
		t.Fatal(err)
	}
	l := layout{id: "x", hw: hw, mode: Clone, root: 900 * units.MiB, disk: true}
	without := machineArgs(l.args())
	l.hw.Reporting = true
	with := machineArgs(l.args())
	want := append(slices.Clone(without), "-device virtio-balloon-pci,id=balloon,free-page-reporting=on,page-poison=on")
	if diff := cmp.Diff(want, with); diff != "" {
		t.Errorf("with reporting (-want +got):\n%s", diff)
	}
}

func TestNoVMMGetsDirectIOOrAWritableTemplate(t *testing.T) {
	hw, err := Hardware{Memory: 512 * units.MiB, Network: true}.fill()
	if err != nil {
		t.Fatal(err)
	}
	args := layout{id: "x", hw: hw, mode: Clone, root: 900 * units.MiB, disk: true}.args()
	all := strings.Join(args, " ")
	for _, bad := range []string{"cache.direct=on", "io_uring", "aio=native", "vhost", "readonly=off"} {
		if strings.Contains(all, bad) {
			t.Errorf("the command line has %s", bad)
		}
	}
	for _, good := range []string{
		"-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny", "aio=threads,cache.direct=off",
		"mem-path=/proc/self/fd/6,share=off", "mem-path=/proc/self/fd/7,share=on,readonly=on", "-no-reboot", "-nodefaults",
		"werror=report,rerror=report",
	} {
		if !strings.Contains(all, good) {
			t.Errorf("the command line lacks %s", good)
		}
	}
}
