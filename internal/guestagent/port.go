package guestagent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// portWait bounds the wait for the link's port; it appears with its module,
	// long before the agent. Longer only delays the message on the console.
	portWait = 10 * time.Second
	// hostRecheck is how often a port without a host is looked at although no
	// event came. It is a guard against a missed event, not the mechanism, and
	// it runs only while no host is connected. Longer: a missed event costs more.
	hostRecheck = 500 * time.Millisecond
)

// devicePort is a virtio-serial port of the guest kernel (drivers/char/virtio_console.c).
type devicePort struct {
	*os.File
}

// OpenPort opens the virtio-serial port named name, waiting for it to appear.
// The kernel lets only one process have it open.
func OpenPort(name string) (Port, error) {
	deadline := time.Now().Add(portWait)
	for {
		device, err := findPort("/sys/class/virtio-ports", name)
		if err == nil {
			// O_NONBLOCK: the runtime's poller waits for it, so that deadlines work.
			f, err := os.OpenFile(device, os.O_RDWR|unix.O_NONBLOCK, 0)
			if err == nil {
				return &devicePort{f}, nil
			}
			// EBUSY: an agent that died just now has not let go yet.
			if !errors.Is(err, unix.EBUSY) && !errors.Is(err, os.ErrNotExist) {
				return nil, fmt.Errorf("open link port: %w", err)
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("find virtio-serial port %q: not there or busy after %v", name, portWait)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// findPort returns the device of the port that sysfs lists under name. There is
// no udev in the guest to make /dev/virtio-ports.
func findPort(class, name string) (string, error) {
	files, err := filepath.Glob(filepath.Join(class, "*", "name"))
	if err != nil {
		return "", err
	}
	for _, f := range files {
		content, err := os.ReadFile(f)
		if err == nil && strings.TrimSpace(string(content)) == name {
			return filepath.Join("/dev", filepath.Base(filepath.Dir(f))), nil
		}
	}
	return "", fmt.Errorf("no port named %q in %s", name, class)
}

// AwaitHost returns when a host is connected. The kernel wakes the port's
// pollers when the host's end opens, so this costs nothing while it waits.
func (p *devicePort) AwaitHost() error {
	raw, err := p.SyscallConn()
	if err != nil {
		return err
	}
	defer p.SetReadDeadline(time.Time{}) //nolint:errcheck // a closed port shows at the next call
	for {
		if err := p.SetReadDeadline(time.Now().Add(hostRecheck)); err != nil {
			return err
		}
		connected := false
		err := raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			connected = err == nil && (n == 0 || fds[0].Revents&unix.POLLHUP == 0)
			return connected
		})
		if connected {
			return nil
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
}
