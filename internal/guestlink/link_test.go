package guestlink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/api/link"
	"github.com/agentzip/agentzip/internal/guestagent"
	"github.com/agentzip/agentzip/internal/guestlink"
)

// startRealUsers is startGuest with the users of /etc/passwd.
func startRealUsers(t *testing.T) *guest {
	t.Helper()
	g := &guest{cable: newCable(t, false), system: newFakeSystem(), home: t.TempDir()}
	g.server = guestagent.New(guestagent.Options{System: g.system, DefaultUser: "root"})
	l := guestagent.NewListener(g.cable)
	served := make(chan error, 1)
	go func() { served <- g.server.Serve(l) }()
	t.Cleanup(func() {
		g.server.Drain(5 * time.Second)
		l.Close()
		if err := <-served; err != nil {
			t.Errorf("agent: %v", err)
		}
	})
	return g
}

func identity() guestlink.Identity {
	return guestlink.Identity{Hostname: "clone-7", MachineID: strings.Repeat("7a", 16), BootID: "01234567-89ab-cdef-0123-456789abcdef"}
}

func TestASealedGuestRefusesEverythingUntilItIsPersonalized(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	ctx := testContext(t)
	if err := c.Quiesce(ctx); err != nil {
		t.Fatal(err)
	}
	c.Close()
	c = g.connect(t) // the snapshot is taken while no host is connected

	refused := func(when string) {
		t.Helper()
		if _, err := c.Run(ctx, sh("true"), nil, nil); !errors.Is(err, guestlink.ErrSealed) || connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("%s: Run: %v, want ErrSealed and failed_precondition", when, err)
		}
		if err := c.Upload(ctx, "x", "", strings.NewReader("x")); !errors.Is(err, guestlink.ErrSealed) {
			t.Errorf("%s: Upload: %v, want ErrSealed", when, err)
		}
		if err := c.Download(ctx, "/etc/passwd", "", io.Discard); !errors.Is(err, guestlink.ErrSealed) {
			t.Errorf("%s: Download: %v, want ErrSealed", when, err)
		}
		if h, err := c.Health(ctx); err != nil || !h.Sealed {
			t.Errorf("%s: Health: %+v, %v, want sealed", when, h, err)
		}
	}
	refused("after Quiesce")
	for _, item := range []string{"entropy", "time", "hostname", "machine-id", "boot-id"} {
		g.system.failWith[item] = fmt.Errorf("no %s today", item)
		if err := c.Personalize(ctx, identity()); err == nil || !strings.Contains(err.Error(), "no "+item+" today") {
			t.Errorf("Personalize with failing %s: %v", item, err)
		}
		delete(g.system.failWith, item)
		refused("after a Personalize without " + item)
	}
	id := identity()
	if err := c.Personalize(ctx, id); err != nil {
		t.Fatal(err)
	}
	if got := output(t, c, "echo alive"); got != "alive\n" {
		t.Errorf("after Personalize: %q", got)
	}
	want := map[string]string{"hostname": id.Hostname, "machine-id": id.MachineID, "boot-id": id.BootID, "entropy": "", "time": "", "quiesce": ""}
	if diff := cmp.Diff(want, g.system.values); diff != "" {
		t.Errorf("what the guest was given (-want +got):\n%s", diff)
	}
	if len(g.system.entropy) < 32 || bytes.Count(g.system.entropy, []byte{0}) > len(g.system.entropy)/2 {
		t.Errorf("entropy %x", g.system.entropy)
	}
	if d := time.Since(g.system.clock); d < 0 || d > time.Minute {
		t.Errorf("clock was set to %v, which is %v ago", g.system.clock, d)
	}
}

func TestAnAgentThatIsStartedAgainStaysSealed(t *testing.T) {
	t.Parallel()
	g := &guest{cable: newCable(t, false), system: newFakeSystem(), home: t.TempDir()}
	g.seal = filepath.Join(g.home, "sealed")
	g.startAgent(t)
	defer func() { g.end() }()
	again := func() *guestlink.Client {
		g.end()
		g.cable = newCable(t, false)
		g.startAgent(t)
		return g.connect(t)
	}
	c := g.connect(t)
	output(t, c, "true")
	if err := c.Quiesce(testContext(t)); err != nil {
		t.Fatal(err)
	}
	c = again()
	if _, err := c.Run(testContext(t), sh("true"), nil, nil); !errors.Is(err, guestlink.ErrSealed) {
		t.Errorf("Run: %v, want ErrSealed", err)
	}
	if err := c.Personalize(testContext(t), identity()); err != nil {
		t.Fatal(err)
	}
	output(t, again(), "true")
}

func TestAGuestThatFailsToQuiesceStaysOpen(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	g.system.failWith["quiesce"] = errors.New("cannot")
	if err := c.Quiesce(testContext(t)); err == nil {
		t.Error("Quiesce succeeded")
	}
	output(t, c, "true")
}

func TestPersonalizeTrustsOnlyWhatTheGuestReadsBack(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	g.system.lie = true
	if err := c.Personalize(testContext(t), identity()); err == nil || !strings.Contains(err.Error(), `host name is "liar"`) {
		t.Errorf("got %v", err)
	}
}

func TestABadIdentityIsRefused(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	for name, spoil := range map[string]func(*guestlink.Identity){
		"short entropy":    func(id *guestlink.Identity) { id.Entropy = make([]byte, 31) },
		"time before 1970": func(id *guestlink.Identity) { id.Time = time.Unix(-5, 0) },
		"empty host name":  func(id *guestlink.Identity) { id.Hostname = "" },
		"host name lines":  func(id *guestlink.Identity) { id.Hostname = "a\nb" },
		"machine id":       func(id *guestlink.Identity) { id.MachineID = strings.Repeat("G", 32) },
		"boot id":          func(id *guestlink.Identity) { id.BootID = "../../etc/passwd" },
	} {
		id := identity()
		spoil(&id)
		if err := c.Personalize(testContext(t), id); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v, want invalid_argument", name, err)
		}
	}
	if len(g.system.calls) != 0 {
		t.Errorf("the guest was touched: %v", g.system.calls)
	}
}

func TestFilesComeBackAsTheyWent(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	big := make([]byte, 20<<20)
	if _, err := rand.NewChaCha8([32]byte{7}).Read(big); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"empty": {}, "small": []byte("x"), "20 MB": big} {
		path := filepath.Join("new", name, "ünï code & x=y?.bin")
		if err := c.Upload(testContext(t), path, "", bytes.NewReader(content)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		onDisk, err := os.ReadFile(filepath.Join(g.home, path))
		if err != nil || !bytes.Equal(onDisk, content) {
			t.Errorf("%s: %d bytes on disk, %v, want %d", name, len(onDisk), err, len(content))
		}
		var got bytes.Buffer
		if err := c.Download(testContext(t), "~/"+path, "", &got); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !bytes.Equal(got.Bytes(), content) {
			t.Errorf("%s: %d bytes came back, want %d", name, got.Len(), len(content))
		}
	}
	// Shorter content over longer leaves nothing of it.
	if err := c.Upload(testContext(t), "new/small/f", "", strings.NewReader("long content")); err != nil {
		t.Fatal(err)
	}
	if err := c.Upload(testContext(t), "new/small/f", "", strings.NewReader("short")); err != nil {
		t.Fatal(err)
	}
	if got := output(t, c, "cat new/small/f"); got != "short" {
		t.Errorf("after overwriting: %q", got)
	}
	// procfs says size 0 and has content.
	var status bytes.Buffer
	if err := c.Download(testContext(t), "/proc/self/status", "", &status); err != nil || !strings.HasPrefix(status.String(), "Name:") {
		t.Errorf("a file of procfs: %q, %v", status.String(), err)
	}
}

func TestFileRequestsFailWithTheStatusOfTheirReason(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	output(t, c, "mkfifo fifo; mkdir dir; touch file")
	upload := func(path, user string) error { return c.Upload(testContext(t), path, user, strings.NewReader("x")) }
	download := func(path, user string) error { return c.Download(testContext(t), path, user, io.Discard) }
	for _, tc := range []struct {
		name       string
		do         func(path, user string) error
		path, user string
		want       int
	}{
		{"download of a missing file", download, "nope", "", 404},
		{"download of a folder", download, "dir", "", 400},
		{"download of a fifo", download, "fifo", "", 400},
		{"download by an unknown user", download, "file", "stranger", 401},
		{"download without a path", download, "", "", 400},
		{"upload onto a folder", upload, "dir", "", 400},
		{"upload onto a fifo", upload, "fifo", "", 400},
		{"upload below a file", upload, "file/x", "", 400},
		{"upload by an unknown user", upload, "f", "stranger", 401},
		{"upload to a full device", upload, "/dev/full", "", 400},
	} {
		err := tc.do(tc.path, tc.user)
		var fe *guestlink.FileError
		if !errors.As(err, &fe) || fe.Status != tc.want {
			t.Errorf("%s: %v, want status %d", tc.name, err, tc.want)
		}
	}
	failing := errors.New("source broke")
	if err := c.Upload(testContext(t), "part", "", io.MultiReader(strings.NewReader("abc"), brokenReader{failing})); !errors.Is(err, failing) {
		t.Errorf("upload from a broken source: %v, want %v", err, failing)
	}
	output(t, c, "true")
}

type brokenReader struct{ err error }

func (r brokenReader) Read([]byte) (int, error) { return 0, r.err }

func TestANewHostIsServedAfterAnAbruptEnd(t *testing.T) {
	t.Parallel()
	for _, quiet := range []bool{false, true} {
		t.Run(map[bool]string{false: "the guest sees the port close", true: "the guest sees one stream"}[quiet], func(t *testing.T) {
			t.Parallel()
			g := startGuest(t, quiet)
			for round := range 8 {
				c := g.connect(t)
				if got := output(t, c, "echo hello"); got != "hello\n" {
					t.Fatalf("round %d: %q", round, got)
				}
				// Leave in the middle of traffic in both directions.
				ctx, cancel := context.WithCancel(testContext(t))
				busy := make(chan struct{})
				flooded := make(chan struct{}, 1)
				go func() {
					defer close(busy)
					_, err := c.Run(ctx, sh("exec yes"), signalWriter{flooded}, nil)
					if !errors.Is(err, guestlink.ErrLinkDown) {
						t.Errorf("round %d: Run: %v, want ErrLinkDown", round, err)
					}
				}()
				uploading := make(chan struct{})
				go func() {
					defer close(uploading)
					_ = c.Upload(ctx, "sink", "", endless{})
				}()
				<-flooded
				time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
				c.Close()
				<-busy
				<-uploading
				cancel()
			}
			killAll(t, g.connect(t))
		})
	}
}

// killAll kills the commands that hosts left behind.
func killAll(t *testing.T, c *guestlink.Client) {
	t.Helper()
	list, err := c.Process().List(testContext(t), request(&pb.ListRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Msg.GetProcesses() {
		kill := request(&pb.SendSignalRequest{Process: byPID(p.GetPid()), Signal: pb.Signal_SIGNAL_SIGKILL})
		if _, err := c.Process().SendSignal(testContext(t), kill); err != nil {
			t.Error(err)
		}
	}
}

type signalWriter struct{ c chan struct{} }

func (w signalWriter) Write(p []byte) (int, error) {
	select {
	case w.c <- struct{}{}:
	default:
	}
	return len(p), nil
}

func TestStaleBytesBeforeASessionAreSkipped(t *testing.T) {
	t.Parallel()
	g := startGuest(t, true)
	hello := link.Hello()
	for name, stale := range map[string][]byte{
		"noise":                      bytes.Repeat([]byte{0xa5, 0, 1}, 5000),
		"a client preface":           []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
		"half a Hello":               hello[:20],
		"a Hello without its nonce":  hello[:],
		"a Hello that nobody awaits": append(hello[:], "0123456789abcdefPRI * HTTP/2.0\r\n"...),
	} {
		t.Run(name, func(t *testing.T) { // one after the other: one guest
			conn := g.cable.plug(t)
			if _, err := conn.Write(stale); err != nil {
				t.Fatal(err)
			}
			conn.Close()
			if got := output(t, g.connect(t), "echo ok"); got != "ok\n" {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestADeadLinkIsSaidSo(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	conn := g.cable.plug(t)
	c := guestlink.New(conn)
	defer c.Close()
	output(t, c, "true")
	started := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() {
		_, err := c.Run(testContext(t), sh("echo started; exec sleep 1"), signalWriter{started}, nil)
		done <- err
	}()
	<-started
	begin := time.Now()
	conn.Close() // what the death of the VMM looks like
	if err := <-done; !errors.Is(err, guestlink.ErrLinkDown) {
		t.Errorf("a running command: %v, want ErrLinkDown", err)
	}
	if took := time.Since(begin); took > time.Second/2 {
		t.Errorf("took %v", took)
	}
	select {
	case <-c.Down():
	case <-time.After(time.Second):
		t.Error("Down is not closed")
	}
	_, err := c.Health(testContext(t))
	if !errors.Is(err, guestlink.ErrLinkDown) {
		t.Errorf("a later call: %v, want ErrLinkDown", err)
	}
	if err := c.Download(testContext(t), "/etc/passwd", "", io.Discard); !errors.Is(err, guestlink.ErrLinkDown) {
		t.Errorf("a later download: %v, want ErrLinkDown", err)
	}
}

func TestANewAgentEndsTheSessionsOfTheOldOne(t *testing.T) {
	t.Parallel()
	g := startGuest(t, true)
	c := g.connect(t)
	output(t, c, "true")
	// The old agent dies without a word; a new one opens the port. Here the old
	// one's reader is still there, so the new one only says what it would say.
	reset := link.Reset()
	if _, err := g.cable.Write(reset[:]); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Down():
	case <-time.After(5 * time.Second):
		t.Fatal("the session goes on")
	}
	if _, err := c.Health(testContext(t)); !errors.Is(err, guestlink.ErrLinkDown) {
		t.Errorf("got %v, want ErrLinkDown", err)
	}
}

func TestACallWaitsForAnAgentThatStartsLater(t *testing.T) {
	t.Parallel()
	g := &guest{cable: newCable(t, true), system: newFakeSystem(), home: t.TempDir()}
	c := g.connect(t)
	short, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Health(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without an agent: %v, want the deadline", err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := c.Health(testContext(t))
		answered <- err
	}()
	time.Sleep(50 * time.Millisecond)
	g.startAgent(t)
	defer g.end()
	if err := <-answered; err != nil {
		t.Errorf("with an agent: %v", err)
	}
	output(t, c, "true")
}

func TestHealthTellsHowTheGuestIs(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	h, err := c.Health(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if d := time.Since(h.GuestTime); d < 0 || d > time.Minute {
		t.Errorf("guest time is %v ago", d)
	}
	h.GuestTime = time.Time{}
	if diff := cmp.Diff(guestlink.Health{AgentVersion: "test", Uptime: time.Minute, Hostname: "template"}, h); diff != "" {
		t.Errorf("health (-want +got):\n%s", diff)
	}
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://any.name/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.HTTPClient().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Errorf("GET /health: %s", resp.Status)
	}
}

// What a clone of a busy guest, or one that was put away, looks like from inside:
// the session stands still with bytes under way, and then another host says Hello.
func TestANewHostTakesOverWhileOutputAndConnectionsWait(t *testing.T) {
	t.Parallel()
	for name, quiet := range map[string]bool{"the port tells": false, "the port does not tell": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := startGuest(t, quiet)
			old := guestlink.New(g.cable.plug(t))
			defer old.Close()
			port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) { _, _ = io.Copy(s, zeros{}) })
			for range 3 { // never read
				conn, err := old.Dial(testContext(t), port)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
			}
			stuck := &slowWriter{entered: make(chan struct{}), open: make(chan struct{})}
			ended := make(chan error, 1)
			go func() {
				_, err := old.Run(testContext(t), sh("echo $$ > pid; cat /dev/zero"), stuck, nil)
				ended <- err
			}()
			<-stuck.entered
			// From here nobody reads for the old host.
			next := g.connect(t)
			pid := strings.TrimSpace(output(t, next, "cat pid; kill -0 $(cat pid)"))
			close(stuck.open)
			if err := <-ended; !errors.Is(err, guestlink.ErrLinkDown) {
				t.Errorf("the old host's command: %v, want ErrLinkDown", err)
			}
			if got := output(t, next, "kill "+pid+"; echo ok"); got != "ok\n" {
				t.Errorf("got %q", got)
			}
		})
	}
}
