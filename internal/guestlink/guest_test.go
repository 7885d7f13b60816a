package guestlink_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestagent"
	"github.com/agentzip/agentzip/internal/guestlink"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// cable is a virtio-serial port without a VM. Hosts come and go; the guest's
// end stays.
//
// A loud cable tells the guest when a host leaves (the port reads as ended, as
// QEMU does when the guest looks in time). A quiet one does not: bytes of
// successive hosts are one stream, and the guest's bytes in flight reach
// whichever host is there.
type cable struct {
	quiet bool

	guest net.Conn // quiet: the guest's end; loud: nil
	inner net.Conn // quiet: where hosts are patched in

	mu      sync.Mutex
	host    net.Conn      // guarded by mu: guest-side end of the connected host
	plugged chan struct{} // guarded by mu: closed by the next plug
	closed  chan struct{}
	pumps   sync.WaitGroup
}

func newCable(t testing.TB, quiet bool) *cable {
	t.Helper()
	c := &cable{quiet: quiet, plugged: make(chan struct{}), closed: make(chan struct{})}
	if quiet {
		c.guest, c.inner = socketPair(t)
		c.pumps.Go(func() { // guest to whichever host
			buf := make([]byte, 4096)
			for {
				n, err := c.inner.Read(buf)
				if err != nil {
					return
				}
				if h := c.awaitHost(); h != nil {
					_, _ = h.Write(buf[:n])
				}
			}
		})
	}
	return c
}

func socketPair(t testing.TB) (net.Conn, net.Conn) {
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

// plug connects a new host and returns its end.
func (c *cable) plug(t testing.TB) net.Conn {
	t.Helper()
	ours, theirs := socketPair(t)
	c.mu.Lock()
	if c.host != nil {
		c.host.Close()
	}
	c.host = ours
	close(c.plugged)
	c.plugged = make(chan struct{})
	c.mu.Unlock()
	if c.quiet {
		c.pumps.Go(func() { _, _ = io.Copy(c.inner, ours) })
	}
	return theirs
}

// awaitHost returns the connected host, nil when the cable was cut.
func (c *cable) awaitHost() net.Conn {
	for {
		c.mu.Lock()
		h, plugged := c.host, c.plugged
		c.mu.Unlock()
		if h != nil {
			return h
		}
		select {
		case <-plugged:
		case <-c.closed:
			return nil
		}
	}
}

func (c *cable) current() net.Conn {
	if c.quiet {
		return c.guest
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.host
}

func (c *cable) Read(p []byte) (int, error) {
	conn := c.current()
	if conn == nil {
		return 0, io.EOF
	}
	n, err := conn.Read(p)
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	select {
	case <-c.closed:
		return 0, os.ErrClosed
	default:
	}
	if c.quiet {
		return 0, err
	}
	c.mu.Lock()
	if c.host == conn {
		c.host = nil
	}
	c.mu.Unlock()
	return 0, io.EOF
}

// Write discards what no host is there for, as QEMU does.
func (c *cable) Write(p []byte) (int, error) {
	conn := c.current()
	if conn == nil {
		return len(p), nil
	}
	if n, err := conn.Write(p); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	return len(p), nil
}

func (c *cable) AwaitHost() error {
	if c.awaitHost() == nil {
		return os.ErrClosed
	}
	return nil
}

func (c *cable) SetReadDeadline(t time.Time) error {
	if conn := c.current(); conn != nil {
		return conn.SetReadDeadline(t)
	}
	return nil
}

func (c *cable) SetWriteDeadline(t time.Time) error {
	if conn := c.current(); conn != nil {
		return conn.SetWriteDeadline(t)
	}
	return nil
}

// Close cuts the cable.
func (c *cable) Close() error {
	close(c.closed)
	c.mu.Lock()
	if c.host != nil {
		c.host.Close()
	}
	c.mu.Unlock()
	if c.quiet {
		c.guest.Close()
		c.inner.Close()
	}
	c.pumps.Wait()
	return nil
}

// fakeSystem is a guest's kernel and files, in memory.
type fakeSystem struct {
	mu       sync.Mutex
	calls    []string
	values   map[string]string
	entropy  []byte
	clock    time.Time
	failWith map[string]error // by setter
	lie      bool             // acknowledge a host name that is not in force
}

func newFakeSystem() *fakeSystem {
	return &fakeSystem{values: map[string]string{"hostname": "template"}, failWith: map[string]error{}}
}

func (f *fakeSystem) set(name, value string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
	if err := f.failWith[name]; err != nil {
		return err
	}
	f.values[name] = value
	return nil
}

func (f *fakeSystem) get(name string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lie && name == "hostname" {
		return "liar", nil
	}
	return f.values[name], nil
}

func (f *fakeSystem) AddEntropy(seed []byte) error {
	f.mu.Lock()
	f.entropy = append([]byte(nil), seed...)
	f.mu.Unlock()
	return f.set("entropy", "")
}

func (f *fakeSystem) SetTime(t time.Time) error {
	f.mu.Lock()
	f.clock = t
	f.mu.Unlock()
	return f.set("time", "")
}

func (f *fakeSystem) SetHostname(v string) error     { return f.set("hostname", v) }
func (f *fakeSystem) SetMachineID(v string) error    { return f.set("machine-id", v) }
func (f *fakeSystem) SetBootID(v string) error       { return f.set("boot-id", v) }
func (f *fakeSystem) SetInternet(up bool) error      { return f.set("internet", strconv.FormatBool(up)) }
func (f *fakeSystem) Hostname() (string, error)      { return f.get("hostname") }
func (f *fakeSystem) MachineID() (string, error)     { return f.get("machine-id") }
func (f *fakeSystem) BootID() (string, error)        { return f.get("boot-id") }
func (f *fakeSystem) Uptime() (time.Duration, error) { return time.Minute, nil }
func (f *fakeSystem) Shutdown(bool) error            { return f.set("shutdown", "") }
func (f *fakeSystem) Quiesce(bool, bool) error       { return f.set("quiesce", "") }

// guest is an agent of this process, on a cable.
type guest struct {
	cable  *cable
	system *fakeSystem
	home   string
	seal   string // the agent's SealFile
	// settings and marks are the agent's SettingsFile and MarkDir.
	settings, marks string
	server          *guestagent.Server
	end             func() // ends the agent, once
}

// account runs commands as whoever runs the test.
func account(t testing.TB, home string) guestagent.Account {
	t.Helper()
	u, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	return guestagent.Account{Name: u.Username, Home: home, Own: true}
}

func startGuest(t testing.TB, quiet bool) *guest {
	t.Helper()
	g := &guest{cable: newCable(t, quiet), system: newFakeSystem(), home: t.TempDir()}
	g.startAgent(t)
	t.Cleanup(func() { g.end() })
	return g
}

func (g *guest) startAgent(t testing.TB) {
	t.Helper()
	me := account(t, g.home)
	if g.settings == "" {
		dir := t.TempDir()
		g.settings, g.marks = filepath.Join(dir, "settings.json"), filepath.Join(dir, "e2b")
	}
	server := guestagent.New(guestagent.Options{
		System: g.system, Version: "test", SealFile: g.seal, SettingsFile: g.settings, MarkDir: g.marks, Env: map[string]string{"SANDBOX": "yes"},
		Lookup: func(name string) (guestagent.Account, error) {
			if name == "user" || name == me.Name {
				return me, nil
			}
			return guestagent.Account{}, user.UnknownUserError(name)
		},
	})
	g.server = server
	l := guestagent.NewListener(g.cable)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	g.end = sync.OnceFunc(func() {
		if !server.Drain(10 * time.Second) {
			t.Error("commands are still running at the end of the test")
		}
		l.Close()
		if err := <-served; err != nil {
			t.Errorf("agent: %v", err)
		}
		server.Close()
	})
}

// connect plugs a host in.
func (g *guest) connect(t testing.TB) *guestlink.Client {
	t.Helper()
	c := guestlink.New(g.cable.plug(t))
	t.Cleanup(func() { c.Close() })
	return c
}

// sh runs a shell line without a login shell's profile, which may be slow or noisy.
func sh(line string) guestlink.Command {
	return guestlink.Command{Args: []string{"/bin/bash", "-c", line}}
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// output runs line and returns its stdout; anything but exit 0 is fatal.
func output(t *testing.T, c *guestlink.Client, line string) string {
	t.Helper()
	var out, errOut strings.Builder
	exit, err := c.Run(testContext(t), sh(line), &out, &errOut)
	if err != nil || exit.Code != 0 {
		t.Fatalf("%s: %+v, %v, stderr %q", line, exit, err, errOut.String())
	}
	return out.String()
}
