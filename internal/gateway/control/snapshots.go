package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// defaultTag is the tag of names that have none.
const defaultTag = "default"

var snapshotName = regexp.MustCompile(`^([a-z0-9][a-z0-9._-]{0,62}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,127})?$`)

// CreateSnapshot is POST /sandboxes/{id}/snapshots.
func (a *API) CreateSnapshot(ctx context.Context, r rest.CreateSnapshotRequestObject) (rest.CreateSnapshotResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	key := strings.Replace(lifecycle.NewID(), "i", "s", 1)
	id := key + ":" + defaultTag
	if r.Body != nil && r.Body.Name != nil && *r.Body.Name != "" {
		if id, err = qualify(team(ctx), *r.Body.Name); err != nil {
			return nil, err
		}
	}
	source, err := b.Snapshot(ctx, key)
	if err != nil {
		return nil, err
	}
	rec := store.Snapshot{
		Key: key, ID: id, Names: []string{id}, Team: team(ctx), Source: b.ID(), Template: source.Template,
		Cohort: source.Cohort, Created: time.Now(), CPUs: source.CPUs, MemoryMB: source.MemoryMB, DiskMB: source.DiskMB,
		User: source.User, Workdir: source.Workdir,
	}
	if err := a.Keep(rec); err != nil {
		return nil, errors.Join(err, a.opts.Backend.Forget(key))
	}
	return rest.CreateSnapshot201JSONResponse{SnapshotID: rec.ID, Names: rec.Names}, nil
}

// qualify gives a snapshot's name its team and tag.
func qualify(team, name string) (string, error) {
	if !snapshotName.MatchString(name) {
		return "", refuse(http.StatusBadRequest, "snapshot name %q: use letters, digits, '.', '_', '-', and at most one ':' before a tag", name)
	}
	if ns, rest, ok := strings.Cut(name, "/"); ok {
		if ns != team {
			return "", refuse(http.StatusBadRequest, "snapshot name %q: the name space is another team's", name)
		}
		name = rest
	}
	if !strings.Contains(name, ":") {
		name += ":" + defaultTag
	}
	return team + "/" + name, nil
}

// Keep writes a snapshot's record; an older one of the same name is given up.
func (a *API) Keep(rec store.Snapshot) error {
	a.snapshots.Lock()
	defer a.snapshots.Unlock()
	var old store.Snapshot
	had, err := a.opts.Store.Get(store.Snapshots, rec.Team+"|"+rec.ID, &old)
	if err != nil {
		return err
	}
	if err := a.opts.Store.Put(store.Snapshots, rec.Team+"|"+rec.ID, rec); err != nil {
		return fmt.Errorf("keep snapshot %s: %w", rec.ID, err)
	}
	if had {
		if err := a.opts.Backend.Forget(old.Key); err != nil {
			a.opts.Log.Error("delete replaced snapshot", "snapshot", old.ID, "err", err)
		}
	}
	return nil
}

// snapshot finds a snapshot by any of the forms clients use.
func (a *API) snapshot(team, id string) (store.Snapshot, bool, error) {
	forms := []string{id}
	if !strings.Contains(id, ":") {
		forms = append(forms, id+":"+defaultTag)
	}
	if !strings.Contains(id, "/") {
		for _, f := range slices.Clone(forms) {
			forms = append(forms, team+"/"+f)
		}
	}
	for _, f := range forms {
		var s store.Snapshot
		if ok, err := a.opts.Store.Get(store.Snapshots, team+"|"+f, &s); ok || err != nil {
			return s, ok, err
		}
	}
	return store.Snapshot{}, false, nil
}

// forget deletes a snapshot; false if there is none.
func (a *API) forget(team, id string) (bool, error) {
	a.snapshots.Lock()
	defer a.snapshots.Unlock()
	s, ok, err := a.snapshot(team, id)
	if !ok || err != nil {
		return false, err
	}
	if err := a.opts.Store.Delete(store.Snapshots, team+"|"+s.ID); err != nil {
		return false, err
	}
	return true, a.opts.Backend.Forget(s.Key)
}

// ListSnapshots is GET /snapshots, newest first.
func (a *API) ListSnapshots(ctx context.Context, r rest.ListSnapshotsRequestObject) (rest.ListSnapshotsResponseObject, error) {
	size, err := pageSize(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	from, err := parseCursor(r.Params.NextToken, "desc")
	if err != nil {
		return nil, err
	}
	var name string
	if r.Params.Name != nil && *r.Params.Name != "" {
		if name, err = qualify(team(ctx), *r.Params.Name); err != nil {
			return nil, err
		}
	}
	var all []store.Snapshot
	err = store.Each(a.opts.Store, store.Snapshots, func(_ string, s store.Snapshot) {
		source := r.Params.SandboxID
		if s.Team == team(ctx) && !s.Built && (source == nil || *source == "" || *source == s.Source) && (name == "" || name == s.ID) {
			all = append(all, s)
		}
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(x, y store.Snapshot) int {
		return -cmp.Or(x.Created.Compare(y.Created), strings.Compare(x.Key, y.Key))
	})
	answer := page{}
	found := []rest.Snapshot{}
	var last cursor
	for _, s := range all {
		if from != nil && from.before(s.Created, s.Key) {
			continue
		}
		if len(found) == size {
			answer.next = last.encode()
			break
		}
		found = append(found, rest.Snapshot{SnapshotID: s.ID, Names: s.Names})
		last = cursor{Order: "desc", Time: s.Created, ID: s.Key}
	}
	answer.body = found
	return answer, nil
}
