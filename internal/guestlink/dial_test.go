package guestlink_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/guestlink"
)

// listen serves each connection to a new port of the guest, which is this host.
func listen(t *testing.T, address string, serve func(*net.TCPConn)) int {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Skip(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn)) //nolint:forcetypeassert // of a TCP listener
			})
		}
	})
	return l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // of a TCP listener
}

func dial(t *testing.T, c *guestlink.Client, port int) net.Conn {
	t.Helper()
	conn, err := c.Dial(testContext(t), port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestAPortIsReachedOnBothLoopbacks(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		port := listen(t, address, func(s *net.TCPConn) { _, _ = io.Copy(s, s) })
		conn := dial(t, c, port)
		fmt.Fprintf(conn, "hello %d\n", port)
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != fmt.Sprintf("hello %d\n", port) {
			t.Errorf("%s: %q, %v", address, line, err)
		}
	}
}

func TestAClosedPortIsSaidSo(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // of a TCP listener
	l.Close()
	if _, err := c.Dial(testContext(t), port); !errors.Is(err, guestlink.ErrPortClosed) {
		t.Errorf("got %v, want ErrPortClosed", err)
	}
	for _, port := range []int{0, -1, 65536} {
		if _, err := c.Dial(testContext(t), port); err == nil || errors.Is(err, guestlink.ErrPortClosed) {
			t.Errorf("port %d: %v, want another error", port, err)
		}
	}
}

func TestEachHalfOfAConnectionEndsByItself(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	t.Run("the host's first", func(t *testing.T) {
		t.Parallel()
		port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
			all, _ := io.ReadAll(s)
			fmt.Fprintf(s, "got %d", len(all))
		})
		conn := dial(t, c, port)
		if _, err := io.Copy(conn, io.LimitReader(zeros{}, 3<<20)); err != nil {
			t.Fatal(err)
		}
		if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil { //nolint:forcetypeassert // Dial promises it
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(conn); err != nil || string(answer) != fmt.Sprintf("got %d", 3<<20) {
			t.Errorf("%q, %v", answer, err)
		}
		if _, err := conn.Write([]byte("x")); !errors.Is(err, unix.EPIPE) {
			t.Errorf("a write after the end: %v", err)
		}
	})
	t.Run("the guest's first", func(t *testing.T) {
		t.Parallel()
		received := make(chan string, 1)
		port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
			fmt.Fprint(s, "bye")
			_ = s.CloseWrite()
			all, _ := io.ReadAll(s)
			received <- string(all)
		})
		conn := dial(t, c, port)
		if answer, err := io.ReadAll(conn); err != nil || string(answer) != "bye" {
			t.Errorf("%q, %v", answer, err)
		}
		fmt.Fprint(conn, "still here")
		conn.Close()
		if got := <-received; got != "still here" {
			t.Errorf("the guest got %q", got)
		}
	})
}

func TestWhatWasWrittenBeforeACloseArrives(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	received := make(chan int64, 1)
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
		time.Sleep(50 * time.Millisecond) // the windows are full by now
		n, _ := io.Copy(io.Discard, s)
		received <- n
	})
	conn := dial(t, c, port)
	if _, err := io.Copy(conn, io.LimitReader(zeros{}, 1<<20)); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if got := <-received; got != 1<<20 {
		t.Errorf("the guest got %d bytes", got)
	}
}

func TestAResetIsAReset(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
		_, _ = s.Read(make([]byte, 1))
		_ = s.SetLinger(0)
	})
	conn := dial(t, c, port)
	fmt.Fprint(conn, "x")
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("read: %v", err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		if _, err := conn.Write([]byte("x")); err != nil {
			if !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("write: %v", err)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("writes go on")
		}
	}
}

func TestDeadlinesOfAConnectionHold(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	release := make(chan struct{})
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
		<-release
		_, _ = io.Copy(s, s)
	})
	conn := dial(t, c, port)
	_ = conn.SetDeadline(time.Now().Add(30 * time.Millisecond))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	_ = conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if n, err := io.Copy(conn, zeros{}); n == 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %d bytes, %v", n, err)
	}
	_ = conn.SetDeadline(time.Time{})
	close(release)
	if _, err := io.ReadFull(conn, make([]byte, 1<<16)); err != nil {
		t.Errorf("after the deadlines: %v", err)
	}
}

func TestADeadLinkResetsItsConnections(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	wire := g.cable.plug(t)
	c := guestlink.New(wire)
	defer c.Close()
	ended := make(chan struct{})
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
		_, _ = io.Copy(io.Discard, s)
		close(ended)
	})
	conn := dial(t, c, port)
	wire.Close()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("read: %v", err)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the guest's end stays open")
	}
}

func TestManyConnectionsShareTheLink(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) { _, _ = io.Copy(s, s) })
	// These never read what comes back.
	for range 20 {
		conn := dial(t, c, port)
		_ = conn.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		go func() { _, _ = io.Copy(conn, zeros{}) }()
	}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			conn, err := c.Dial(t.Context(), port)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			want := bytes.Repeat([]byte{byte(i)}, 100_000)
			go func() { _, _ = conn.Write(want) }()
			got := make([]byte, len(want))
			if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("connection %d: %v", i, err)
			}
		})
	}
	all.Wait()
}

func TestAnHTTPServerInTheGuestIsServed(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	port := listen(t, "127.0.0.1:0", func(s *net.TCPConn) {
		r := bufio.NewReader(s)
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			n, _ := io.Copy(io.Discard, req.Body)
			fmt.Fprintf(s, "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\ngot %8d", n)
		}
	})
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return c.Dial(ctx, port) }}
	defer transport.CloseIdleConnections()
	for range 3 {
		req, err := http.NewRequestWithContext(testContext(t), http.MethodPost, "http://any/", strings.NewReader(strings.Repeat("x", 70_000)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(text) != "got    70000" {
			t.Errorf("%q, %v", text, err)
		}
	}
}
