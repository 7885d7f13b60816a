package guestagent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestagent/boot"
)

// bootIDFile is the kernel's boot id; a clone's own is a file mounted over it.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// shutdownDelay lets the answer to Shutdown reach the host before the end
// begins. Longer only delays the end.
const shutdownDelay = 50 * time.Millisecond

// LinuxSystem is the System of a real guest. The agent must be root.
type LinuxSystem struct{}

// AddEntropy is described at System.
func (LinuxSystem) AddEntropy(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := addEntropy(int(f.Fd()), seed); err != nil {
		return fmt.Errorf("credit entropy: %w", err)
	}
	// Without this the generator would go on from the template's key until its
	// next reseeding, minutes from now (drivers/char/random.c).
	if err := unix.IoctlSetInt(int(f.Fd()), unix.RNDRESEEDCRNG, 0); err != nil {
		return fmt.Errorf("reseed generator: %w", err)
	}
	return nil
}

// SetTime is described at System.
func (LinuxSystem) SetTime(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// SetHostname is described at System. It also writes /etc/hostname and the line of /etc/hosts.
func (LinuxSystem) SetHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	if err := replaceFile("/etc/hostname", name+"\n", 0o644); err != nil {
		return err
	}
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return replaceFile("/etc/hosts", hostsWith(string(hosts), name), 0o644)
}

// hostsWith is hosts(5) content with 127.0.1.1 naming this host, as Debian does it.
func hostsWith(hosts, name string) string {
	var lines []string
	hasLocalhost := false
	for line := range strings.Lines(hosts) {
		line = strings.TrimRight(line, "\n")
		fields := strings.Fields(line)
		if len(fields) > 0 && fields[0] == "127.0.1.1" {
			continue
		}
		if len(fields) > 1 && fields[0] == "127.0.0.1" {
			hasLocalhost = true
		}
		lines = append(lines, line)
	}
	if !hasLocalhost {
		lines = append([]string{"127.0.0.1 localhost"}, lines...)
	}
	lines = append(lines, "127.0.1.1 "+name)
	return strings.Join(lines, "\n") + "\n"
}

// SetMachineID is described at System.
func (LinuxSystem) SetMachineID(id string) error {
	if err := replaceFile("/etc/machine-id", id+"\n", 0o444); err != nil {
		return err
	}
	// D-Bus keeps a copy where it is not a link to the former.
	const dbus = "/var/lib/dbus/machine-id"
	if st, err := os.Lstat(dbus); err == nil && st.Mode().IsRegular() {
		return replaceFile(dbus, id+"\n", 0o444)
	}
	return nil
}

// SetBootID is described at System.
func (LinuxSystem) SetBootID(id string) error {
	if err := os.MkdirAll("/run/agentzip", 0o755); err != nil {
		return err
	}
	const mine = "/run/agentzip/boot_id"
	// A former one is a mount over the kernel's; its file cannot be replaced
	// under it without leaving the old content visible.
	if err := unix.Unmount(bootIDFile, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount former boot id: %w", err)
	}
	if err := replaceFile(mine, id+"\n", 0o444); err != nil {
		return err
	}
	if err := unix.Mount(mine, bootIDFile, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount boot id: %w", err)
	}
	return nil
}

// Hostname is described at System.
func (LinuxSystem) Hostname() (string, error) { return os.Hostname() }

// MachineID is described at System.
func (LinuxSystem) MachineID() (string, error) { return readLine("/etc/machine-id") }

// BootID is described at System.
func (LinuxSystem) BootID() (string, error) { return readLine(bootIDFile) }

// Uptime is described at System.
func (LinuxSystem) Uptime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, err
	}
	return time.Duration(ts.Nano()), nil
}

// Quiesce is described at System.
func (LinuxSystem) Quiesce(dropCaches, compactMemory bool) error {
	debug.FreeOSMemory() // the agent's own garbage need not be in every template
	unix.Sync()
	if dropCaches {
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
			return err
		}
	}
	if compactMemory {
		if err := os.WriteFile("/proc/sys/vm/compact_memory", []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	unix.Sync()
	return nil
}

// Shutdown is described at System.
func (LinuxSystem) Shutdown(reboot bool) error {
	sig := boot.SignalPowerOff
	if reboot {
		sig = boot.SignalReboot
	}
	time.AfterFunc(shutdownDelay, func() { _ = unix.Kill(1, sig) })
	return nil
}

func readLine(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// replaceFile puts content at path in one step.
func replaceFile(path, content string, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
