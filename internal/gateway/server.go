package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/agentzip/agentzip/internal/gateway/control"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/proxy"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

const (
	// idleTimeout of a connection without a request: clients keep theirs for 600 s.
	idleTimeout = 15 * time.Minute
	// headerTimeout bounds a request's header, so that a client that sends a byte
	// a minute holds no connection for ever. Bodies have no limit of time.
	headerTimeout = 30 * time.Second
	// maxHeader bounds a request's header.
	maxHeader = 64 << 10
	// drainTime is how long connections may go on after the sandboxes have ended.
	drainTime = 2 * time.Second
)

// Options of a Server.
type Options struct {
	Config  *Config
	Backend lifecycle.Backend
	Agent   string                 // envdVersion of the guests
	Metrics []prometheus.Collector // of the backend, served beside those of the gateway
	Log     *slog.Logger
}

// A Server is one gateway.
type Server struct {
	config  *Config           // immutable
	log     *slog.Logger      // immutable
	store   *store.Store      // immutable
	keys    *keys.Ring        // immutable
	fleet   *lifecycle.Fleet  // immutable
	api     *control.API      // immutable
	proxy   *proxy.Proxy      // immutable
	figures *figures          // immutable
	http    *http.Server      // immutable
	admin   *admin            // immutable
	backend lifecycle.Backend // immutable
	base    string            // immutable; template behind the alias "base"

	listeners []net.Listener // set by Listen
	port      int            // set by Listen
}

// Open loads the records; nothing listens yet.
func Open(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if err := o.Config.Check(); err != nil {
		return nil, fmt.Errorf("open gateway: %w", err)
	}
	st, err := store.Open(o.Config.Dir, o.Log)
	if err != nil {
		return nil, err
	}
	s := &Server{config: o.Config, log: o.Log, store: st, backend: o.Backend}
	if err := s.open(o); err != nil {
		return nil, errors.Join(fmt.Errorf("open gateway: %w", err), st.Close())
	}
	return s, nil
}

func (s *Server) open(o Options) error {
	c := o.Config
	var err error
	if s.keys, err = keys.Load(s.store); err != nil {
		return err
	}
	if c.APIKey != "" {
		s.keys.Lend(c.APIKey, keys.DefaultTeam)
	}
	minter, err := keys.LoadMinter(s.store)
	if err != nil {
		return err
	}
	aliases, err := s.aliases()
	if err != nil {
		return err
	}
	if s.base = aliases["base"]; s.base == "" {
		if _, err := s.backend.Template("base"); err == nil {
			s.base = "base"
		}
	}
	s.fleet, err = lifecycle.Open(lifecycle.Options{
		Backend: o.Backend, Store: s.store, Token: minter.Access, Log: o.Log,
		Limits: lifecycle.Limits{PerTeam: c.teamLimit, Total: c.MaxTotal},
	})
	if err != nil {
		return err
	}
	s.api, err = control.New(control.Options{
		Fleet: s.fleet, Backend: o.Backend, Store: s.store, Keys: s.keys, Minter: minter,
		Domain: s.domain, Agent: o.Agent, Aliases: aliases,
		MaxTimeout: c.MaxTimeout, CreateRate: c.teamRate, Dir: c.Dir, Log: o.Log,
	})
	if err != nil {
		return err
	}
	s.proxy = proxy.New(proxy.Options{Fleet: s.fleet, Minter: minter, MinWake: c.MinWake, MaxActive: c.MaxActive, Log: o.Log})
	s.figures = newFigures(s.fleet, s.proxy, o.Metrics)
	s.http = &http.Server{
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ConnContext:       proxy.WithConn,
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	s.admin = newAdmin(s.keys, o.Log)
	return nil
}

// aliases returns the further names of templates. "base" must be one: clients
// that name no template ask for it.
func (s *Server) aliases() (map[string]string, error) {
	aliases := map[string]string{}
	maps.Copy(aliases, s.config.Aliases)
	if s.config.Template != "" {
		if _, err := s.backend.Template(s.config.Template); err != nil {
			return nil, fmt.Errorf("template %q: %w", s.config.Template, err)
		}
		aliases["base"] = s.config.Template
	}
	if aliases["base"] != "" {
		return aliases, nil
	}
	if _, err := s.backend.Template("base"); err == nil {
		return aliases, nil
	}
	all, err := s.backend.Templates()
	if err != nil {
		return nil, err
	}
	if len(all) == 1 {
		aliases["base"] = all[0].Name
	} else {
		s.log.Warn("no template is called base: clients that name none are refused; choose one with --template")
	}
	return aliases, nil
}

func (s *Server) domain() string {
	if s.config.Domain != "" {
		return s.config.Domain
	}
	return "localhost:" + strconv.Itoa(s.port)
}

// Base returns the template behind the alias "base"; false if there is none.
func (s *Server) Base() (string, bool) {
	if name := s.base; name != "" {
		return name, true
	}
	return "", false
}

// Port returns the port that Listen has got.
func (s *Server) Port() int { return s.port }

// URL returns where clients find the server.
func (s *Server) URL() string { return "http://127.0.0.1:" + strconv.Itoa(s.port) }

// Keys returns the API keys.
func (s *Server) Keys() *keys.Ring { return s.keys }

// Listen takes the port on all addresses. An address that the host does not
// have (no IPv6) is left out, if there is another.
func (s *Server) Listen(ctx context.Context) error {
	s.port = s.config.Port
	var lc net.ListenConfig
	var failed []error
	for a := range strings.SplitSeq(s.config.Addresses, ",") {
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(strings.TrimSpace(a), strconv.Itoa(s.port)))
		if err != nil {
			failed = append(failed, err)
			if errors.Is(err, errInUse) {
				break
			}
			continue
		}
		if tcp, ok := l.Addr().(*net.TCPAddr); ok {
			s.port = tcp.Port
		}
		s.listeners = append(s.listeners, l)
	}
	err := errors.Join(failed...)
	if len(s.listeners) == 0 || errors.Is(err, errInUse) {
		for _, l := range s.listeners {
			_ = l.Close() // it is given up
		}
		return fmt.Errorf("listen on port %d: %w", s.config.Port, err)
	}
	if err != nil {
		s.log.Warn("an address is left out", "err", err)
	}
	return s.admin.listen(ctx, s.config.Dir)
}

// Run serves until ctx ends, then pauses or kills the sandboxes, as configured.
// It closes the Server.
func (s *Server) Run(ctx context.Context) error {
	errs := make(chan error, len(s.listeners))
	var serving sync.WaitGroup
	places := make(chan struct{}, max(1, s.config.MaxConns))
	for _, l := range s.listeners {
		serving.Go(func() { errs <- s.http.Serve(limited{Listener: l, places: places}) })
	}
	serving.Go(s.admin.run)
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-errs:
	}
	s.log.Info("stopping", "sandboxes", s.config.OnExit)
	for _, l := range s.listeners {
		_ = l.Close() // it is given up
	}
	s.api.Close()
	closed := s.fleet.Close(s.config.OnExit == OnExitPause) //nolint:contextcheck // ctx has ended
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if err := s.http.Shutdown(drain); err != nil {
		_ = s.http.Close() // what is left has had its time
	}
	s.admin.close()
	serving.Wait()
	if errors.Is(failed, http.ErrServerClosed) {
		failed = nil
	}
	return errors.Join(failed, closed, s.store.Close())
}

// ServeHTTP routes a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		control.WriteError(w, http.StatusNotImplemented, "CONNECT is not supported: use http:// URLs, or the E2b-Sandbox-Id and E2b-Sandbox-Port headers")
		return
	}
	t, ok, err := s.proxy.Target(r)
	switch {
	case err != nil:
		proxy.WriteRouteError(w, r, err)
	case ok:
		s.proxy.Serve(w, r, t)
	case r.URL.IsAbs() && !s.own(r.URL.Host):
		control.WriteError(w, http.StatusForbidden, "this proxy reaches sandboxes only: PORT-ID.anything")
	case r.Method == http.MethodGet && r.URL.Path == "/health":
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodGet && r.URL.Path == "/metrics":
		s.figures.ServeHTTP(w, r)
	default:
		s.figures.count(w, r, s.api)
	}
}

// own says whether host is this server's own name.
func (s *Server) own(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return name == "localhost" || net.ParseIP(strings.Trim(name, "[]")) != nil
}

// limited accepts no more connections than there are places.
type limited struct {
	net.Listener
	places chan struct{}
}

func (l limited) Accept() (net.Conn, error) {
	l.places <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.places
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		<-l.places
		return c, nil
	}
	return &placed{TCPConn: tcp, give: sync.OnceFunc(func() { <-l.places })}, nil
}

// placed gives its place back when it is closed.
type placed struct {
	*net.TCPConn
	give func()
}

func (p *placed) Close() error {
	defer p.give()
	return p.TCPConn.Close()
}

// Close ends a Server that was opened and does not run.
func (s *Server) Close() error {
	for _, l := range s.listeners {
		_ = l.Close() // it is given up
	}
	s.admin.close()
	s.api.Close()
	return errors.Join(s.fleet.Close(false), s.store.Close())
}

// removeStale deletes the socket that a killed server left behind.
func removeStale(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
