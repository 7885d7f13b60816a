package gateway_test

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/agentzip/agentzip/internal/gateway"
	"github.com/agentzip/agentzip/internal/gateway/gatewaytest"
)

// Whatever is sent to a route of the control plane: an answer that is documented,
// in JSON, and never 500.
func FuzzControl(f *testing.F) {
	config := gateway.Default()
	config.Dir, config.APIKey, config.Port, config.MaxPerTeam = f.TempDir(), testKey, 0, 50
	s, err := gateway.Open(gateway.Options{Config: config, Backend: gatewaytest.New(), Agent: agentVer, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.Error(err)
		}
	})
	for _, seed := range [][3]string{
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":1,"metadata":{"a":"b"},"envVars":{"A":"b"}}`},
		{"POST", "/sandboxes", `{"templateID":"base","network":{"allowOut":["1.2.3.4/8","*.x"],"denyOut":["0.0.0.0/0"]}}`},
		{"GET", "/v2/sandboxes?metadata=a%3Db&state=running,paused&limit=3&order=asc&nextToken=e30", ""},
		{"POST", "/sandboxes/iabc/timeout", `{"timeout":9223372036854775807}`},
		{"PUT", "/sandboxes/iabc/network", `{"denyOut":["x"]}`},
		{"DELETE", "/templates/team%2Fname%3Atag", ""},
		{"POST", "/v3/templates", `{"name":"x:y","tags":["z"]}`},
		{"GET", "/templates/x/files/../../..", ""},
		{"POST", "/agentzip/v1/sandboxes/iabc/signals", `{"kind":"request"}`},
		{"GET", "/sandboxes/\xff\x00/metrics?start=-1&end=x", ""},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, method, target, body string) {
		r, err := http.NewRequest(method, "http://127.0.0.1:7070", strings.NewReader(body))
		if err != nil || method == http.MethodConnect || strings.HasPrefix(target, "/agentzip/uploads") {
			t.Skip()
		}
		u, err := r.URL.Parse(target)
		if err != nil || u.Host != r.URL.Host || u.Path == "/metrics" || u.Path == "/health" || u.Path == "/files" {
			t.Skip()
		}
		r.URL, r.RequestURI = u, u.RequestURI()
		r.Header.Set("X-Api-Key", testKey)
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code == http.StatusInternalServerError || w.Code < 200 {
			t.Errorf("%s %q %q: status %d %s", method, target, body, w.Code, w.Body)
		}
		if w.Code >= 400 {
			var e struct {
				Code    int    `json:"code"`
				Message string `json:"message"`
			}
			if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || e.Code != w.Code || e.Message == "" {
				t.Errorf("%s %q: error body %q", method, target, w.Body)
			}
		}
	})
}
