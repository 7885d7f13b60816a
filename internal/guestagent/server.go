package guestagent

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/agentzip/agentzip/api/gen/agentzip/guest/v1/guestv1connect"
	"github.com/agentzip/agentzip/api/gen/filesystem/filesystemconnect"
	"github.com/agentzip/agentzip/api/gen/process/processconnect"
	"github.com/agentzip/agentzip/api/link"
)

// maxMessage bounds one message of a request: it is held in memory whole. The
// largest that clients send are pieces of stdin.
const maxMessage = 16 << 20

// Options are a Server's surroundings. All fields are immutable after New.
type Options struct {
	System      System                        // what Guest acts on
	Lookup      func(string) (Account, error) // nil: LookupAccount
	DefaultUser string                        // for requests that name none; "" is "user"
	Env         map[string]string             // variables of every command
	Version     string                        // of the agent's build
	Shielded    bool                          // the agent is hidden from the OOM killer
	Busy        func(bool)                    // called when the first command starts and the last one ended; may be nil
	SealFile    string                        // exists while sealed, so that an agent that is started again stays so; "" for none
	// SettingsFile keeps what Configure said for an agent that is started again; "" for none.
	SettingsFile string
	MarkDir      string // where the files .E2B_SANDBOX_ID and its siblings go; "" for nowhere
}

// Server answers the host. It is safe for concurrent use.
type Server struct {
	options   Options
	processes *processes
	watchers  watchers
	meter     meter
	handler   http.Handler

	current atomic.Pointer[settings] // never nil
	sealed  atomic.Bool
	// identity orders Quiesce, Personalize and Configure, which are whole or not at all.
	identity sync.Mutex
}

// New makes a Server that is open.
func New(o Options) *Server {
	if o.Lookup == nil {
		o.Lookup = LookupAccount
	}
	if o.DefaultUser == "" {
		o.DefaultUser = "user"
	}
	s := &Server{options: o, processes: &processes{shielded: o.Shielded, busy: o.Busy, byPID: map[uint32]*process{}}}
	mux := http.NewServeMux()
	// No compression: it costs the guest time to save copies within one machine,
	// and flow control would count bytes before they are inflated at the host.
	plain := connect.WithHandlerOptions(connect.WithCompression("gzip", nil, nil), connect.WithReadMaxBytes(maxMessage))
	mux.Handle(processconnect.NewProcessHandler(&processService{server: s}, plain))
	mux.Handle(filesystemconnect.NewFilesystemHandler(&filesystemService{server: s}, plain))
	mux.Handle(guestv1connect.NewGuestHandler(&guestService{server: s}, plain))
	mux.HandleFunc("GET /files", s.download)
	mux.HandleFunc("POST /files", s.upload)
	mux.HandleFunc("GET /metrics", s.metrics)
	mux.HandleFunc("GET /envs", s.envs)
	mux.HandleFunc("POST "+link.DialPath, s.dial)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	s.handler = s.gate(mux)
	if err := s.loadSettings(); err != nil {
		slog.Error("go on without settings", "err", err) // the host says them again; without an agent it cannot
	}
	if o.SealFile != "" {
		_, err := os.Stat(o.SealFile)
		s.sealed.Store(!errors.Is(err, fs.ErrNotExist))
	}
	return s
}

// setSealed changes the state, also for an agent that comes after this one.
// Preconditions: identity is held.
func (s *Server) setSealed(sealed bool) error {
	if s.options.SealFile != "" {
		var err error
		if sealed {
			err = os.WriteFile(s.options.SealFile, nil, 0o600)
		} else if err = os.Remove(s.options.SealFile); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	s.sealed.Store(sealed)
	return nil
}

// Serve answers the sessions of l until l is closed.
func (s *Server) Serve(l net.Listener) error {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	// No timeouts and no pings: the link is a pipe to the VMM on the same
	// machine, its end is seen as such, and timers would wake an idle guest.
	server := &http.Server{ //nolint:gosec // G112: nobody but our host can connect
		Handler:   s.handler,
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			// Every connection to a port of the guest is one.
			MaxConcurrentStreams: 20_000,
			// What a stream may have in flight: less starves uploads on a busy host. The
			// connection's is what 256 streams whose readers sleep may hold before
			// they hold up the others.
			MaxReceiveBufferPerConnection: 32 << 20,
			MaxReceiveBufferPerStream:     128 << 10,
		},
		ErrorLog: log.New(os.Stderr, "agentzip-guest: ", 0),
	}
	err := server.Serve(l)
	if errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// errSealed is the answer to commands and files between Quiesce and Personalize.
var errSealed = errors.New("the guest is sealed: it is part of a template and was not personalized yet")

// gate refuses what a sealed guest must not do.
func (s *Server) gate(next http.Handler) http.Handler {
	rpcErrors := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !s.sealed.Load():
		case strings.HasPrefix(r.URL.Path, "/"+processconnect.ProcessName+"/"), strings.HasPrefix(r.URL.Path, "/"+filesystemconnect.FilesystemName+"/"):
			_ = rpcErrors.Write(w, r, connect.NewError(connect.CodeFailedPrecondition, errSealed))
			return
		case r.URL.Path == "/files", r.URL.Path == link.DialPath:
			writeError(w, http.StatusPreconditionFailed, errSealed.Error())
			return
		}
		next.ServeHTTP(w, r)
	})
}

// writeError sends the error body that E2B's clients read.
func writeError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}

// Close ends the watchers that clients left behind. Call it after Serve has returned.
func (s *Server) Close() { s.watchers.closeAll() }

// Drain waits until no command runs, at most for limit. Tests and Shutdown use it.
func (s *Server) Drain(limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	for s.processes.runningCount() > 0 {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(5 * time.Millisecond)
	}
	return true
}
