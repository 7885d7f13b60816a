package guestlink_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/guestlink"
)

func TestSettingsHoldForEveryCommandUntilTheyAreChanged(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "work/x"), "")
	configure := func(s guestlink.Settings) {
		t.Helper()
		if err := c.Configure(testContext(t), s); err != nil {
			t.Fatal(err)
		}
	}
	configure(guestlink.Settings{
		SandboxID: new("sb1"), TemplateID: new("base"), Envs: map[string]string{"A": "1", "B": "2"},
		DefaultWorkdir: new(filepath.Join(g.home, "work")), Internet: new(true),
	})
	const show = `echo "$E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $A $B $SANDBOX $(basename "$PWD")"`
	if got, want := output(t, c, show), "true sb1 base 1 2 yes work\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	configure(guestlink.Settings{Envs: map[string]string{"A": "3"}})
	if got, want := output(t, c, show), "true sb1 base 3  yes work\n"; got != want {
		t.Errorf("after a change: got %q, want %q", got, want)
	}
	if _, _, text := do(t, c, http.MethodGet, "/envs", nil, nil); strings.TrimSpace(text) != `{"A":"3"}` {
		t.Errorf("/envs: %s", text)
	}
	for file, want := range map[string]string{".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": "sb1", ".E2B_TEMPLATE_ID": "base"} {
		if got, err := os.ReadFile(filepath.Join(g.marks, file)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", file, got, err)
		}
	}
	if got, _ := g.system.get("internet"); got != "true" {
		t.Errorf("internet: %q", got)
	}
	for _, bad := range []guestlink.Settings{{Envs: map[string]string{"A=B": "x"}}, {Envs: map[string]string{"A": "\x00"}}, {DefaultWorkdir: new("relative")}} {
		if err := c.Configure(testContext(t), bad); err == nil {
			t.Errorf("%v was taken", bad)
		}
	}
	// An agent that is started again goes on with them, but for the token's file nobody may read them.
	g.end()
	if st, err := os.Stat(g.settings); err != nil || st.Mode() != 0o600 {
		t.Errorf("settings: %v, %v", st, err)
	}
	g.cable = newCable(t, false)
	g.startAgent(t)
	t.Cleanup(func() { g.end() })
	if got, want := output(t, g.connect(t), show), "true sb1 base 3  yes work\n"; got != want {
		t.Errorf("after a new start: got %q, want %q", got, want)
	}
}

func TestProgramsInsideNeedTheTokenAndGetLittle(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	inside := httptest.NewUnstartedServer(nil)
	go func() { _ = g.server.ServeInside(inside.Listener) }()
	defer inside.Listener.Close()
	get := func(path, token string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+inside.Listener.Addr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Access-Token", token)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := get("/envs", ""); got != http.StatusUnauthorized {
		t.Errorf("without a token set, an empty one is let in: %d", got)
	}
	if err := c.Configure(testContext(t), guestlink.Settings{AccessToken: new("secret")}); err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, path := range []string{"/health", "/envs", "/metrics", "/files?path=/etc/passwd", "/agentzip/dial?port=1"} {
		got[path] = get(path, "secret")
		got[path+" bad token"] = get(path, "Secret")
	}
	if diff := cmp.Diff(map[string]int{
		"/health": 204, "/health bad token": 204, "/envs": 200, "/envs bad token": 401, "/metrics": 200, "/metrics bad token": 401,
		"/files?path=/etc/passwd": 404, "/files?path=/etc/passwd bad token": 404, "/agentzip/dial?port=1": 404, "/agentzip/dial?port=1 bad token": 404,
	}, got); diff != "" {
		t.Errorf("statuses (-want +got):\n%s", diff)
	}
}

func TestMetricsAreOfThisMachine(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	status, _, text := do(t, c, http.MethodGet, "/metrics", nil, nil)
	var m map[string]float64
	if err := json.Unmarshal([]byte(text), &m); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s: %v", status, text, err)
	}
	for _, k := range []string{"ts", "cpu_count", "mem_total", "mem_used", "mem_cache", "mem_total_mib", "mem_used_mib", "disk_used", "disk_total"} {
		if m[k] <= 0 {
			t.Errorf("%s is %v", k, m[k])
		}
	}
	if used := m["cpu_used_pct"]; used < 0 || used > 100 || m["mem_used"] > m["mem_total"] || m["disk_used"] > m["disk_total"] {
		t.Errorf("impossible: %v", m)
	}
}
