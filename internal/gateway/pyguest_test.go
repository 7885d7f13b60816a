package gateway_test

import (
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestagent"
	"github.com/agentzip/agentzip/internal/guestlink"
)

// port is a virtio-serial port whose host never leaves.
type port struct{ net.Conn }

func (port) AwaitHost() error { return nil }

// paperGuest is a system that believes everything.
type paperGuest struct{}

func (paperGuest) AddEntropy([]byte) error        { return nil }
func (paperGuest) SetTime(time.Time) error        { return nil }
func (paperGuest) SetHostname(string) error       { return nil }
func (paperGuest) SetMachineID(string) error      { return nil }
func (paperGuest) SetBootID(string) error         { return nil }
func (paperGuest) SetInternet(bool) error         { return nil }
func (paperGuest) Hostname() (string, error)      { return "paper", nil }
func (paperGuest) MachineID() (string, error)     { return "", nil }
func (paperGuest) BootID() (string, error)        { return "", nil }
func (paperGuest) Uptime() (time.Duration, error) { return time.Minute, nil }
func (paperGuest) Quiesce(bool, bool) error       { return nil }
func (paperGuest) Shutdown(bool) error            { return nil }

// startAgent runs the real agent in this process; "user" is whoever runs the test.
func startAgent(t *testing.T, home string) (http.RoundTripper, func()) {
	t.Helper()
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	server := guestagent.New(guestagent.Options{
		System: paperGuest{}, Version: "test",
		SettingsFile: filepath.Join(dir, "settings.json"), MarkDir: filepath.Join(dir, "marks"),
		Lookup: func(name string) (guestagent.Account, error) {
			if name != "user" && name != me.Username {
				return guestagent.Account{}, user.UnknownUserError(name)
			}
			return guestagent.Account{Name: me.Username, Home: home, Own: true}, nil
		},
	})
	ours, theirs := socketPair(t)
	l := guestagent.NewListener(port{theirs})
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	client := guestlink.New(ours)
	return client.Transport(), func() {
		client.Close()
		server.Drain(time.Second)
		l.Close()
		<-served
		server.Close()
	}
}

func socketPair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return conns[0], conns[1]
}
