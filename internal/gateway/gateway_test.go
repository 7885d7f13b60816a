package gateway_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentzip/agentzip/internal/gateway"
	"github.com/agentzip/agentzip/internal/gateway/gatewaytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testKey  = "e2b_00112233"
	agentVer = "0.6.4"
)

// A rig is a gateway on a real port over a fake backend.
type rig struct {
	t       *testing.T
	backend *gatewaytest.Backend
	config  *gateway.Config
	server  *gateway.Server
	client  *http.Client
	log     *bytes.Buffer
	stop    func()
}

func newRig(t *testing.T, change func(*gateway.Config)) *rig {
	t.Helper()
	r := &rig{t: t, backend: gatewaytest.New(), config: gateway.Default(), log: &bytes.Buffer{}}
	r.config.Port, r.config.Dir, r.config.APIKey = 0, t.TempDir(), testKey
	if change != nil {
		change(r.config)
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) start() {
	r.t.Helper()
	s, err := gateway.Open(gateway.Options{
		Config: r.config, Backend: r.backend, Agent: agentVer,
		Log: slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := s.Listen(ctx); err != nil {
		r.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r.server = s
	r.client = &http.Client{
		Transport:     &http.Transport{},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	r.stop = func() {
		r.client.CloseIdleConnections()
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
		r.stop = func() {}
	}
}

// An answer is what came back, read to its end.
type answer struct {
	status int
	header http.Header
	length int64
	body   []byte
}

func (a answer) json(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal(a.body, v); err != nil {
		t.Fatalf("answer %d %q: %v", a.status, a.body, err)
	}
}

// do sends a request with the API key; a body is JSON unless it is a reader.
func (r *rig) do(method, path string, body any, header ...string) answer {
	r.t.Helper()
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case io.Reader:
		reader = b
	case string:
		reader = strings.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			r.t.Fatal(err)
		}
		reader = struct{ io.Reader }{bytes.NewReader(raw)} // chunked, as clients send it
	}
	req, err := http.NewRequest(method, r.server.URL()+path, reader)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", testKey)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
			continue
		}
		if header[i+1] == "" {
			req.Header.Del(header[i])
			continue
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, resp.ContentLength, raw}
}

// want checks the status of an answer and that an error has the body of one.
func (r *rig) want(status int, a answer) answer {
	r.t.Helper()
	if a.status != status {
		r.t.Fatalf("status %d, want %d: %s", a.status, status, a.body)
	}
	if status >= 400 {
		var e struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		}
		a.json(r.t, &e)
		if e.Code != status || e.Message == "" {
			r.t.Fatalf("error body %s, want code %d and a message", a.body, status)
		}
	}
	return a
}

// A box is what a client learns of a sandbox.
type box struct {
	ID       string  `json:"sandboxID"`
	Template string  `json:"templateID"`
	Token    string  `json:"envdAccessToken"`
	Traffic  *string `json:"trafficAccessToken"`
	Domain   *string `json:"domain"`
	State    string  `json:"state"`
	StartAt  string  `json:"startedAt"`
	EndAt    string  `json:"endAt"`
}

func (b box) left(t *testing.T) time.Duration {
	t.Helper()
	end, err := time.Parse(time.RFC3339Nano, b.EndAt)
	if err != nil {
		t.Fatal(err)
	}
	return time.Until(end).Round(time.Second)
}

type object = map[string]any

func (r *rig) create(extra object) box {
	r.t.Helper()
	body := object{"templateID": "base"}
	maps.Copy(body, extra)
	var b box
	r.want(201, r.do("POST", "/v2/sandboxes", body)).json(r.t, &b)
	return b
}

func (r *rig) detail(id string) box {
	r.t.Helper()
	var b box
	r.want(200, r.do("GET", "/sandboxes/"+id, nil)).json(r.t, &b)
	return b
}

// route returns the headers that lead to a port of a sandbox.
func (b box) route(port int, more ...string) []string {
	return append([]string{"E2b-Sandbox-Id", b.ID, "E2b-Sandbox-Port", fmt.Sprint(port), "X-Access-Token", b.Token}, more...)
}

func keysOf(m object) string {
	var names []string
	for k := range m {
		names = append(names, k)
	}
	return strings.Join(names, " ")
}
