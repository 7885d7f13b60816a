package control

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// Bounds of the measurements kept: an hour of a client that polls, and as many
// sandboxes as it may ask about.
const (
	maxSamples   = 720
	maxSampled   = 4096
	sampleLimit  = 64 << 10
	samplePeriod = 5 * time.Second
)

// samples are measurements of sandboxes, taken when somebody asks: a timer would
// wake guests that are compressed because nobody uses them.
type samples struct {
	mu sync.Mutex
	by map[string][]rest.SandboxMetric // guarded by mu; by sandbox
}

func (s *samples) add(id string, m rest.SandboxMetric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[string][]rest.SandboxMetric{}
	}
	if _, ok := s.by[id]; !ok && len(s.by) >= maxSampled {
		for other := range s.by { // any: a map of thousands has no fair victim
			delete(s.by, other)
			break
		}
	}
	list := append(s.by[id], m)
	s.by[id] = list[max(0, len(list)-maxSamples):]
}

func (s *samples) between(id string, from, to int64) []rest.SandboxMetric {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := []rest.SandboxMetric{}
	for _, m := range s.by[id] {
		if m.TimestampUnix >= from && m.TimestampUnix <= to {
			found = append(found, m)
		}
	}
	return found
}

func (s *samples) last(id string) (rest.SandboxMetric, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.by[id]
	if len(list) == 0 {
		return rest.SandboxMetric{}, false
	}
	return list[len(list)-1], true
}

// guestMetrics is what the agent answers to GET /metrics.
type guestMetrics struct {
	TS         int64   `json:"ts"`
	CPUCount   int     `json:"cpu_count"`
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   int64   `json:"mem_total"`
	MemUsed    int64   `json:"mem_used"`
	MemCache   int64   `json:"mem_cache"`
	DiskUsed   int64   `json:"disk_used"`
	DiskTotal  int64   `json:"disk_total"`
}

// sample measures a sandbox now, unless that was done a moment ago.
func (a *API) sample(ctx context.Context, id string) error {
	if m, ok := a.samples.last(id); ok && time.Since(m.Timestamp) < sampleAge {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, samplePeriod)
	defer cancel()
	never := func(lifecycle.View) error { return lifecycle.ErrNotFound }
	live, err := a.opts.Fleet.Acquire(ctx, id, never, 0)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://guest/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := live.Sandbox.Agent().RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("measure sandbox %s: the agent answered %s", id, resp.Status)
	}
	var g guestMetrics
	if err := json.NewDecoder(io.LimitReader(resp.Body, sampleLimit)).Decode(&g); err != nil {
		return fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	now := time.Now().UTC()
	a.samples.add(id, rest.SandboxMetric{
		Timestamp: now, TimestampUnix: now.Unix(), CpuCount: g.CPUCount, CpuUsedPct: g.CPUUsedPct,
		MemUsed: g.MemUsed, MemTotal: g.MemTotal, MemCache: g.MemCache, DiskUsed: g.DiskUsed, DiskTotal: g.DiskTotal,
	})
	return nil
}

// GetSandboxMetrics is GET /sandboxes/{id}/metrics.
func (a *API) GetSandboxMetrics(ctx context.Context, r rest.GetSandboxMetricsRequestObject) (rest.GetSandboxMetricsResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	from, to := int64(0), time.Now().Unix()+1
	if r.Params.Start != nil {
		from = *r.Params.Start
	}
	if r.Params.End != nil {
		to = *r.Params.End
	}
	if from > to {
		return nil, refuse(http.StatusBadRequest, "start is after end")
	}
	if to >= time.Now().Unix()-1 && b.View().Visible() == "running" {
		if err := a.sample(ctx, b.ID()); err != nil {
			a.opts.Log.Debug("measure sandbox", "sandbox", b.ID(), "err", err)
		}
	}
	return rest.GetSandboxMetrics200JSONResponse(a.samples.between(b.ID(), from, to)), nil
}

// maxAsked sandboxes in one question.
const maxAsked = 100

// GetSandboxesMetrics is GET /sandboxes/metrics: the last measurements, taken or not.
func (a *API) GetSandboxesMetrics(ctx context.Context, r rest.GetSandboxesMetricsRequestObject) (rest.GetSandboxesMetricsResponseObject, error) {
	ids := strings.Split(r.Params.SandboxIds, ",")
	if len(ids) > maxAsked {
		return nil, refuse(http.StatusBadRequest, "at most %d sandboxes", maxAsked)
	}
	answer := rest.GetSandboxesMetrics200JSONResponse{Sandboxes: map[string]rest.SandboxMetric{}}
	for _, id := range ids {
		if _, err := a.box(ctx, id); err != nil {
			continue
		}
		if m, ok := a.samples.last(id); ok {
			answer.Sandboxes[id] = m
		}
	}
	return answer, nil
}
