package guestlink_test

import (
	"io"
	"net"
	"os/exec"
	"testing"

	"github.com/agentzip/agentzip/internal/guestlink"
)

// BenchmarkCommand says what agent and link add to a command; "direct" is the
// command alone. All on this host: in a guest under TCG it is 10 to 20 times more.
func BenchmarkCommand(b *testing.B) {
	b.Run("direct", func(b *testing.B) {
		for b.Loop() {
			if err := exec.CommandContext(b.Context(), "/bin/true").Run(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("agent", func(b *testing.B) {
		c := startGuest(b, false).connect(b)
		for b.Loop() {
			if _, err := c.Run(b.Context(), guestlink.Command{Args: []string{"/bin/true"}}, nil, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkPort is the throughput of a connection to a port, from the guest.
func BenchmarkPort(b *testing.B) {
	c := startGuest(b, false).connect(b)
	l, err := (&net.ListenConfig{}).Listen(b.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		s, err := l.Accept()
		if err == nil {
			_, _ = io.Copy(s, zeros{})
		}
	}()
	conn, err := c.Dial(b.Context(), l.Addr().(*net.TCPAddr).Port) //nolint:forcetypeassert // of a TCP listener
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	b.SetBytes(1 << 20)
	for b.Loop() {
		if _, err := io.CopyN(io.Discard, conn, 1<<20); err != nil {
			b.Fatal(err)
		}
	}
}
