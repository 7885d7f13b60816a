package template

import (
	"errors"
	"fmt"
	"strings"
)

// DeadPages says how a template's guests deal with pages they have freed, so that nobody
// encodes what nobody will read. docs/adr/0010 has the measurements.
type DeadPages string

const (
	// DeadZero clears pages as the guest frees them (init_on_free), and a pass drops pages of
	// zeros without encoding.
	DeadZero DeadPages = "zero"
	// DeadReport has the guest report free pages to a balloon device, some seconds after it
	// freed them; the pager drops them then. Until then they have their content and are encoded.
	DeadReport DeadPages = "report"
	// DeadBoth clears pages at once, and reports blocks of 2 MiB: memory that is freed in the
	// middle of a long call goes then, not when it ends.
	DeadBoth DeadPages = "both"
	// DeadOff leaves them as the guest's kernel does by default. For measurements.
	DeadOff DeadPages = "off"
)

// DefaultDeadPages is what a template gets that asks for nothing.
const DefaultDeadPages = DeadZero

// ErrDeadPages: a word that is none of the four.
var ErrDeadPages = errors.New("dead pages: use zero, report, both or off")

func (d DeadPages) check() error {
	switch d {
	case DeadZero, DeadReport, DeadBoth, DeadOff:
		return nil
	}
	return fmt.Errorf("%q: %w", string(d), ErrDeadPages)
}

// Mode returns the word, with what no word means.
func (d DeadPages) Mode() DeadPages {
	if d == "" {
		return DeadZero
	}
	return d
}

func (d DeadPages) clears() bool  { return d == DeadZero || d == DeadBoth }
func (d DeadPages) reports() bool { return d == DeadReport || d == DeadBoth }

// kernelCmdline of every template, with DeadZero or what takes its place after it.
//
//	panic=-1 reboot=t     a dead guest ends at once, as a reset the VMM sees
//	mitigations=off       one tenant per guest; under TCG they cost and protect nothing
//	init_on_free=1        DeadZero: freed pages are zeros; they cost the pool nothing (design.md, section 3)
//	random.trust_cpu=on   no waiting for entropy at boot; clones get their own later
//	rest                  no probing of hardware a guest has not, no periodic work
const (
	kernelCmdlineStart = "console=ttyS0 quiet panic=-1 reboot=t mitigations=off"
	kernelCmdlineEnd   = " random.trust_cpu=on" +
		" nowatchdog audit=0 apparmor=0 cryptomgr.notests no_timer_check i8042.noaux i8042.nokbd tsc=reliable"
)

// cmdline returns the kernel's command line.
func (d DeadPages) cmdline() string {
	var b strings.Builder
	b.WriteString(kernelCmdlineStart)
	if d.clears() {
		b.WriteString(" init_on_free=1")
	}
	b.WriteString(kernelCmdlineEnd)
	if d == DeadReport {
		// No more than 250 pages in the list of a CPU, where no page is reported. The kernel's
		// own measure for one CPU and 400 MiB is 24 MiB.
		b.WriteString(" sysctl.vm.percpu_pagelist_high_fraction=1000")
	}
	return b.String()
}

// setUp returns a shell line that root runs in the guest before its warm-up; "" is none. A
// guest reports blocks of 2 MiB, which DeadBoth leaves at that. DeadReport wants single pages;
// on the command line the order has no effect, because the balloon's driver sets it (Linux 6.1,
// page_reporting_register).
func (d DeadPages) setUp() string {
	if d != DeadReport {
		return ""
	}
	return "echo 0 > /sys/module/page_reporting/parameters/page_reporting_order"
}
