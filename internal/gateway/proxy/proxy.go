package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"html/template"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// hold is how long a request waits for a sandbox that is on its way. Clients
// give the first message of a stream 60 s.
const hold = 55 * time.Second

// Options of the data plane.
type Options struct {
	Fleet     *lifecycle.Fleet
	Minter    *keys.Minter
	MinWake   time.Duration // least time to live of a sandbox that traffic resumed
	MaxActive int           // concurrent requests of one sandbox; 0: 4,096
	Log       *slog.Logger  // nil discards
}

// A Proxy answers the data plane. Safe for concurrent use.
type Proxy struct {
	opts   Options
	errors *log.Logger
	active active
	Served atomic.Int64 // requests that reached a sandbox
}

// New makes the data plane.
func New(o Options) *Proxy {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxActive == 0 {
		o.MaxActive = 4096
	}
	return &Proxy{opts: o, errors: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug), active: active{by: map[string]int{}}}
}

// Target routes a request; ok is false for one of the control plane.
func (p *Proxy) Target(r *http.Request) (t Target, ok bool, err error) {
	return Parse(r, func(s keys.Signature) (string, bool) {
		return p.opts.Fleet.Match(func(id string) bool { return s.Matches(p.opts.Minter.Access(id)) })
	})
}

// Serve answers a request of the data plane.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, t Target) {
	if p.agentOnly(w, r, t) {
		return
	}
	if status, message := p.authorize(r, t); status != 0 {
		writeError(w, r, t, status, message)
		return
	}
	if !p.active.enter(t.ID, p.opts.MaxActive) {
		writeError(w, r, t, http.StatusTooManyRequests, "too many requests to this sandbox at once")
		return
	}
	defer p.active.leave(t.ID)
	ctx, cancel := context.WithTimeout(r.Context(), hold)
	live, err := p.opts.Fleet.Acquire(ctx, t.ID, func(v lifecycle.View) error { return p.mayWake(r, t, v) }, p.opts.MinWake)
	cancel()
	if err != nil {
		p.unavailable(w, r, t, err)
		return
	}
	if t.Port == AgentPort && r.URL.Path == "/health" {
		// Clients ask whether the sandbox runs, and that is known here: a guest
		// that is compressed need not be woken for it.
		w.WriteHeader(http.StatusNoContent)
		return
	}
	p.forward(w, r, t, live)
}

// agentOnly answers what concerns the agent's port alone and never reaches it.
func (p *Proxy) agentOnly(w http.ResponseWriter, r *http.Request, t Target) bool {
	if t.Port != AgentPort {
		return false
	}
	allowOrigin(w.Header(), r)
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
		w.WriteHeader(http.StatusNoContent)
		return true
	}
	if hidden(r.URL.Path) {
		writeError(w, r, t, http.StatusNotFound, "no such route")
		return true
	}
	return false
}

// allowOrigin lets scripts of any origin use the agent: what protects it is its token.
func allowOrigin(h http.Header, r *http.Request) {
	if r.Header.Get("Origin") == "" {
		return
	}
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS")
	h.Set("Access-Control-Allow-Headers", "*, Authorization")
	h.Set("Access-Control-Expose-Headers", "Location, Cache-Control, X-Content-Type-Options, Connect-Content-Encoding, Connect-Accept-Encoding, Grpc-Status, Grpc-Message")
	h.Set("Access-Control-Max-Age", "7200")
}

// authorize checks the token of a request; status 0 lets it pass. A sandbox that
// does not exist has a token too: the answer says nothing about which exist.
func (p *Proxy) authorize(r *http.Request, t Target) (status int, message string) {
	if t.Port != AgentPort {
		v, ok := p.view(t.ID)
		if ok && v.TrafficToken && !keys.Equal(r.Header.Get("E2b-Traffic-Access-Token"), p.opts.Minter.Traffic(t.ID)) {
			return http.StatusForbidden, "the traffic access token is missing or wrong"
		}
		return 0, ""
	}
	if t.signed || r.URL.Path == "/health" {
		return 0, ""
	}
	want := p.opts.Minter.Access(t.ID)
	given := r.Header.Get("X-Access-Token")
	if given != "" && keys.Equal(given, want) {
		return 0, ""
	}
	// Killed and unknown ones say so whatever the token: clients ask after the death.
	if _, ok := p.view(t.ID); !ok {
		return http.StatusBadGateway, notFoundMessage
	}
	if r.URL.Path == "/files" && given == "" {
		sig, present, err := keys.ParseSignature(r.Method, r.URL.Query(), time.Now())
		switch {
		case err != nil:
			return http.StatusUnauthorized, err.Error()
		case present && sig.Matches(want):
			return 0, ""
		case present:
			return http.StatusUnauthorized, "invalid signature"
		}
	}
	return http.StatusUnauthorized, "the access token is missing or wrong"
}

func (p *Proxy) view(id string) (lifecycle.View, bool) {
	b, err := p.opts.Fleet.Get("", id)
	if err != nil {
		return lifecycle.View{}, false
	}
	v := b.View()
	return v, v.Visible() != ""
}

// errNoWake: this request may not resume the sandbox.
var errNoWake = errors.New("the access token is missing or wrong")

// mayWake checks who resumes a sandbox by traffic. /health needs no token to be
// answered, but it does to wake.
func (p *Proxy) mayWake(r *http.Request, t Target, v lifecycle.View) error {
	if t.Port != AgentPort {
		return nil // authorize has seen the traffic token, if it wants one
	}
	if t.signed || r.URL.Path == "/files" || keys.Equal(r.Header.Get("X-Access-Token"), p.opts.Minter.Access(v.ID)) {
		return nil
	}
	return errNoWake
}

func (p *Proxy) unavailable(w http.ResponseWriter, r *http.Request, t Target, err error) {
	switch {
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client has left
	case errors.Is(err, errNoWake):
		writeError(w, r, t, http.StatusForbidden, err.Error())
	case errors.Is(err, lifecycle.ErrLimit), errors.Is(err, lifecycle.ErrBusy):
		w.Header().Set("Retry-After", "1")
		writeError(w, r, t, http.StatusTooManyRequests, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		writeError(w, r, t, http.StatusConflict, "The sandbox is still changing its state")
	default:
		if !errors.Is(err, lifecycle.ErrNotFound) {
			p.opts.Log.Warn("wait for sandbox", "sandbox", t.ID, "err", err)
		}
		if b, gerr := p.opts.Fleet.Get("", t.ID); gerr == nil {
			w.Header().Set("Agentzip-State", b.View().State.String())
		} else if cause := causeOf(gerr); cause != "" {
			w.Header().Set("Agentzip-Cause", cause)
		}
		writeError(w, r, t, http.StatusBadGateway, notFoundMessage)
	}
}

// causeOf is why a sandbox ended, in one line; "" if it never was.
func causeOf(err error) string {
	_, cause, _ := strings.Cut(err.Error(), ": ")
	line, _, _ := strings.Cut(cause, "\n")
	return line
}

const (
	notFoundMessage = "The sandbox was not found" // clients compare this text
	portMessage     = "The sandbox is running but port is not open"
)

// forward passes a request on and its answer back.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request, t Target, live *lifecycle.Live) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	stop := context.AfterFunc(live.Context(), func() { cancel(lifecycle.ErrCut) }) //nolint:contextcheck // the VM's lifetime
	defer stop()
	kind := ""
	if t.Port == AgentPort {
		kind = kindOf(r)
	}
	win, err := openWindow(ctx, live.Sandbox, kind)
	if err != nil {
		p.unavailable(w, r, t, lifecycle.ErrNotFound)
		return
	}
	defer win.close()
	p.Served.Add(1)
	r = r.WithContext(ctx)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = countedBody{r.Body, win}
	}
	transport := live.Sandbox.Agent()
	if t.Port != AgentPort {
		transport = &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				c, err := live.Sandbox.Dial(ctx, t.Port)
				if err != nil {
					return nil, err
				}
				return countedConn{c, win}, nil
			},
			// A connection a request: none is left open in a sandbox that may be
			// paused, and none breaks a request because the server closed it.
			DisableKeepAlives:  true,
			DisableCompression: true,
		}
	}
	answered := false
	rp := &httputil.ReverseProxy{
		Rewrite:       func(pr *httputil.ProxyRequest) { rewrite(pr, t, live.Box.View()) },
		Transport:     transport,
		FlushInterval: -1, // each message at once
		ErrorLog:      p.errors,
		ModifyResponse: func(resp *http.Response) error {
			if t.Port == AgentPort {
				for name := range resp.Header {
					if strings.HasPrefix(name, "Access-Control-") {
						delete(resp.Header, name) // ours are set
					}
				}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			answered = true
			p.failed(w, r, t, ctx, err)
		},
	}
	defer resetOnAbort(r, ctx, &answered)
	rp.ServeHTTP(countedWriter{w, win}, r)
}

// rewrite makes the guest's request of the client's.
func rewrite(pr *httputil.ProxyRequest, t Target, v lifecycle.View) {
	out := pr.Out
	out.URL.Scheme, out.URL.Host = "http", "localhost:"+strconv.Itoa(int(t.Port))
	if out.Host = pr.In.Host; pr.In.URL.Host != "" {
		out.Host = pr.In.URL.Host
	}
	if t.Port != AgentPort && v.Network != nil && v.Network.MaskHost != "" {
		out.Host = strings.ReplaceAll(v.Network.MaskHost, "${PORT}", strconv.Itoa(int(t.Port)))
	}
	for _, h := range []string{headerID, headerPort, "X-Api-Key", "E2b-Traffic-Access-Token", "Proxy-Authorization"} {
		out.Header.Del(h)
	}
	if t.Port == AgentPort {
		out.Header.Del("X-Access-Token")
		out.Header.Del("Origin")
	} else {
		out.Header["X-Forwarded-For"] = pr.In.Header["X-Forwarded-For"]
		pr.SetXForwarded()
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header.Set("User-Agent", "") // or the transport would add its own
	}
}

// failed answers a request that got no answer from the guest.
func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, t Target, ctx context.Context, err error) { //nolint:revive // ctx of the forwarding, not of r
	switch {
	case errors.Is(err, lifecycle.ErrPortClosed):
		writeError(w, r, t, http.StatusBadGateway, portMessage)
		return
	case errors.Is(context.Cause(ctx), lifecycle.ErrCut):
		writeError(w, r, t, http.StatusBadGateway, notFoundMessage)
		return
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler)
	}
	p.opts.Log.Debug("forward request", "sandbox", t.ID, "port", t.Port, "err", err)
	if _, ok := p.view(t.ID); !ok {
		writeError(w, r, t, http.StatusBadGateway, notFoundMessage)
		return
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		writeError(w, r, t, http.StatusRequestEntityTooLarge, tooLarge.Error())
		return
	}
	writeError(w, r, t, http.StatusBadGateway, "The sandbox did not answer")
}

// page is what a person sees in a browser.
var page = template.Must(template.New("error").Parse(`<!doctype html><title>{{.Code}}</title>
<style>body{font:16px system-ui;margin:15vh auto;max-width:36em}code{background:#eee;padding:2px 4px}</style>
<h1>{{.Message}}</h1><p>Sandbox <code>{{.ID}}</code>{{if .Port}}, port <code>{{.Port}}</code>{{end}}</p>
`))

func writeError(w http.ResponseWriter, r *http.Request, t Target, status int, message string) {
	answer := struct {
		ID      string `json:"sandboxId"`
		Message string `json:"message"`
		Port    int    `json:"port,omitempty"`
		Code    int    `json:"code"`
	}{ID: t.ID, Message: message, Code: status}
	if message == portMessage {
		answer.Port = int(t.Port)
	}
	var body bytes.Buffer
	h := w.Header()
	if accept := r.Header.Get("Accept"); strings.Contains(r.UserAgent(), "Mozilla/") && strings.Contains(accept, "text/html") {
		h.Set("Content-Type", "text/html; charset=utf-8")
		_ = page.Execute(&body, answer) // into memory, of plain fields
	} else {
		h.Set("Content-Type", "application/json")
		_ = json.NewEncoder(&body).Encode(answer)
	}
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(body.Bytes())
}

// WriteRouteError answers a request that could not be routed.
func WriteRouteError(w http.ResponseWriter, r *http.Request, err error) {
	status, message := http.StatusBadRequest, err.Error()
	if e, ok := errors.AsType[*RouteError](err); ok {
		status = e.Status
	}
	writeError(w, r, Target{}, status, message)
}
