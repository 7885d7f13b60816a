package control

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/prefetch"
)

// live returns the VM of a running sandbox of the team.
func (a *API) live(ctx context.Context, id string) (*lifecycle.Live, error) {
	b, err := a.box(ctx, id)
	if err != nil {
		return nil, err
	}
	if b.View().Visible() != "running" {
		return nil, refuse(http.StatusConflict, "sandbox %s is paused: connect to it first", b.ID())
	}
	never := func(lifecycle.View) error { return lifecycle.ErrNotReady }
	return a.opts.Fleet.Acquire(ctx, b.ID(), never, 0)
}

// ExplainSandbox is GET /agentzip/v1/sandboxes/{id}.
func (a *API) ExplainSandbox(ctx context.Context, r rest.ExplainSandboxRequestObject) (rest.ExplainSandboxResponseObject, error) {
	id, _, _ := strings.Cut(r.SandboxID, "-")
	v, err := a.opts.Fleet.Explain(team(ctx), id)
	if err != nil {
		return nil, notFound(id, err)
	}
	e := rest.ExplainSandbox200JSONResponse{SandboxID: id, State: v.State.String()}
	if v.Cohort != "" {
		e.Cohort = &v.Cohort
	}
	if v.Cause != lifecycle.CauseNone {
		c := string(v.Cause)
		e.Cause, e.Detail = &c, &v.Detail
	}
	if !v.Ended.IsZero() {
		t := stamp(v.Ended)
		e.EndedAt = &t
	}
	return e, nil
}

// GetMemory is GET /agentzip/v1/sandboxes/{id}/memory.
func (a *API) GetMemory(ctx context.Context, r rest.GetMemoryRequestObject) (rest.GetMemoryResponseObject, error) {
	l, err := a.live(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	m, err := l.Sandbox.Memory()
	if err != nil {
		return nil, fmt.Errorf("measure sandbox %s: %w", l.Box.ID(), err)
	}
	const pageSize = 4096
	last := millis(m.LastStall)
	answer := rest.GetMemory200JSONResponse{
		Private: m.Private, Encoded: m.Encoded, PageTables: m.PageTables, Vmm: m.VMM, Kept: m.Kept,
		Saved: m.Kept*pageSize - m.Encoded, Faults: int64(m.Faults), StallMillis: millis(m.Stall),
		LastStallMillis: &last, Parked: &m.Parked,
	}
	answer.Ways = []struct {
		Bytes int64  `json:"bytes"`
		Pages int64  `json:"pages"`
		Way   string `json:"way"`
	}{}
	for _, w := range m.Ways {
		answer.Ways = append(answer.Ways, struct {
			Bytes int64  `json:"bytes"`
			Pages int64  `json:"pages"`
			Way   string `json:"way"`
		}{w.Bytes, int64(w.Pages), w.Name})
	}
	answer.LastCall = &struct {
		Faults      int64            `json:"faults"`
		Prefetched  int64            `json:"prefetched"`
		StallMillis float64          `json:"stallMillis"`
		Wasted      int64            `json:"wasted"`
		Ways        map[string]int64 `json:"ways"`
	}{int64(m.LastFaults), int64(m.LastPrefetched), last, int64(m.LastWasted), map[string]int64{}}
	for _, w := range m.LastWays {
		answer.LastCall.Ways[w.Name] = int64(w.Pages)
	}
	return answer, nil
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// SendSignal is POST /agentzip/v1/sandboxes/{id}/signals.
func (a *API) SendSignal(ctx context.Context, r rest.SendSignalRequestObject) (rest.SendSignalResponseObject, error) {
	if r.Body == nil || !slices.Contains(lifecycle.SignalKinds, r.Body.Kind) {
		return nil, refuse(http.StatusBadRequest, "kind must be one of %s", strings.Join(lifecycle.SignalKinds, ", "))
	}
	l, err := a.live(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	s := lifecycle.Signal{Kind: r.Body.Kind}
	if r.Body.Tool != nil {
		s.Tool = *r.Body.Tool
	}
	l.Sandbox.Signal(s)
	return rest.SendSignal204Response{}, nil
}

// Prefetch is POST /agentzip/v1/sandboxes/{id}/prefetch: the signal "dispatch"
// with the command that will come.
func (a *API) Prefetch(ctx context.Context, r rest.PrefetchRequestObject) (rest.PrefetchResponseObject, error) {
	l, err := a.live(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	s := lifecycle.Signal{Kind: "dispatch"}
	if r.Body != nil && r.Body.Command != nil {
		s.Tool = prefetch.KindOf(*r.Body.Command)
	}
	l.Sandbox.Signal(s)
	return rest.Prefetch204Response{}, nil
}

// GetURL is GET /agentzip/v1/sandboxes/{id}/url.
func (a *API) GetURL(ctx context.Context, r rest.GetURLRequestObject) (rest.GetURLResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	if r.Params.Port < 1 || r.Params.Port > 65535 {
		return nil, refuse(http.StatusBadRequest, "port must be 1 to 65535")
	}
	v := b.View()
	answer := rest.GetURL200JSONResponse{
		Url: fmt.Sprintf("http://%d-%s.%s/", r.Params.Port, v.ID, a.opts.Domain()),
		Headers: map[string]string{
			"E2b-Sandbox-Id": v.ID, "E2b-Sandbox-Port": strconv.Itoa(r.Params.Port),
		},
	}
	if v.TrafficToken {
		answer.Headers["E2B-Traffic-Access-Token"] = a.opts.Minter.Traffic(v.ID)
	}
	return answer, nil
}
