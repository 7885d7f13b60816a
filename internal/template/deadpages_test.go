package template

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

func TestEachKindOfDeadPagesHasItsCommandLine(t *testing.T) {
	const clears, small = "init_on_free=1", "percpu_pagelist_high_fraction="
	for _, tt := range []struct {
		mode                   DeadPages
		clears, reports, small bool
	}{{DeadZero, true, false, false}, {DeadReport, false, true, true}, {DeadBoth, true, true, false}, {DeadOff, false, false, false}} {
		line := tt.mode.cmdline()
		if strings.Contains(line, clears) != tt.clears || tt.mode.reports() != tt.reports || strings.Contains(line, small) != tt.small || (tt.mode.setUp() != "") != tt.small {
			t.Errorf("%s: %q, device %v, set-up %q; want cleared %v, reported %v, small blocks %v",
				tt.mode, line, tt.mode.reports(), tt.mode.setUp(), tt.clears, tt.reports, tt.small)
		}
	}
}

// Templates that are there must not be built again because of a flag nobody gave.
func TestTheCommandLineOfTheDefaultIsThatOfTemplatesFromBeforeTheChoice(t *testing.T) {
	const before = "console=ttyS0 quiet panic=-1 reboot=t mitigations=off init_on_free=1 random.trust_cpu=on" +
		" nowatchdog audit=0 apparmor=0 cryptomgr.notests no_timer_check i8042.noaux i8042.nokbd tsc=reliable"
	if got := DefaultDeadPages.cmdline(); got != before {
		t.Errorf("got  %q\nwant %q", got, before)
	}
	hw, err := json.Marshal(vmm.Hardware{Memory: 512 * units.MiB, VCPUs: 1, Accel: vmm.TCG, CPU: "max"})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"memory":536870912,"vcpus":1,"accel":"tcg","cpu":"max","network":false}`; string(hw) != want {
		t.Errorf("hardware %s, want %s", hw, want)
	}
	if got := DeadPages("").Mode(); got != DeadZero {
		t.Errorf("a manifest that says nothing means %s, want %s", got, DeadZero)
	}
}

func TestAnUnknownKindOfDeadPagesIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	spec := BuildSpec{Name: "x", Source: Source{Directory: t.TempDir()}, Agent: "agent", Launcher: refuser{}, DeadPages: "balloon"}
	if err := spec.fill(); !errors.Is(err, ErrDeadPages) || !strings.Contains(err.Error(), "zero, report, both or off") {
		t.Errorf("got %v, want ErrDeadPages and what there is", err)
	}
	spec.DeadPages = ""
	if err := spec.fill(); err != nil || spec.DeadPages != DefaultDeadPages || spec.Hardware.Reporting != DefaultDeadPages.reports() {
		t.Errorf("nothing said: %v, %q, %+v", err, spec.DeadPages, spec.Hardware)
	}
}
