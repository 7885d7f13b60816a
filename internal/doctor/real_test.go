package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// The tests of this file touch the kernel they run on.

func TestTheProbesWorkOnThisMachine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	before := cgroupsAndTemp(t)
	rep, err := Run(t.Context(), RealHost(t.TempDir(), t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rep.Results {
		t.Logf("%-8s %-16s %s", r.Level, r.Name, r.Detail)
	}
	// What AgentZip's own tests need, so that a machine that runs them has it.
	for _, name := range []string{"platform", "root", "userfaultfd", "/dev/userfaultfd", "PAGEMAP_SCAN", "cgroups"} {
		if r := result(t, rep, name); r.Level == Missing {
			t.Errorf("%s: %+v", name, r.Finding)
		}
	}
	if r := result(t, rep, "agent and shim"); r.Level != Missing {
		t.Errorf("an empty folder passes for one with the agent and the shim: %+v", r.Finding)
	}
	if after := cgroupsAndTemp(t); after != before {
		t.Errorf("%d cgroups and folders of the doctor are left, %d before", after, before)
	}
}

func TestAFaultNobodyServesIsAnErrorNotAHang(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	p, err := newFaultProbe()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	done := make(chan error, 1)
	go func() {
		_, err := p.touch()
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("a touch that nobody serves returned: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	// What serve does when its time is over.
	if err := p.unregister(probePages * units.PageSize); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err == nil {
			t.Error("the probe took an unserved fault for a served one")
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the touch still waits after the registration is gone")
	}
}

func TestAWrongAnswerToAFaultIsNoticed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	p, err := newFaultProbe()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	var wrong units.Page
	p.install.Store(&wrong) // zeros where the template has 'T'
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { served <- p.serve(ctx) }()
	if _, err := p.touch(); err == nil {
		t.Error("zeros in place of the template's page went unnoticed")
	}
	cancel()
	if err := <-served; !errors.Is(err, context.Canceled) {
		t.Errorf("serving ended with %v", err)
	}
}

func TestFreeDiskLooksAtTheNearestFolderThatExists(t *testing.T) {
	dir := t.TempDir()
	want, err := freeDisk(dir)
	if err != nil {
		t.Fatal(err)
	}
	got, err := freeDisk(filepath.Join(dir, "not", "there", "yet"))
	if err != nil {
		t.Fatal(err)
	}
	// Others write to this disk meanwhile.
	if diff := got - want; diff > units.GiB || diff < -units.GiB {
		t.Errorf("free below a folder that is not there: %s, at its parent %s", got, want)
	}
}

func TestTheLoopEndsInTimeOrSaysThatThereIsNoKVM(t *testing.T) {
	start := time.Now()
	took, err := timeLongModeLoop(loopCount, time.Second)
	if waited := time.Since(start); waited > 4*time.Second {
		t.Errorf("gave up after %s, want about a second", waited)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		t.Skip("no /dev/kvm here")
	case errors.Is(err, errVCPUSlow):
		t.Log("this /dev/kvm emulates")
	case err != nil:
		t.Error(err)
	case took < time.Millisecond:
		t.Errorf("%d iterations in %s: the loop cannot have run", loopCount, took)
	}
}

func cgroupsAndTemp(t *testing.T) int {
	t.Helper()
	n := 0
	for _, pattern := range []string{"/sys/fs/cgroup/agentzip-doctor-*", "/sys/fs/cgroup/*/agentzip-doctor-*", filepath.Join(os.TempDir(), "agentzip-doctor-*")} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		n += len(found)
	}
	return n
}
