package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/agentzip/agentzip/internal/template/tool"
	"github.com/agentzip/agentzip/internal/units"
)

// SetupOptions say what Setup is to provide.
type SetupOptions struct {
	// Templates are names of built-in templates; nil means none.
	Templates []string
	// Launcher and Agent as in BuildSpec.
	Launcher func() (Launcher, error) // called after QEMU is installed
	Agent    string
}

// hostPackages are the Debian packages a host needs, each with a program that shows it is
// there. The program decides, not dpkg: people bring their own QEMU.
var hostPackages = []struct{ name, program string }{
	{"qemu-system-x86", qemuProgram},
	{"mmdebstrap", "mmdebstrap"},
	{"e2fsprogs", "mke2fs"},
}

const (
	needMemory = 2 * units.GiB // a build's guest, its VMM and page cache for its files
	needDisk   = units.GiB     // for packages; Build asks for what it needs itself, which depends on what is cached
)

// Setup makes this host able to run sandboxes: checks it, installs missing packages,
// builds the templates. Everything that is done already is skipped, so it can be called each time.
// Errors are one line that says what is missing and how to get it.
func (s *Store) Setup(ctx context.Context, o SetupOptions, report Progress) error {
	for _, name := range o.Templates {
		if _, err := Builtin(name); err != nil {
			return err
		}
	}
	if err := checkHost(s.dir); err != nil {
		return err
	}
	if err := installPackages(ctx, report); err != nil {
		return err
	}
	if len(o.Templates) == 0 {
		return nil
	}
	launcher, err := o.Launcher()
	if err != nil {
		return err
	}
	for _, name := range o.Templates {
		spec, err := Builtin(name)
		if err != nil {
			return err
		}
		spec.Launcher, spec.Agent = launcher, o.Agent
		t, err := s.Build(ctx, spec, report)
		if err != nil {
			return err
		}
		if err := t.Close(); err != nil {
			return fmt.Errorf("close template %s: %w", name, err)
		}
	}
	return nil
}

func checkHost(dir string) error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fmt.Errorf("this is %s/%s: sandboxes need Linux on x86-64", runtime.GOOS, runtime.GOARCH)
	}
	if os.Geteuid() != 0 {
		return errors.New("not root: run it again as root (sudo)")
	}
	have, err := memoryAvailable()
	if err != nil {
		return err
	}
	if have < needMemory {
		return fmt.Errorf("not enough memory: %v available, %v needed; stop other programs or use a larger host", have, needMemory)
	}
	return needSpace(dir, needDisk)
}

func memoryAvailable() (units.Bytes, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read available memory: %w", err)
	}
	for l := range strings.SplitSeq(string(data), "\n") {
		var kib int64
		if n, _ := fmt.Sscanf(l, "MemAvailable: %d kB", &kib); n == 1 {
			return units.Bytes(kib) * units.KiB, nil
		}
	}
	return 0, errors.New("read available memory: /proc/meminfo does not tell")
}

// missingPackages lists the packages whose program is not there.
func missingPackages() []string {
	var missing []string
	for _, p := range hostPackages {
		if !tool.Have(p.program) {
			missing = append(missing, p.name)
		}
	}
	return missing
}

// installPackages installs what is missing with apt.
func installPackages(ctx context.Context, report Progress) error {
	missing := missingPackages()
	if len(missing) == 0 {
		report.Done("packages", "all there")
		return nil
	}
	names := strings.Join(missing, " ")
	if !tool.Have("apt-get") {
		return fmt.Errorf("missing %s, and this is no Debian system: install them with its package manager", names)
	}
	pulse := report.Heartbeat(ctx, "packages", "")
	defer pulse.Stop()
	pulse.Set(0, 0, "installing %s", names)
	install := append([]string{"install", "-q", "-y", "--no-install-recommends", "-o", "Dpkg::Lock::Timeout=300"}, missing...)
	log := tool.Command{Name: "apt-get", Args: install, OnLine: func(l string) {
		if strings.HasPrefix(l, "Setting up ") {
			pulse.Set(0, 0, "%s", strings.ToLower(l[:1])+l[1:])
		}
	}}
	if err := tool.Run(ctx, log); err == nil {
		report.Done("packages", "installed %s", names)
		return nil
	}
	// Old or missing package lists are the usual reason.
	if err := tool.Run(ctx, tool.Command{Name: "apt-get", Args: []string{"update", "-q"}}); err != nil && ctx.Err() == nil {
		return fmt.Errorf("cannot install %s: the package mirror does not answer (check the network and /etc/apt/sources.list*): %w", names, err)
	}
	if err := tool.Run(ctx, log); err != nil {
		return fmt.Errorf("cannot install %s: %w", names, err)
	}
	if still := missingPackages(); len(still) > 0 {
		return fmt.Errorf("apt installed %s and their programs are not there: %s", names, strings.Join(still, " "))
	}
	report.Done("packages", "installed %s", names)
	return nil
}
