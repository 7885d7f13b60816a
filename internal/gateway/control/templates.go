package control

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// resolve finds what a sandbox is made from: a snapshot, an alias or a template.
func (a *API) resolve(rec *store.Sandbox) error {
	s, ok, err := a.snapshot(rec.Team, rec.Requested)
	if err != nil {
		return err
	}
	if ok {
		rec.Snapshot, rec.Template, rec.Requested = s.Key, s.Template, s.ID
		rec.CPUs, rec.MemoryMB, rec.DiskMB = s.CPUs, s.MemoryMB, s.DiskMB
		if rec.Cohort == "" {
			rec.Cohort = s.Cohort // siblings of the source share pages with it
		}
		rec.User, rec.Workdir = s.User, s.Workdir
		if len(s.Env) > 0 {
			env := maps.Clone(s.Env)
			maps.Copy(env, rec.Env)
			rec.Env = env
		}
		return nil
	}
	facts, err := a.template(rec.Requested)
	if err != nil {
		return err
	}
	rec.Template, rec.CPUs, rec.MemoryMB, rec.DiskMB = facts.Name, facts.CPUs, facts.MemoryMB, facts.DiskMB
	return nil
}

// template finds a template by name or alias; a tag must be the default one.
func (a *API) template(id string) (lifecycle.Facts, error) {
	name, tag, tagged := strings.Cut(id, ":")
	if tagged && tag != defaultTag && tag != "latest" {
		return lifecycle.Facts{}, refuse(http.StatusNotFound, "template %q not found: tags are not supported", id)
	}
	facts, err := a.opts.Backend.Template(name)
	if errors.Is(err, lifecycle.ErrNoTemplate) {
		if target := a.opts.Aliases[name]; target != "" {
			facts, err = a.opts.Backend.Template(target)
		}
	}
	if errors.Is(err, lifecycle.ErrNoTemplate) {
		return facts, refuse(http.StatusNotFound, "template %q not found", id)
	}
	return facts, err
}

// GetAlias is GET /templates/aliases/{alias}.
func (a *API) GetAlias(ctx context.Context, r rest.GetAliasRequestObject) (rest.GetAliasResponseObject, error) {
	if s, ok, err := a.snapshot(team(ctx), r.Alias); err != nil {
		return nil, err
	} else if ok {
		return rest.GetAlias200JSONResponse{TemplateID: s.ID}, nil
	}
	facts, err := a.template(r.Alias)
	if err != nil {
		return nil, err
	}
	return rest.GetAlias200JSONResponse{TemplateID: facts.Name}, nil
}

func (a *API) templates(team string) ([]rest.Template, error) {
	all, err := a.opts.Backend.Templates()
	if err != nil {
		return nil, err
	}
	list := make([]rest.Template, 0, len(all))
	for _, f := range all {
		names := []string{f.Name}
		for alias, target := range a.opts.Aliases {
			if target == f.Name && alias != f.Name {
				names = append(names, alias)
			}
		}
		list = append(list, rest.Template{
			TemplateID: f.Name, BuildID: f.Name, CpuCount: f.CPUs, MemoryMB: f.MemoryMB, DiskSizeMB: f.DiskMB,
			Aliases: names, Names: names, CreatedAt: stamp(f.Created), UpdatedAt: stamp(f.Created),
			EnvdVersion: a.opts.Agent, BuildCount: 1, BuildStatus: "ready",
		})
	}
	err = store.Each(a.opts.Store, store.Snapshots, func(_ string, s store.Snapshot) {
		if s.Team != team || !s.Built {
			return
		}
		list = append(list, rest.Template{
			TemplateID: s.ID, BuildID: s.Key, CpuCount: s.CPUs, MemoryMB: s.MemoryMB, DiskSizeMB: s.DiskMB,
			Aliases: s.Names, Names: s.Names, CreatedAt: stamp(s.Created), UpdatedAt: stamp(s.Created),
			EnvdVersion: a.opts.Agent, BuildCount: 1, BuildStatus: "ready",
		})
	})
	return list, err
}

// ListTemplates is GET /v2/templates.
func (a *API) ListTemplates(ctx context.Context, _ rest.ListTemplatesRequestObject) (rest.ListTemplatesResponseObject, error) {
	list, err := a.templates(team(ctx))
	if err != nil {
		return nil, err
	}
	return page{body: list}, nil
}

// ListTemplatesV1 is GET /templates.
func (a *API) ListTemplatesV1(ctx context.Context, _ rest.ListTemplatesV1RequestObject) (rest.ListTemplatesV1ResponseObject, error) {
	list, err := a.templates(team(ctx))
	if err != nil {
		return nil, err
	}
	return page{body: list}, nil
}

// DeleteTemplate is DELETE /templates/{id}, which deletes snapshots. Templates
// are the host's, not a team's.
func (a *API) DeleteTemplate(ctx context.Context, r rest.DeleteTemplateRequestObject) (rest.DeleteTemplateResponseObject, error) {
	id := r.TemplateID
	if name, built := a.builder.Named(team(ctx), id); built {
		id = name
	}
	ok, err := a.forget(team(ctx), id)
	if err != nil {
		return nil, err
	}
	if !ok {
		if _, err := a.template(r.TemplateID); err == nil {
			return nil, refuse(http.StatusForbidden, "template %q belongs to the host: remove it with `agentzip template rm`", r.TemplateID)
		}
		return nil, refuse(http.StatusNotFound, "template %q not found", r.TemplateID)
	}
	return rest.DeleteTemplate204Response{}, nil
}

// sampleAge is how old the last measurement may be; clients poll every few seconds.
const sampleAge = 4 * time.Second
