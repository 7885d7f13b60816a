package template

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

func TestTheInputDigestFollowsWhatChangesTheResult(t *testing.T) {
	base := func() *Manifest {
		return &Manifest{
			Source:   Source{Digest: "debian:1"},
			Hardware: vmm.Hardware{Memory: 512 * units.MiB, VCPUs: 1, Accel: vmm.TCG, CPU: "max"},
			Host:     testHost, Kernel: KernelFacts{Package: "k", Version: "1"}, Agent: AgentFacts{SHA256: "a"}, WarmUp: []string{"true"},
		}
	}
	same := inputDigest(base(), units.GiB)
	for what, change := range map[string]func(*Manifest){
		"source": func(m *Manifest) { m.Source.Digest = "debian:2" },
		"memory": func(m *Manifest) { m.Hardware.Memory *= 2 },
		"QEMU":   func(m *Manifest) { m.Host.QEMU = "9.0.0" },
		"kernel": func(m *Manifest) { m.Kernel.Version = "2" },
		"agent":  func(m *Manifest) { m.Agent.SHA256 = "b" },
		"warmup": func(m *Manifest) { m.WarmUp = append(m.WarmUp, "true") },
		"folder": func(m *Manifest) { m.WorkDir = "/testbed" },
		"KVM":    func(m *Manifest) { m.Hardware.Accel = vmm.KVM },
	} {
		m := base()
		change(m)
		if inputDigest(m, units.GiB) == same {
			t.Errorf("another %s gives the same digest", what)
		}
	}
	if inputDigest(base(), 2*units.GiB) == same {
		t.Error("another disk size gives the same digest")
	}
	for what, change := range map[string]func(*Manifest){
		"agent's version": func(m *Manifest) { m.Agent.Version = "v2" },
		"CPU under TCG":   func(m *Manifest) { m.Host.CPU = "Other" },
		"tool versions":   func(m *Manifest) { m.Tools = map[string]string{"mke2fs": "9"} },
	} {
		m := base()
		change(m)
		if inputDigest(m, units.GiB) != same {
			t.Errorf("another %s gives another digest", what)
		}
	}
}

func TestTheOrderOfPackagesIsNotPartOfTheSource(t *testing.T) {
	a := rootfs.Debian{Suite: "bookworm", Packages: []string{"git", "python3"}}
	b := rootfs.Debian{Suite: "bookworm", Packages: []string{"python3", "git", "git"}}
	c := rootfs.Debian{Suite: "bookworm", Packages: []string{"python3", "git"}, Setup: []string{"true"}}
	if a.Digest() != b.Digest() {
		t.Error("the order of packages changes the digest")
	}
	if a.Digest() == c.Digest() {
		t.Error("a set-up script does not change the digest")
	}
}

func TestBuildRefusesBadDescriptionsBeforeDoingAnything(t *testing.T) {
	for _, tt := range []struct {
		name string
		spec BuildSpec
		want string
	}{
		{"a bad name", BuildSpec{Name: "A B"}, "bad template name"},
		{"no source", BuildSpec{Name: "x"}, "0 sources"},
		{"two sources", BuildSpec{Name: "x", Source: Source{OCI: "debian:12", Directory: "/x"}}, "2 sources"},
		{"no suite", BuildSpec{Name: "x", Source: Source{Debian: &rootfs.Debian{}}}, "no Debian suite"},
	} {
		_, err := testStore(t).Build(t.Context(), tt.spec, nil)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q in it", tt.name, err, tt.want)
		}
	}
}

func TestBuiltinsAreComplete(t *testing.T) {
	for _, name := range BuiltinNames() {
		spec, err := Builtin(name)
		if err != nil {
			t.Fatal(err)
		}
		if spec.Name != name || spec.Source.check() != nil || len(spec.WarmUp) == 0 {
			t.Errorf("%s: incomplete: %+v", name, spec)
		}
	}
	if _, err := Builtin("tornadoo"); err == nil || !strings.Contains(err.Error(), "base, code-interpreter-v1, tornado") {
		t.Errorf("got %v, want a list of built-in templates", err)
	}
}

func TestAGuestTooSmallToBootIsRefusedBeforeAnythingIsBuilt(t *testing.T) {
	spec := BuildSpec{Name: "tiny", Source: Source{Directory: t.TempDir()}, Agent: "agent", Launcher: refuser{}, Hardware: vmm.Hardware{Memory: 64 * units.MiB}}
	if err := spec.fill(); err == nil || !strings.Contains(err.Error(), "128.0 MiB or more") {
		t.Errorf("got %v, want the least memory there must be", err)
	}
}

// refuser starts nothing.
type refuser struct{}

func (refuser) Start(context.Context, vmm.Spec) (vmm.Machine, error) {
	return nil, errors.New("not in this test")
}
