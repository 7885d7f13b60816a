package interpreter

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// python is one that has what the guest's has; Debian's own first.
func python(t *testing.T) string {
	t.Helper()
	for _, p := range []string{"/usr/bin/python3", "python3"} {
		if exec.CommandContext(t.Context(), p, "-c", "import ipykernel, jupyter_client, zmq, matplotlib, pandas").Run() == nil {
			return p
		}
	}
	t.Skip("no python3 with ipykernel, jupyter-client, matplotlib and pandas here")
	return ""
}

// server is a running code interpreter.
type server struct {
	base, mark string
}

func start(t *testing.T) *server {
	t.Helper()
	p := python(t)
	dir := t.TempDir()
	// Setup is a script for a root of its own; here its paths are below dir.
	script := strings.ReplaceAll(Setup(), Dir, dir+"/interpreter")
	script = strings.ReplaceAll(script, "python3 -m", p+" -m")
	if out, err := exec.CommandContext(t.Context(), "/bin/sh", "-euc", script).CombinedOutput(); err != nil {
		t.Fatalf("set-up: %v: %s", err, out)
	}
	envs := listenHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Access-Token") != "secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = io.WriteString(w, `{"GLOBAL":"world"}`)
	})
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(address)
	s := &server{base: "http://" + address, mark: filepath.Join(dir, "mark")}
	cmd := exec.CommandContext(context.Background(), p, dir+"/interpreter/server.py")
	cmd.Env = append(os.Environ(), "HOME="+dir, "AGENTZIP_INTERPRETER_PORT="+port, "AGENTZIP_ENVS_URL="+envs+"/envs", "AGENTZIP_MARK="+s.mark)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	})
	for limit := time.Now().Add(60 * time.Second); ; {
		if status, body := s.request(t, http.MethodGet, "/health", ""); status == http.StatusOK && body == `"OK"` {
			return s
		}
		if time.Now().After(limit) {
			t.Fatal("the server does not answer")
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func listenHTTP(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hs := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { _ = hs.Serve(l) }()
	t.Cleanup(func() { hs.Close() })
	return "http://" + l.Addr().String()
}

// request returns status and body; 0 if nobody listens.
func (s *server) request(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.base+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Access-Token", "secret")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// run executes code and returns its lines, without times and the end.
func (s *server) run(t *testing.T, code string, more ...string) []map[string]any {
	t.Helper()
	body := map[string]any{"code": code}
	for i := 0; i < len(more); i += 2 {
		body[more[i]] = more[i+1]
		if more[i] == "env_vars" {
			k, v, _ := strings.Cut(more[i+1], "=")
			body[more[i]] = map[string]string{k: v}
		}
	}
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	status, text := s.request(t, http.MethodPost, "/execute", string(data))
	if status != http.StatusOK {
		t.Fatalf("%s: %d %s", code, status, text)
	}
	var lines []map[string]any
	for scan := bufio.NewScanner(strings.NewReader(text)); scan.Scan(); {
		var line map[string]any
		if err := json.Unmarshal(scan.Bytes(), &line); err != nil {
			t.Fatalf("%q: %v", scan.Text(), err)
		}
		delete(line, "timestamp")
		if line["type"] != "number_of_executions" && line["type"] != "keepalive" {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 || lines[len(lines)-1]["type"] != "end_of_execution" {
		t.Fatalf("%s: no end: %v", code, lines)
	}
	return lines[:len(lines)-1]
}

func text(v string) []map[string]any {
	return []map[string]any{{"type": "result", "is_main_result": true, "text": v}}
}

// TestTheInterpreterKeepsE2BsProtocol shares one server: a kernel takes seconds to start.
func TestTheInterpreterKeepsE2BsProtocol(t *testing.T) { //nolint:tparallel,paralleltest // the parts share a kernel
	t.Parallel()
	s := start(t)
	same := func(what string, want, got any) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	t.Run("outputs and values", func(t *testing.T) {
		same("a value", text("3"), s.run(t, "x = 3\nx"))
		same("a string loses its quotes", text("it"), s.run(t, "'it'"))
		same("streams", []map[string]any{{"type": "stdout", "text": "out\n"}, {"type": "stderr", "text": "err\n"}},
			s.run(t, "import sys, time; print('out', flush=True); time.sleep(.3); print('err', file=sys.stderr)"))
		e := s.run(t, "1/0")[0]
		same("an error", []any{"error", "ZeroDivisionError", "division by zero"}, []any{e["type"], e["name"], e["value"]})
		same("the state is kept", text("4"), s.run(t, "x + 1"))
		same("unknown types", map[string]any{"application/x": "1"}, s.run(t, "display({'application/x': '1'}, raw=True)")[0]["extra"])
	})
	t.Run("variables", func(t *testing.T) {
		same("of the sandbox", text("world"), s.run(t, "import os; os.environ['GLOBAL']"))
		same("of a run", text("once"), s.run(t, "os.environ['V']", "env_vars", "V=once"))
		same("are gone after it", text("None"), s.run(t, "str(os.environ.get('V'))"))
	})
	t.Run("data and charts", func(t *testing.T) {
		frame := s.run(t, "import pandas; pandas.DataFrame({'a': [1, 2], 'b': ['x', None]})")[0]
		same("data", map[string]any{"a": []any{1., 2.}, "b": []any{"x", nil}}, frame["data"])
		if html, _ := frame["html"].(string); !strings.Contains(html, "<table") {
			t.Errorf("no table: %v", frame)
		}
		plot := func(code string) map[string]any {
			lines := s.run(t, "import matplotlib.pyplot as plt\n"+code+"\nplt.show()")
			png, _ := lines[0]["png"].(string)
			if image, err := base64.StdEncoding.DecodeString(png); err != nil || !strings.HasPrefix(string(image), "\x89PNG") {
				t.Errorf("%s: no image: %v, %v", code, err, lines)
			}
			chart, _ := lines[0]["chart"].(map[string]any)
			return chart
		}
		c := plot("plt.plot([1, 2, 3], [4, 5, 6], label='L'); plt.xlabel('t (s)'); plt.title('T')")
		same("a line", []any{"line", "T", "t (s)", "s", []any{map[string]any{"label": "L", "points": []any{[]any{1., 4.}, []any{2., 5.}, []any{3., 6.}}}}},
			[]any{c["type"], c["title"], c["x_label"], c["x_unit"], c["elements"]})
		c = plot("plt.bar(['a', 'b'], [3, 4], label='g')")
		same("bars", []any{map[string]any{"label": "a", "group": "g", "value": 3.}, map[string]any{"label": "b", "group": "g", "value": 4.}}, c["elements"])
		c = plot("plt.pie([1, 3], labels=['a', 'b'], autopct='%1.0f%%')")
		same("a pie", []any{map[string]any{"label": "a", "angle": 90., "radius": 1.}, map[string]any{"label": "b", "angle": 270., "radius": 1.}}, c["elements"])
		c = plot("plt.boxplot([[1, 2, 3, 4, 5, 20]])")
		same("a box", []any{map[string]any{
			"label": "1", "min": 1., "first_quartile": 2.25, "median": 3.5, "third_quartile": 4.75, "max": 5., "outliers": []any{20.},
		}}, c["elements"])
		c = plot("f, a = plt.subplots(1, 2); a[0].scatter([1], [2]); a[1].plot([1, 2])")
		same("several", "superchart", c["type"])
	})
	t.Run("contexts", func(t *testing.T) {
		status, body := s.request(t, http.MethodPost, "/contexts", `{"cwd":"/tmp"}`)
		var made struct{ ID, Language, Cwd string }
		if err := json.Unmarshal([]byte(body), &made); err != nil || status != http.StatusOK || made.Language != "python" || made.Cwd != "/tmp" {
			t.Fatalf("%d %s", status, body)
		}
		same("a new context", text("/tmp False"), s.run(t, "import os; f\"{os.getcwd()} {'x' in globals()}\"", "context_id", made.ID))
		for _, tc := range []struct {
			method, path, body string
			status             int
		}{
			{http.MethodPost, "/contexts/" + made.ID + "/restart", "", 200},
			{http.MethodDelete, "/contexts/" + made.ID, "", 200},
			{http.MethodDelete, "/contexts/" + made.ID, "", 404},
			{http.MethodPost, "/contexts/none/restart", "", 404},
			{http.MethodPost, "/contexts", `{"language":"cobol"}`, 400},
			{http.MethodPost, "/contexts", `{"cwd":"/none"}`, 400},
			{http.MethodPost, "/execute", `{"code":"1","context_id":"` + made.ID + `"}`, 404},
			{http.MethodPost, "/execute", `{"code":"1","context_id":"x","language":"python"}`, 400},
			{http.MethodPost, "/execute", `{"code":1}`, 422},
			{http.MethodPost, "/execute", `{`, 400},
			{http.MethodPost, "/execute", `[]`, 400},
			{http.MethodPost, "/execute", strings.Repeat("[", 100_000), 400},
			{http.MethodGet, "/none", "", 404},
		} {
			if status, text := s.request(t, tc.method, tc.path, tc.body); status != tc.status {
				t.Errorf("%s %s %.40s: %d %s, want %d", tc.method, tc.path, tc.body, status, text, tc.status)
			}
		}
	})
	t.Run("a client that leaves interrupts its cell", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.base+"/execute", strings.NewReader(`{"code":"import time\nwhile True: time.sleep(.1)"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		same("the next one runs", text("3"), s.run(t, "x"))
	})
	t.Run("a kernel that dies is said so and comes back", func(t *testing.T) {
		same("its death", "KernelDied", s.run(t, "import os; os._exit(7)")[0]["name"])
		same("the next one runs", text("2"), s.run(t, "1 + 1"))
	})
	t.Run("a cloned kernel gets random numbers of its own", func(t *testing.T) {
		seen := map[string]bool{}
		for clone := range 3 {
			// What a clone is told about itself; the kernel's state is as it was.
			s.run(t, "import random; random.seed(1)")
			if err := os.WriteFile(s.mark+".new", fmt.Append(nil, clone), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(s.mark+".new", s.mark); err != nil {
				t.Fatal(err)
			}
			v, _ := s.run(t, "str(random.random())")[0]["text"].(string)
			if seen[v] {
				t.Errorf("clone %d has the numbers of another: %s", clone, v)
			}
			seen[v] = true
		}
	})
}
