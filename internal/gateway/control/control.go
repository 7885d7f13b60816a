package control

import (
	"context"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/build"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// maxBody bounds a request's JSON. The largest honest ones are metadata and
// environments, which have limits of their own below it.
const maxBody = 1 << 20

// Options of the control plane. All are read only.
type Options struct {
	Fleet      *lifecycle.Fleet
	Backend    lifecycle.Backend
	Store      *store.Store
	Keys       *keys.Ring
	Minter     *keys.Minter
	Domain     func() string // "localhost:PORT", what getHost builds names with
	Agent      string        // envdVersion: decides what clients dare to use
	Aliases    map[string]string
	MaxTimeout time.Duration             // 0: 24 h
	CreateRate func(team string) float64 // creations a second; nil or 0: any
	Dir        string                    // for uploads of builds
	Log        *slog.Logger              // nil discards
}

// An API answers the control plane. Safe for concurrent use.
type API struct {
	opts    Options
	handler http.Handler
	creates *buckets
	samples samples
	builder *build.Builder

	// snapshots orders changes of the snapshots' index: two of one name at once.
	snapshots sync.Mutex
}

var _ rest.StrictServerInterface = (*API)(nil)

// New makes the control plane. Close it.
func New(o Options) (*API, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.MaxTimeout == 0 {
		o.MaxTimeout = 24 * time.Hour
	}
	a := &API{opts: o, creates: newBuckets(o.CreateRate)}
	strict := rest.NewStrictHandlerWithOptions(a, nil, rest.StrictHTTPServerOptions{
		RequestErrorHandlerFunc:  a.badRequest,
		ResponseErrorHandlerFunc: a.fail,
	})
	mux := http.NewServeMux()
	rest.HandlerWithOptions(strict, rest.StdHTTPServerOptions{BaseRouter: mux, ErrorHandlerFunc: a.badRequest})
	for pattern, message := range later {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
			WriteError(w, http.StatusNotImplemented, message)
		})
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/templates/") && strings.HasSuffix(r.URL.Path, "/tags") {
			WriteError(w, http.StatusNotImplemented, later["POST /templates/tags"])
			return
		}
		WriteError(w, http.StatusNotFound, "no such route: "+r.Method+" "+r.URL.Path)
	})
	a.handler = mux
	var err error
	a.builder, err = build.New(build.Options{Backend: o.Backend, Store: o.Store, Dir: o.Dir, Keep: a.Keep, Log: o.Log})
	return a, err
}

// Close ends builds under way.
func (a *API) Close() { a.builder.Close() }

// later are the routes that this version does not have, and says so.
var later = map[string]string{
	"/volumes":                         "volumes are not supported",
	"/volumes/":                        "volumes are not supported",
	"/secrets":                         "secrets are not supported: they need the cloud's egress proxy; pass values with envs",
	"/secrets/":                        "secrets are not supported: they need the cloud's egress proxy; pass values with envs",
	"/sandboxes/{sandboxID}/logs":      "logs are not kept",
	"/v2/sandboxes/{sandboxID}/logs":   "logs are not kept",
	"/teams":                           "teams are managed with `agentzip key`",
	"/teams/":                          "teams are managed with `agentzip key`",
	"POST /templates/tags":             "tags of templates are not supported",
	"DELETE /templates/tags":           "tags of templates are not supported",
	"PATCH /v2/templates/{templateID}": "publishing templates is not supported",
}

type (
	teamKey struct{}
	hostKey struct{}
)

// team returns whose request it is.
func team(ctx context.Context) string {
	t, _ := ctx.Value(teamKey{}).(string)
	return t
}

// ServeHTTP authenticates and answers.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	escaped := r.URL.EscapedPath()
	if clean := path.Clean(escaped); clean != escaped && clean != strings.TrimSuffix(escaped, "/") {
		WriteError(w, http.StatusNotFound, "no such route") // ServeMux would redirect, which clients do not follow
		return
	}
	if a.upload(w, r) {
		return
	}
	t, ok := a.opts.Keys.Team(r.Header.Get("X-API-Key"))
	if !ok {
		WriteError(w, http.StatusUnauthorized, "Unauthorized: the API key is missing or not valid: use one that `agentzip serve` or `agentzip key create` printed")
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	ctx := context.WithValue(context.WithValue(r.Context(), teamKey{}, t), hostKey{}, r.Host)
	a.handler.ServeHTTP(w, r.WithContext(ctx))
}

// box finds the sandbox of a request: ids may have a suffix behind a dash.
func (a *API) box(ctx context.Context, id string) (*lifecycle.Box, error) {
	id, _, _ = strings.Cut(id, "-")
	b, err := a.opts.Fleet.Get(team(ctx), id)
	if err != nil {
		return nil, notFound(id, err)
	}
	if v := b.View(); v.State == lifecycle.Creating {
		return nil, notFound(id, lifecycle.ErrNotFound)
	}
	return b, nil
}

func notFound(id string, err error) error {
	return refuse(http.StatusNotFound, "Sandbox %q not found: %v", id, err)
}
