package control

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/build"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// uploads is where the files of COPY steps go; no API key, but a token of the URL.
const uploads = "/agentzip/uploads/"

// images are what the SDK's ready-made bases are here.
var images = map[string]string{
	"e2bdev/base":             "base",
	"e2bdev/code-interpreter": "code-interpreter-v1",
}

// maxLogPage is how many log entries one poll gets.
const maxLogPage = 500

// CreateTemplate is POST /v3/templates.
func (a *API) CreateTemplate(ctx context.Context, r rest.CreateTemplateRequestObject) (rest.CreateTemplateResponseObject, error) {
	if r.Body == nil || r.Body.Name == nil || *r.Body.Name == "" {
		return nil, refuse(http.StatusBadRequest, "name is required")
	}
	name := *r.Body.Name
	if r.Body.Tags != nil && len(*r.Body.Tags) > 0 {
		if strings.Contains(name, ":") || len(*r.Body.Tags) > 1 {
			return nil, refuse(http.StatusNotImplemented, "several tags of one template are not supported")
		}
		name += ":" + (*r.Body.Tags)[0]
	}
	id, err := qualify(team(ctx), name)
	if err != nil {
		return nil, err
	}
	b, err := a.builder.Create(team(ctx), id)
	if errors.Is(err, build.ErrTooMany) {
		return nil, &apiError{http.StatusTooManyRequests, err.Error(), 5}
	}
	if err != nil {
		return nil, err
	}
	short, tag, _ := strings.Cut(strings.TrimPrefix(id, team(ctx)+"/"), ":")
	return rest.CreateTemplate202JSONResponse{
		TemplateID: b.Template, BuildID: b.ID, Names: []string{id}, Aliases: []string{short}, Tags: []string{tag},
	}, nil
}

// GetTemplateUpload is GET /templates/{id}/files/{hash}.
func (a *API) GetTemplateUpload(ctx context.Context, r rest.GetTemplateUploadRequestObject) (rest.GetTemplateUploadResponseObject, error) {
	if !build.ValidHash(r.Hash) {
		return nil, refuse(http.StatusBadRequest, "the hash must be 64 hex digits")
	}
	if a.builder.HasUpload(r.Hash) {
		return rest.GetTemplateUpload201JSONResponse{Present: true}, nil
	}
	host, _ := ctx.Value(hostKey{}).(string)
	url := "http://" + host + uploads + r.Hash + "?team=" + team(ctx) + "&token=" + a.opts.Minter.Upload(team(ctx), r.Hash)
	return rest.GetTemplateUpload201JSONResponse{Url: &url}, nil
}

// upload answers PUT of a COPY step's files; false if it is another request.
func (a *API) upload(w http.ResponseWriter, r *http.Request) bool {
	hash, ok := strings.CutPrefix(r.URL.Path, uploads)
	if !ok {
		return false
	}
	q := r.URL.Query()
	switch {
	case r.Method != http.MethodPut:
		WriteError(w, http.StatusMethodNotAllowed, "use PUT")
	case !build.ValidHash(hash) || !keys.Equal(q.Get("token"), a.opts.Minter.Upload(q.Get("team"), hash)):
		WriteError(w, http.StatusForbidden, "the upload's token is wrong")
	default:
		err := a.builder.Upload(hash, r.Body, r.ContentLength)
		switch {
		case errors.Is(err, build.ErrTooLarge):
			WriteError(w, http.StatusRequestEntityTooLarge, err.Error())
		case err != nil:
			a.fail(w, r, err)
		default:
			w.WriteHeader(http.StatusOK)
		}
	}
	return true
}

func (a *API) build(ctx context.Context, template, id string) (*build.Build, error) {
	b, err := a.builder.Get(team(ctx), template, id)
	if err != nil {
		return nil, refuse(http.StatusNotFound, "build %s of template %s not found", id, template)
	}
	return b, nil
}

// StartBuild is POST /v2/templates/{id}/builds/{build}.
func (a *API) StartBuild(ctx context.Context, r rest.StartBuildRequestObject) (rest.StartBuildResponseObject, error) {
	b, err := a.build(ctx, r.TemplateID, r.BuildID)
	if err != nil {
		return nil, err
	}
	if r.Body == nil {
		return nil, refuse(http.StatusBadRequest, "the body is missing")
	}
	p, err := a.plan(ctx, *r.Body)
	if err != nil {
		return nil, err
	}
	err = a.builder.Start(b, p)
	switch {
	case errors.Is(err, build.ErrBad):
		return nil, refuse(http.StatusBadRequest, "%v", err)
	case errors.Is(err, build.ErrStarted):
		return nil, refuse(http.StatusConflict, "%v", err)
	case err != nil:
		return nil, err
	}
	return rest.StartBuild202Response{}, nil
}

// plan checks what a build is to start from and turns the request into a Plan.
func (a *API) plan(ctx context.Context, body rest.BuildStart) (build.Plan, error) {
	var p build.Plan
	if body.FromImageRegistry != nil && len(*body.FromImageRegistry) > 0 {
		return p, refuse(http.StatusBadRequest, "fromImageRegistry is not supported: log in on the host (docker login) or give an OCI layout")
	}
	image, from := text(body.FromImage), text(body.FromTemplate)
	if (image == "") == (from == "") {
		return p, refuse(http.StatusBadRequest, "give one of fromImage and fromTemplate")
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(image, "docker.io/"), ":")
	if known := images[name]; known != "" {
		image, from = "", known
	}
	p.Image = image
	if from != "" {
		rec := store.Sandbox{Team: team(ctx), Requested: from}
		if err := a.resolve(&rec); err != nil {
			return p, err
		}
		p.Base, p.Env, p.User, p.Workdir = rec, rec.Env, rec.User, rec.Workdir
	}
	p.Start, p.Ready, p.Force = text(body.StartCmd), text(body.ReadyCmd), isTrue(body.Force)
	if body.Steps != nil {
		for _, s := range *body.Steps {
			step := build.Step{Type: strings.ToUpper(s.Type), FilesHash: text(s.FilesHash), Force: isTrue(s.Force)}
			if s.Args != nil {
				step.Args = *s.Args
			}
			p.Steps = append(p.Steps, step)
		}
	}
	return p, nil
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// GetBuild is GET /templates/{id}/builds/{build}/status.
func (a *API) GetBuild(ctx context.Context, r rest.GetBuildRequestObject) (rest.GetBuildResponseObject, error) {
	b, err := a.build(ctx, r.TemplateID, r.BuildID)
	if err != nil {
		return nil, err
	}
	offset, limit := 0, maxLogPage
	if r.Params.LogsOffset != nil {
		offset = *r.Params.LogsOffset
	}
	if r.Params.Limit != nil && *r.Params.Limit > 0 {
		limit = min(limit, *r.Params.Limit)
	}
	status, lines, reason, step := b.State(offset, limit)
	answer := rest.GetBuild200JSONResponse{
		TemplateID: b.Template, BuildID: b.ID, Status: string(status), LogEntries: logEntries(lines), Logs: []string{},
	}
	for _, l := range lines {
		answer.Logs = append(answer.Logs, l.Text)
	}
	if status == build.Failed {
		answer.Reason = &struct {
			LogEntries *[]rest.BuildLog `json:"logEntries,omitempty"`
			Message    string           `json:"message"`
			Step       *string          `json:"step,omitempty"`
		}{Message: reason, Step: &step}
	}
	return answer, nil
}

func logEntries(lines []build.Line) []rest.BuildLog {
	entries := make([]rest.BuildLog, len(lines))
	for i, l := range lines {
		entries[i] = rest.BuildLog{Timestamp: l.At, Level: l.Level, Message: l.Text}
		if l.Step != "" {
			entries[i].Step = &l.Step
		}
	}
	return entries
}
