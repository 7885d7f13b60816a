package control

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// Default times to live: what the two generations of clients expect.
const (
	timeoutV1 = 15 * time.Second
	timeoutV2 = 300 * time.Second
)

// clientID is a constant that clients only pass around.
const clientID = "agentzip"

// cohortKey is the metadata key by which a client names the sandbox's cohort.
const cohortKey = "agentzip.cohort"

// CreateSandbox is POST /v2/sandboxes.
func (a *API) CreateSandbox(ctx context.Context, r rest.CreateSandboxRequestObject) (rest.CreateSandboxResponseObject, error) {
	s, err := a.create(ctx, r.Body, timeoutV2)
	if err != nil {
		return nil, err
	}
	return rest.CreateSandbox201JSONResponse{SandboxJSONResponse: s}, nil
}

// CreateSandboxV1 is POST /sandboxes.
func (a *API) CreateSandboxV1(ctx context.Context, r rest.CreateSandboxV1RequestObject) (rest.CreateSandboxV1ResponseObject, error) {
	s, err := a.create(ctx, r.Body, timeoutV1)
	if err != nil {
		return nil, err
	}
	return rest.CreateSandboxV1201JSONResponse{SandboxJSONResponse: s}, nil
}

func (a *API) create(ctx context.Context, body *rest.NewSandbox, fallback time.Duration) (rest.SandboxJSONResponse, error) {
	var none rest.SandboxJSONResponse
	if body == nil {
		return none, refuse(http.StatusBadRequest, "the body is missing")
	}
	rec, err := a.record(ctx, body, fallback)
	if err != nil {
		return none, err
	}
	if wait, ok := a.creates.take(rec.Team, time.Now()); !ok {
		return none, &apiError{http.StatusTooManyRequests, "too many sandboxes are being created", wait}
	}
	v, err := a.opts.Fleet.Create(ctx, rec)
	if err != nil {
		return none, err
	}
	return rest.SandboxJSONResponse(a.sandbox(v)), nil
}

// record checks a request and turns it into a record.
func (a *API) record(ctx context.Context, body *rest.NewSandbox, fallback time.Duration) (store.Sandbox, error) {
	rec := store.Sandbox{
		Team: team(ctx), Requested: body.TemplateID,
		AutoPause: isTrue(body.AutoPause), AutoMemory: body.AutoPauseMemory == nil || *body.AutoPauseMemory,
		AutoResume: body.AutoResume != nil && isTrue(body.AutoResume.Enabled),
	}
	if err := unsupported(body); err != nil {
		return rec, err
	}
	switch {
	case !rec.AutoMemory && !rec.AutoPause:
		return rec, refuse(http.StatusBadRequest, "autoPauseMemory: false needs autoPause: true")
	case !rec.AutoMemory && rec.AutoResume:
		return rec, refuse(http.StatusBadRequest, "autoResume needs a pause that keeps the memory (autoPauseMemory)")
	case rec.AutoResume && !rec.AutoPause:
		return rec, refuse(http.StatusBadRequest, "autoResume needs autoPause: true")
	}
	var err error
	if rec.Timeout, err = a.timeout(body.Timeout, fallback); err != nil {
		return rec, err
	}
	if rec.Metadata, rec.Env, err = stringMaps(body); err != nil {
		return rec, err
	}
	rec.Cohort = rec.Metadata[cohortKey]
	if rec.Cohort != "" {
		if err := keys.ValidName(rec.Cohort); err != nil {
			return rec, refuse(http.StatusBadRequest, "metadata %s: %v", cohortKey, err)
		}
	}
	if body.AllowInternetAccess != nil {
		rec.InternetSet, rec.Internet = true, *body.AllowInternetAccess
	}
	if rec.Network, err = network(body.Network); err != nil {
		return rec, err
	}
	rec.TrafficToken = rec.Network != nil && rec.Network.Public != nil && !*rec.Network.Public
	return rec, a.resolve(&rec)
}

// unsupported refuses what only the cloud has.
func unsupported(body *rest.NewSandbox) error {
	for what, given := range map[string]bool{
		"mcp":          body.Mcp != nil && len(*body.Mcp) > 0,
		"iam":          body.Iam != nil && len(*body.Iam) > 0,
		"volumeMounts": body.VolumeMounts != nil && len(*body.VolumeMounts) > 0,
	} {
		if given {
			return refuse(http.StatusBadRequest, "%s is not supported by AgentZip", what)
		}
	}
	if body.TemplateID == "" {
		return refuse(http.StatusBadRequest, "templateID is required")
	}
	return nil
}

// Limits of a sandbox's maps; a guest's environment must fit into one exec.
const (
	maxMetadata = 64 << 10
	maxEnv      = 96 << 10
)

func stringMaps(body *rest.NewSandbox) (metadata, env map[string]string, err error) {
	size := func(m map[string]string) (n int) {
		for k, v := range m {
			n += len(k) + len(v)
		}
		return n
	}
	if body.Metadata != nil {
		metadata = *body.Metadata
	}
	if body.EnvVars != nil {
		env = *body.EnvVars
	}
	if size(metadata) > maxMetadata {
		return nil, nil, refuse(http.StatusBadRequest, "metadata is larger than %d bytes", maxMetadata)
	}
	if size(env) > maxEnv {
		return nil, nil, refuse(http.StatusBadRequest, "envVars are larger than %d bytes", maxEnv)
	}
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return nil, nil, refuse(http.StatusBadRequest, "envVars: %q is not a variable", k)
		}
	}
	return metadata, env, nil
}

// timeout reads a time to live in seconds.
func (a *API) timeout(given *int64, fallback time.Duration) (time.Duration, error) {
	if given == nil {
		return fallback, nil
	}
	if *given < 0 {
		return 0, refuse(http.StatusBadRequest, "timeout must not be negative")
	}
	if *given > int64(a.opts.MaxTimeout/time.Second) {
		return 0, refuse(http.StatusBadRequest, "Timeout cannot be greater than %d hours", int(a.opts.MaxTimeout.Hours()))
	}
	return time.Duration(*given) * time.Second, nil
}

// clip reads a time to live that is shortened to the maximum.
func (a *API) clip(given *int64, fallback time.Duration) time.Duration {
	if given == nil {
		return fallback
	}
	return time.Duration(max(0, min(*given, int64(a.opts.MaxTimeout/time.Second)))) * time.Second
}

// GetSandbox is GET /sandboxes/{id}.
func (a *API) GetSandbox(ctx context.Context, r rest.GetSandboxRequestObject) (rest.GetSandboxResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	v := b.View()
	if v.Visible() == "" {
		return nil, notFound(v.ID, lifecycle.ErrNotFound)
	}
	return rest.GetSandbox200JSONResponse(a.detail(v)), nil
}

// KillSandbox is DELETE /sandboxes/{id}.
func (a *API) KillSandbox(ctx context.Context, r rest.KillSandboxRequestObject) (rest.KillSandboxResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	if err := b.Kill(lifecycle.CauseKilled); err != nil {
		return nil, err
	}
	return rest.KillSandbox204Response{}, nil
}

// ConnectSandbox is POST /v2/sandboxes/{id}/connect.
func (a *API) ConnectSandbox(ctx context.Context, r rest.ConnectSandboxRequestObject) (rest.ConnectSandboxResponseObject, error) {
	var timeout *int64
	cold := false
	if r.Body != nil {
		timeout, cold = r.Body.Timeout, r.Body.Memory != nil && !*r.Body.Memory
	}
	s, resumed, err := a.connect(ctx, r.SandboxID, lifecycle.Wake{Timeout: a.clip(timeout, timeoutV2), Cold: cold})
	switch {
	case err != nil:
		return nil, err
	case resumed:
		return rest.ConnectSandbox201JSONResponse(s), nil
	}
	return rest.ConnectSandbox200JSONResponse{SandboxJSONResponse: s}, nil
}

// ConnectSandboxV1 is POST /sandboxes/{id}/connect.
func (a *API) ConnectSandboxV1(ctx context.Context, r rest.ConnectSandboxV1RequestObject) (rest.ConnectSandboxV1ResponseObject, error) {
	if r.Body == nil || r.Body.Timeout == nil {
		return nil, refuse(http.StatusBadRequest, "timeout is required")
	}
	cold := r.Body.Memory != nil && !*r.Body.Memory
	s, resumed, err := a.connect(ctx, r.SandboxID, lifecycle.Wake{Timeout: a.clip(r.Body.Timeout, timeoutV1), Cold: cold})
	switch {
	case err != nil:
		return nil, err
	case resumed:
		return rest.ConnectSandboxV1201JSONResponse(s), nil
	}
	return rest.ConnectSandboxV1200JSONResponse{SandboxJSONResponse: s}, nil
}

// ResumeSandbox is POST /sandboxes/{id}/resume.
func (a *API) ResumeSandbox(ctx context.Context, r rest.ResumeSandboxRequestObject) (rest.ResumeSandboxResponseObject, error) {
	w := lifecycle.Wake{Timeout: timeoutV1, OnlyWake: true}
	if r.Body != nil {
		w.Timeout, w.Pause = a.clip(r.Body.Timeout, timeoutV1), r.Body.AutoPause
	}
	s, _, err := a.connect(ctx, r.SandboxID, w)
	if err != nil {
		return nil, err
	}
	return rest.ResumeSandbox201JSONResponse{SandboxJSONResponse: s}, nil
}

func (a *API) connect(ctx context.Context, id string, w lifecycle.Wake) (rest.SandboxJSONResponse, bool, error) {
	b, err := a.box(ctx, id)
	if err != nil {
		return rest.SandboxJSONResponse{}, false, err
	}
	c, err := b.Connect(ctx, w)
	if err != nil {
		return rest.SandboxJSONResponse{}, false, err
	}
	return rest.SandboxJSONResponse(a.sandbox(c.View)), c.Resumed, nil
}

// SetTimeout is POST /sandboxes/{id}/timeout.
func (a *API) SetTimeout(ctx context.Context, r rest.SetTimeoutRequestObject) (rest.SetTimeoutResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	if r.Body == nil || r.Body.Timeout == nil {
		return nil, refuse(http.StatusBadRequest, "timeout is required")
	}
	if err := b.SetTimeout(a.clip(r.Body.Timeout, 0), false); err != nil {
		return nil, err
	}
	return rest.SetTimeout204Response{}, nil
}

// RefreshSandbox is POST /sandboxes/{id}/refreshes.
func (a *API) RefreshSandbox(ctx context.Context, r rest.RefreshSandboxRequestObject) (rest.RefreshSandboxResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	var given *int64
	if r.Body != nil {
		given = r.Body.Duration
	}
	if err := b.SetTimeout(a.clip(given, timeoutV1), true); err != nil {
		return nil, err
	}
	return rest.RefreshSandbox204Response{}, nil
}

// PauseSandbox is POST /sandboxes/{id}/pause.
func (a *API) PauseSandbox(ctx context.Context, r rest.PauseSandboxRequestObject) (rest.PauseSandboxResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	memory := r.Body == nil || r.Body.Memory == nil || *r.Body.Memory
	if err := b.Pause(ctx, memory); err != nil {
		return nil, err
	}
	return rest.PauseSandbox204Response{}, nil
}

// maxForks of one request.
const maxForks = 100

// ForkSandbox is POST /sandboxes/{id}/fork.
func (a *API) ForkSandbox(ctx context.Context, r rest.ForkSandboxRequestObject) (rest.ForkSandboxResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	n, timeout := 1, timeoutV1
	if r.Body != nil {
		if r.Body.Count != nil {
			n = *r.Body.Count
		}
		if timeout, err = a.timeout(r.Body.Timeout, timeoutV1); err != nil {
			return nil, err
		}
	}
	if n < 1 || n > maxForks {
		return nil, refuse(http.StatusBadRequest, "count must be 1 to %d", maxForks)
	}
	if limit := a.opts.Fleet.TeamLimit(team(ctx)); limit > 0 && n >= limit {
		return nil, refuse(http.StatusBadRequest, "count %d does not fit into the team's limit of %d concurrent sandboxes", n, limit)
	}
	forks, err := b.Fork(ctx, n, timeout)
	if err != nil {
		return nil, err
	}
	answer := make(rest.ForkSandbox201JSONResponse, len(forks))
	for i, f := range forks {
		if f.Err != nil {
			answer[i].Error = &rest.Error{Code: http.StatusInternalServerError, Message: firstLine(f.Err)}
			continue
		}
		s := a.sandbox(f.View)
		answer[i].Sandbox = &s
	}
	return answer, nil
}

func isTrue(b *bool) bool { return b != nil && *b }
