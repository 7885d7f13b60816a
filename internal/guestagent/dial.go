package guestagent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/api/link"
)

const (
	// dialLimit bounds a connect on loopback; only a full backlog makes it wait.
	dialLimit = 5 * time.Second
	// idlePiece is the buffer a connection holds while nothing is sent to it.
	idlePiece = 2 << 10
)

// dial is link.DialPath: it connects the request with a port of the guest.
func (s *Server) dial(w http.ResponseWriter, r *http.Request) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		writeError(w, http.StatusBadRequest, "port: not a number from 1 to 65535")
		return
	}
	conn, err := dialLoopback(r.Context(), int(port))
	if errors.Is(err, unix.ECONNREFUSED) {
		writeError(w, http.StatusBadGateway, fmt.Sprintf("port %d is not open", port))
		return
	}
	if err != nil {
		writeError(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	t := &tunnel{conn: conn}
	defer conn.Close() //nolint:errcheck // what mattered was said by then
	// The host went away without a word: nobody reads or sends any more.
	stop := context.AfterFunc(r.Context(), t.abort)
	defer stop()
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	if err := control.Flush(); err != nil {
		return
	}
	var up sync.WaitGroup
	up.Go(func() {
		if t.receive(r.Body) != nil {
			t.abort()
		}
	})
	err = t.send(w, control.Flush)
	if err != nil {
		t.abort()
		_ = control.SetReadDeadline(time.Unix(1, 0)) // nothing more of the host's is wanted
	}
	up.Wait()
	if err != nil {
		panic(http.ErrAbortHandler) // a reset is told by a reset
	}
}

// dialLoopback tries both families: servers bind to either.
func dialLoopback(ctx context.Context, port int) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: dialLimit, KeepAlive: -1} // no keepalives: an idle guest must not wake up
	var first error
	for _, host := range []string{"127.0.0.1", "::1"} {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			tcp, _ := c.(*net.TCPConn)
			return tcp, nil
		}
		if first == nil {
			first = err
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			break
		}
	}
	return nil, first
}

// tunnel is a connection to a port.
type tunnel struct {
	conn *net.TCPConn
}

// abort resets the connection.
func (t *tunnel) abort() {
	_ = t.conn.SetLinger(0)
	_ = t.conn.Close()
}

// receive moves the host's bytes to the port, and the end of them.
func (t *tunnel) receive(body io.Reader) error {
	var idle [idlePiece]byte
	for {
		n, err := body.Read(idle[:])
		if n > 0 {
			if _, werr := t.conn.Write(idle[:n]); werr != nil {
				return werr
			}
		}
		if n == len(idle) && err == nil {
			err = t.receiveMuch(body)
		}
		if errors.Is(err, io.EOF) {
			return t.conn.CloseWrite()
		}
		if err != nil {
			return err
		}
	}
}

// receiveMuch moves bytes with a large buffer for as long as many come.
func (t *tunnel) receiveMuch(body io.Reader) error {
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	for {
		n, err := body.Read(buf[:])
		if n > 0 {
			if _, werr := t.conn.Write(buf[:n]); werr != nil {
				return werr
			}
		}
		if err != nil || n < idlePiece {
			return err
		}
	}
}

// send moves the port's bytes to the host, and the end of them.
func (t *tunnel) send(w io.Writer, flush func() error) error {
	raw, err := t.conn.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			// The buffer is taken when there is something to read: a thousand idle
			// connections hold none.
			buf := pieces.Get().(*[4 + link.DialPiece]byte) //nolint:forcetypeassert // the pool holds nothing else
			defer pieces.Put(buf)
			n, failed = ignoringInterrupts(func() (int, error) { return unix.Read(int(fd), buf[4:]) })
			if errors.Is(failed, syscall.EAGAIN) {
				return false
			}
			if failed != nil {
				return true
			}
			binary.BigEndian.PutUint32(buf[:4], uint32(n))
			if _, failed = w.Write(buf[:4+n]); failed == nil {
				failed = flush()
			}
			return true
		})
		if err = errors.Join(err, failed); err != nil || n == 0 {
			return err
		}
	}
}

// pieces holds buffers for one piece with its length.
var pieces = sync.Pool{New: func() any { return new([4 + link.DialPiece]byte) }}

func ignoringInterrupts(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
