package guestagent

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"
)

// InsidePort is where programs inside the guest find the agent, as E2B's code
// interpreter does.
const InsidePort = 49983

const (
	// insideHeader is how long a client inside may take to send its request; a
	// slow one on loopback is broken.
	insideHeader = 10 * time.Second
	// insideIdle is how long a connection stays without a request. Longer keeps
	// connections of programs that forgot them.
	insideIdle = 30 * time.Second
)

// ListenInside listens on the guest's loopback.
func ListenInside() (net.Listener, error) {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", InsidePort)) //nolint:noctx // nothing to wait for
	if err != nil {
		return nil, fmt.Errorf("listen inside the guest: %w", err)
	}
	return l, nil
}

// ServeInside answers programs of the guest until l is closed. They get what
// they need to know of their sandbox and nothing else: commands, files and the
// guest's identity are for the host.
func (s *Server) ServeInside(l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("GET /envs", s.authorized(s.envs))
	mux.HandleFunc("GET /metrics", s.authorized(s.metrics))
	server := &http.Server{
		Handler: mux, ReadHeaderTimeout: insideHeader, ReadTimeout: insideHeader, IdleTimeout: insideIdle, MaxHeaderBytes: 16 << 10,
		ErrorLog: log.New(os.Stderr, "agentzip-guest: inside: ", 0),
	}
	err := server.Serve(l)
	if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// authorized lets requests through that carry the sandbox's access token.
func (s *Server) authorized(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		want := s.settings().token
		if want == "" || subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Access-Token")), []byte(want)) != 1 {
			writeError(w, http.StatusUnauthorized, "unauthorized access, please provide a valid access token or method signing if supported")
			return
		}
		next(w, r)
	}
}
