package template

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/agentzip/agentzip/internal/template/tool"
	"github.com/agentzip/agentzip/internal/vmm"
)

// HostFacts are what device state and guest code of a template depend on.
type HostFacts struct {
	QEMU string `json:"qemu"` // upstream version, "7.2.22"
	// CPU identifies the host's processor: name and a digest of its features. It matters only
	// to templates that run on hardware; TCG's CPU is the same everywhere.
	CPU string `json:"cpu"`
}

// qemuProgram is what vmm starts; here it is only asked for its version.
const qemuProgram = "qemu-system-x86_64"

var qemuVersion = regexp.MustCompile(`version (\d+\.\d+(\.\d+)*)`)

// probeHost asks this host.
func probeHost(ctx context.Context) (HostFacts, error) {
	out, err := tool.Output(ctx, tool.Command{Name: qemuProgram, Args: []string{"--version"}})
	if err != nil {
		return HostFacts{}, fmt.Errorf("ask QEMU for its version (is it installed? run `agentzip setup`): %w", err)
	}
	v := qemuVersion.FindStringSubmatch(out)
	if v == nil {
		return HostFacts{}, fmt.Errorf("ask QEMU for its version: it says %q", strings.TrimSpace(out))
	}
	cpu, err := cpuIdentity("/proc/cpuinfo")
	if err != nil {
		return HostFacts{}, err
	}
	return HostFacts{QEMU: v[1], CPU: cpu}, nil
}

// cpuIdentity reads the first processor's name and features.
func cpuIdentity(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("identify CPU: %w", err)
	}
	defer func() { _ = f.Close() }()
	var name, flags string
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() && s.Text() != "" {
		k, v, _ := strings.Cut(s.Text(), ":")
		switch strings.TrimSpace(k) {
		case "model name":
			name = strings.TrimSpace(v)
		case "flags":
			flags = strings.TrimSpace(v)
		}
	}
	if err := s.Err(); err != nil {
		return "", fmt.Errorf("identify CPU: %w", err)
	}
	sum := sha256.Sum256([]byte(flags))
	return name + " " + hex.EncodeToString(sum[:4]), nil
}

// fits says why a template cannot run on this host, or returns nil.
func (m *Manifest) fits(here HostFacts) error {
	rebuild := fmt.Sprintf("build it again here (agentzip template build %s)", m.Name)
	if m.Host.QEMU != here.QEMU {
		return fmt.Errorf("template %s was saved by QEMU %s and this host has QEMU %s, which may read its device state wrongly: %s: %w",
			m.Name, m.Host.QEMU, here.QEMU, rebuild, ErrOtherHost)
	}
	if m.Hardware.Accel != vmm.KVM {
		return nil
	}
	if m.Host.CPU != here.CPU {
		return fmt.Errorf("template %s was built on CPU %q and this host has %q; its programs may use instructions that are missing here: %s: %w",
			m.Name, m.Host.CPU, here.CPU, rebuild, ErrOtherHost)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return fmt.Errorf("template %s was built for KVM and this host has no /dev/kvm: %s: %w", m.Name, rebuild, ErrOtherHost)
	}
	return nil
}
