package control

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// maxPage is the largest and the default page of a list.
const maxPage = 100

// A cursor is where a page of a list ended. It is opaque to clients and good for
// one order only.
type cursor struct {
	Order string    `json:"o"`
	Time  time.Time `json:"t"`
	ID    string    `json:"i"`
}

func (c cursor) encode() string {
	raw, err := json.Marshal(c)
	if err != nil { // a time and two strings: cannot be
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

func parseCursor(token *string, order string) (*cursor, error) {
	if token == nil || *token == "" {
		return nil, nil //nolint:nilnil // no cursor: the first page
	}
	var c cursor
	raw, err := base64.RawURLEncoding.DecodeString(*token)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil || c.ID == "" {
		return nil, refuse(http.StatusBadRequest, "nextToken is not valid")
	}
	if c.Order != order {
		return nil, refuse(http.StatusBadRequest, "nextToken belongs to a list in the other order")
	}
	return &c, nil
}

// before says whether an entry comes at or before the cursor in its order.
func (c *cursor) before(t time.Time, id string) bool {
	cmp := t.Compare(c.Time)
	if cmp == 0 {
		cmp = strings.Compare(id, c.ID)
	}
	if c.Order == "desc" {
		cmp = -cmp
	}
	return cmp <= 0
}

func pageSize(limit *int) (int, error) {
	switch {
	case limit == nil:
		return maxPage, nil
	case *limit < 1 || *limit > maxPage:
		return 0, refuse(http.StatusBadRequest, "limit must be 1 to %d", maxPage)
	}
	return *limit, nil
}

// parseMetadata reads the metadata filter: a query string in a query parameter,
// its keys and values escaped once more.
func parseMetadata(given *string) (map[string]string, error) {
	want := map[string]string{}
	if given == nil || *given == "" {
		return want, nil
	}
	bad := refuse(http.StatusBadRequest, "metadata is not a query string")
	text, err := url.QueryUnescape(*given)
	if err != nil {
		return nil, bad
	}
	for pair := range strings.SplitSeq(text, "&") {
		if pair == "" {
			continue
		}
		k, v, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, bad
		}
		if k, err = url.QueryUnescape(k); err != nil {
			return nil, bad
		}
		if v, err = url.QueryUnescape(v); err != nil {
			return nil, bad
		}
		want[k] = v
	}
	return want, nil
}

func hasAll(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// A filter picks sandboxes of a list.
type filter struct {
	metadata map[string]string
	states   []string
	template string
	after    time.Time
}

func (f filter) picks(v lifecycle.View) bool {
	return slices.Contains(f.states, v.Visible()) && hasAll(v.Metadata, f.metadata) && v.Started.After(f.after) &&
		(f.template == "" || f.template == v.Requested || f.template == v.Template)
}

func parseFilter(p rest.ListSandboxesParams) (f filter, err error) {
	if f.metadata, err = parseMetadata(p.Metadata); err != nil {
		return f, err
	}
	f.states = []string{"running", "paused"}
	if p.State != nil && *p.State != "" {
		f.states = strings.Split(*p.State, ",")
		for _, s := range f.states {
			if s != "running" && s != "paused" {
				return f, refuse(http.StatusBadRequest, "state %q: use running, paused", s)
			}
		}
	}
	if p.StartedAfter != nil && *p.StartedAfter != "" {
		if f.after, err = time.Parse(time.RFC3339Nano, *p.StartedAfter); err != nil {
			return f, refuse(http.StatusBadRequest, "startedAfter is not a time (RFC 3339)")
		}
	}
	if p.Template != nil {
		f.template = *p.Template
		if strings.Contains(f.template, ":") {
			return f, refuse(http.StatusBadRequest, "template must not have a tag")
		}
	}
	return f, nil
}

// ListSandboxes is GET /v2/sandboxes.
func (a *API) ListSandboxes(ctx context.Context, r rest.ListSandboxesRequestObject) (rest.ListSandboxesResponseObject, error) {
	f, err := parseFilter(r.Params)
	if err != nil {
		return nil, err
	}
	order := "desc"
	if r.Params.Order != nil && *r.Params.Order != "" {
		if order = *r.Params.Order; order != "asc" && order != "desc" {
			return nil, refuse(http.StatusBadRequest, "order must be asc or desc")
		}
	}
	size, err := pageSize(r.Params.Limit)
	if err != nil {
		return nil, err
	}
	from, err := parseCursor(r.Params.NextToken, order)
	if err != nil {
		return nil, err
	}
	views := a.opts.Fleet.List(team(ctx))
	running := 0
	for _, v := range views {
		if v.Visible() == "running" {
			running++
		}
	}
	if order == "desc" {
		slices.Reverse(views)
	}
	answer := page{total: strconv.Itoa(running)}
	found := []rest.ListedSandbox{}
	var last cursor
	for _, v := range views {
		if !f.picks(v) || (from != nil && from.before(v.Started, v.ID)) {
			continue
		}
		if len(found) == size {
			answer.next = last.encode()
			break
		}
		found = append(found, a.listed(v))
		last = cursor{Order: order, Time: v.Started, ID: v.ID}
	}
	answer.body = found
	return answer, nil
}

// ListSandboxesV1 is GET /sandboxes: those that run, oldest first.
func (a *API) ListSandboxesV1(ctx context.Context, r rest.ListSandboxesV1RequestObject) (rest.ListSandboxesV1ResponseObject, error) {
	want, err := parseMetadata(r.Params.Metadata)
	if err != nil {
		return nil, err
	}
	found := []rest.ListedSandbox{}
	for _, v := range a.opts.Fleet.List(team(ctx)) {
		if v.Visible() == "running" && hasAll(v.Metadata, want) {
			found = append(found, a.listed(v))
		}
	}
	return page{body: found}, nil
}

// A page is one page of a list. The generated types would send X-Next-Token on
// the last page too, and wrap a shared list into an object.
type page struct {
	body        any
	next, total string
}

func (p page) visit(w http.ResponseWriter) error {
	var buf bytes.Buffer
	if err := json.NewEncoder(&buf).Encode(p.body); err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	if p.next != "" {
		h.Set("X-Next-Token", p.next)
	}
	if p.total != "" {
		h.Set("X-Total-Running", p.total)
	}
	w.WriteHeader(http.StatusOK)
	_, err := buf.WriteTo(w)
	return err
}

// VisitListSandboxesResponse writes the page.
func (p page) VisitListSandboxesResponse(w http.ResponseWriter) error { return p.visit(w) }

// VisitListSandboxesV1Response writes the only page. The generated type would put
// the array into an object.
func (p page) VisitListSandboxesV1Response(w http.ResponseWriter) error { return p.visit(w) }

// VisitListSnapshotsResponse writes the page.
func (p page) VisitListSnapshotsResponse(w http.ResponseWriter) error { return p.visit(w) }

// VisitListTemplatesResponse writes the page.
func (p page) VisitListTemplatesResponse(w http.ResponseWriter) error { return p.visit(w) }

// VisitListTemplatesV1Response writes the page.
func (p page) VisitListTemplatesV1Response(w http.ResponseWriter) error { return p.visit(w) }
