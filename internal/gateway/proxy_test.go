package gateway_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/agentzip/agentzip/internal/gateway"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// servers on ports of every guest of a test.
func servers() map[uint16]http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s host=%s token=%s key=%s", r.Method, r.URL.RequestURI(), r.Host, r.Header.Get("E2b-Traffic-Access-Token"), r.Header.Get("X-Api-Key"))
	})
	mux.HandleFunc("/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			if i == 1 {
				<-r.Context().Done() // the third never comes
				return
			}
		}
	})
	mux.HandleFunc("/socket", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, data, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if c.Write(r.Context(), kind, append([]byte("echo "), data...)) != nil {
				return
			}
		}
	})
	return map[uint16]http.Handler{8080: mux}
}

func TestWaysToAPort(t *testing.T) {
	r := newRig(t, nil)
	r.backend.Handlers = servers()
	b := r.create(nil)
	for name, c := range map[string]struct {
		path   string
		header []string
		want   string
	}{
		"headers":                     {"/a%2Fb?q=1", b.route(8080), "GET /a%2Fb?q=1 host=127.0.0.1"},
		"host below localhost":        {"/x", []string{"Host", "8080-" + b.ID + ".localhost:7070"}, "GET /x host=8080-" + b.ID + ".localhost:7070"},
		"host with a suffix":          {"/x", []string{"Host", "8080-" + b.ID + "-abc.example.com"}, "GET /x host=8080-" + b.ID + "-abc.example.com"},
		"host in capitals":            {"/x", []string{"Host", strings.ToUpper("8080-" + b.ID + ".localhost")}, "GET /x host=8080-"},
		"headers win over the host":   {"/x", b.route(8080, "Host", "9-"+b.ID+".localhost"), "GET /x host=9-"},
		"an id with a suffix":         {"/x", []string{"E2b-Sandbox-Id", b.ID + "-x", "E2b-Sandbox-Port", "8080"}, "GET /x"},
		"no key of ours is passed on": {"/x", b.route(8080), "key="},
	} {
		a := r.do("GET", c.path, nil, c.header...)
		if a.status != 200 || !strings.HasPrefix(strings.ToLower(string(a.body)), strings.ToLower(c.want)) && !strings.HasSuffix(string(a.body), c.want) {
			t.Errorf("%s: %d %s, want %s", name, a.status, a.body, c.want)
		}
	}
	// A forward proxy is sent the absolute form.
	proxied := &http.Client{Transport: &http.Transport{Proxy: func(*http.Request) (*url.URL, error) { return url.Parse(r.server.URL()) }}}
	defer proxied.CloseIdleConnections()
	resp, err := proxied.Get("http://8080-" + b.ID + ".anything/y")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 200 || !strings.HasPrefix(string(body), "GET /y") {
		t.Errorf("through the proxy: %d %s", resp.StatusCode, body)
	}
	if resp, err = proxied.Get("http://example.com/"); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 403 {
		t.Errorf("the proxy answers %d for the rest of the world, want 403", resp.StatusCode)
	}
}

func TestWhoIsLetIn(t *testing.T) {
	r := newRig(t, nil)
	r.backend.Handlers = servers()
	b, private := r.create(nil), r.create(object{"network": object{"allowPublicTraffic": false, "maskRequestHost": "localhost:${PORT}"}})
	if b.Traffic != nil || private.Traffic == nil {
		t.Fatalf("traffic tokens %v, %v", b.Traffic, private.Traffic)
	}
	gone := r.create(nil)
	r.want(204, r.do("DELETE", "/sandboxes/"+gone.ID, nil))
	sign := func(path, op, user string, expiry int64) string {
		q := url.Values{"path": {path}, "signature": {keys.Sign(path, op, user, b.Token, expiry)}}
		if user != "" {
			q.Set("username", user)
		}
		if expiry != 0 {
			q.Set("signature_expiration", fmt.Sprint(expiry))
		}
		return "/files?" + q.Encode()
	}
	r.want(200, r.do("POST", "/files?path=/f", "text", b.route(49983)...))
	later, before := time.Now().Add(time.Minute).Unix(), time.Now().Add(-time.Minute).Unix()
	for name, c := range map[string]struct {
		method, path string
		header       []string
		status       int
		says         string
	}{
		"the agent with its token":            {"GET", "/files?path=/f", b.route(49983), 200, "text"},
		"the agent without":                   {"GET", "/files?path=/f", b.route(49983, "X-Access-Token", ""), 401, "token"},
		"the agent with another's":            {"GET", "/files?path=/f", b.route(49983, "X-Access-Token", private.Token), 401, "token"},
		"health without a token":              {"GET", "/health", b.route(49983, "X-Access-Token", ""), 204, ""},
		"a signed URL, found by its name":     {"GET", sign("/f", "read", "", 0), nil, 200, "text"},
		"a signed URL with a sandbox":         {"GET", sign("/f", "read", "", later), b.route(49983, "X-Access-Token", ""), 200, "text"},
		"a signed URL, expired":               {"GET", sign("/f", "read", "", before), nil, 401, "expired"},
		"a signed URL for writing":            {"GET", sign("/f", "write", "", 0), nil, 401, "signature"},
		"a URL without a signature":           {"GET", "/files?path=/f", nil, 401, "signature"},
		"a signature of another sandbox":      {"GET", sign("/f", "read", "", 0), private.route(49983, "X-Access-Token", ""), 401, "signature"},
		"one header of two":                   {"GET", "/", []string{"E2b-Sandbox-Id", b.ID}, 400, ""},
		"a port that is none":                 {"GET", "/", []string{"E2b-Sandbox-Id", b.ID, "E2b-Sandbox-Port", "65536"}, 400, "port"},
		"port zero":                           {"GET", "/", []string{"E2b-Sandbox-Id", b.ID, "E2b-Sandbox-Port", "0"}, 400, "port"},
		"an id that is none":                  {"GET", "/", []string{"E2b-Sandbox-Id", "../x", "E2b-Sandbox-Port", "80"}, 400, ""},
		"an unknown sandbox":                  {"GET", "/", []string{"E2b-Sandbox-Id", "inone", "E2b-Sandbox-Port", "80"}, 502, "The sandbox was not found"},
		"a killed one":                        {"GET", "/health", gone.route(49983), 502, "The sandbox was not found"},
		"a killed one, any route":             {"GET", "/files?path=/f", gone.route(49983), 502, "The sandbox was not found"},
		"a port where nobody listens":         {"GET", "/", b.route(81), 502, "The sandbox is running but port is not open"},
		"a private port without a token":      {"GET", "/", private.route(8080), 403, "token"},
		"a private port with a wrong one":     {"GET", "/", private.route(8080, "E2B-Traffic-Access-Token", "x"), 403, "token"},
		"a private port with it, host masked": {"GET", "/", private.route(8080, "E2B-Traffic-Access-Token", *private.Traffic), 200, "host=localhost:8080 token="},
		"init":                                {"POST", "/init", b.route(49983), 404, "route"},
		"freeze":                              {"POST", "/freeze", b.route(49983), 404, "route"},
		"our own service":                     {"POST", "/agentzip.guest.v1.Guest/Shutdown", b.route(49983), 404, "route"},
		"our own dial":                        {"POST", "/agentzip/dial?port=22", b.route(49983), 404, "route"},
		"a preflight":                         {"OPTIONS", "/files", b.route(49983, "Origin", "http://x", "Access-Control-Request-Method", "GET"), 204, ""},
	} {
		a := r.do(c.method, c.path, nil, c.header...)
		if a.status != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s: %d %s, want %d and %q", name, a.status, a.body, c.status, c.says)
		}
	}
	a := r.do("GET", "/", nil, append(b.route(81), "User-Agent", "Mozilla/5.0", "Accept", "text/html")...)
	if !strings.HasPrefix(a.header.Get("Content-Type"), "text/html") {
		t.Errorf("a browser is sent %s", a.header.Get("Content-Type"))
	}
	var e struct {
		ID   string `json:"sandboxId"`
		Port int    `json:"port"`
		Code int    `json:"code"`
	}
	r.do("GET", "/", nil, b.route(81)...).json(t, &e)
	if e.ID != b.ID || e.Port != 81 || e.Code != 502 {
		t.Errorf("closed port: %+v", e)
	}
}

func TestStreamsAndWebSocketsAreNotBuffered(t *testing.T) {
	r := newRig(t, nil)
	r.backend.Handlers = servers()
	b := r.create(nil)
	req, _ := http.NewRequest("GET", r.server.URL()+"/events", nil)
	req.Header.Set("E2b-Sandbox-Id", b.ID)
	req.Header.Set("E2b-Sandbox-Port", "8080")
	resp, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(resp.Body)
	for i := range 2 {
		if line, err := lines.ReadString('\n'); line != fmt.Sprintf("data: %d\n", i) {
			t.Errorf("event %d is %q, %v", i, line, err)
		}
		_, _ = lines.ReadString('\n')
	}
	resp.Body.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ws, _, err := websocket.Dial( //nolint:bodyclose // the library's: it need not be closed
		ctx, r.server.URL()+"/socket", &websocket.DialOptions{
			HTTPClient: r.client, HTTPHeader: http.Header{"E2b-Sandbox-Id": {b.ID}, "E2b-Sandbox-Port": {"8080"}},
		})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if err := ws.Write(ctx, websocket.MessageText, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, data, err := ws.Read(ctx); string(data) != "echo hi" {
		t.Errorf("websocket: %q, %v", data, err)
	}
	r.want(204, r.do("DELETE", "/sandboxes/"+b.ID, nil))
	if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("websocket after the kill: %v, want its end", err)
	}
}

// envelope is a start message as the clients send it.
func envelope(line string) string {
	m := fmt.Sprintf(`{"process":{"cmd":"/bin/bash","args":["-l","-c",%q]},"stdin":false}`, line)
	return string(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m)))) + m
}

// command starts a command and returns its stream.
func (r *rig) command(b box, line string) *http.Response {
	r.t.Helper()
	req, _ := http.NewRequest("POST", r.server.URL()+"/process.Process/Start", strings.NewReader(envelope(line)))
	req.Header.Set("Content-Type", "application/connect+json")
	h := b.route(49983)
	for i := 0; i < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}

// read reads n bytes of a stream, all if n is 0.
func read(resp *http.Response, n int) (string, error) {
	if n == 0 {
		all, err := io.ReadAll(resp.Body)
		return string(all), err
	}
	buf := make([]byte, n)
	_, err := io.ReadFull(resp.Body, buf)
	return string(buf), err
}

func TestACommandIsAToolWindowOfItsKind(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	resp := r.command(b, "cd /x && FOO=1 echo hello")
	if _, err := read(resp, 0); err != nil {
		t.Error(err)
	}
	resp.Body.Close()
	if got := r.backend.Live(b.ID).Kinds(); len(got) != 1 || got[0] != "echo" {
		t.Errorf("kinds of calls %q, want echo", got)
	}
	eventually(t, "the window is closed", func() bool { return r.backend.Calls.Load() == 0 })
	// /health is answered without waking anybody.
	r.do("GET", "/health", nil, b.route(49983)...)
	if n := r.backend.Windows.Load(); n != 1 {
		t.Errorf("%d windows, want one", n)
	}
}

func TestASilentStreamGivesItsWindowBack(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	r.backend.Idle.Store(false)
	resp := r.command(b, "hold")
	defer resp.Body.Close()
	time.Sleep(2500 * time.Millisecond)
	if r.backend.Calls.Load() != 1 {
		t.Error("the window closed although the guest computes")
	}
	r.backend.Idle.Store(true)
	eventually(t, "the window is closed", func() bool { return r.backend.Calls.Load() == 0 })
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for range 800 {
		if is() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("after 8 s still not: %s", what)
}

func TestWhatIsStreamedIsResetWhenItsSandboxEnds(t *testing.T) {
	for name, end := range map[string]func(r *rig, b box){
		"killed": func(r *rig, b box) { r.want(204, r.do("DELETE", "/sandboxes/"+b.ID, nil)) },
		"paused": func(r *rig, b box) { r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil)) },
		"died":   func(r *rig, b box) { r.backend.Live(b.ID).Die(lifecycle.CauseCrash, "boom") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			b := r.create(nil)
			resp := r.command(b, "hold")
			defer resp.Body.Close()
			if _, err := read(resp, 36); err != nil {
				t.Fatal(err)
			}
			end(r, b)
			_, err := read(resp, 0)
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the stream ended with %v, want a reset", err)
			}
			a := r.do("GET", "/health", nil, b.route(49983)...)
			if a.status != 502 || !strings.Contains(string(a.body), "The sandbox was not found") {
				t.Errorf("health afterwards: %d %s", a.status, a.body)
			}
		})
	}
}

func TestTrafficResumesWhoWantsIt(t *testing.T) {
	r := newRig(t, nil)
	r.backend.Handlers = servers()
	b := r.create(object{"autoPause": true, "autoResume": object{"enabled": true}, "timeout": 10})
	asleep := r.create(object{"autoPause": true})
	cold := r.create(object{"autoPause": true, "autoResume": object{"enabled": true}})
	r.want(204, r.do("POST", "/sandboxes/"+asleep.ID+"/pause", nil))
	r.want(204, r.do("POST", "/sandboxes/"+cold.ID+"/pause", object{"memory": false}))
	for name, probe := range map[string]struct {
		b      box
		header []string
		status int
	}{
		"one without autoResume":            {asleep, asleep.route(8080), 502},
		"one that has only its disk":        {cold, cold.route(8080), 502},
		"one whose token is missing":        {b, b.route(49983, "X-Access-Token", ""), 403},
		"one whose token is wrong":          {b, b.route(49983, "X-Access-Token", "x"), 403},
		"by the agent, with the token":      {b, b.route(49983), 204},
		"by a port that everybody may open": {b, b.route(8080), 200},
	} {
		if probe.b.ID == b.ID && r.detail(b.ID).State == "running" {
			r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil))
		}
		a := r.do("GET", "/health", nil, probe.header...)
		if a.status != probe.status {
			t.Errorf("%s: %d %s, want %d", name, a.status, a.body, probe.status)
		}
		want := "paused"
		if probe.status < 300 {
			want = "running"
		}
		d := r.detail(probe.b.ID)
		if d.State != want {
			t.Errorf("%s: state %q, want %q", name, d.State, want)
		}
		if want == "running" && d.left(t) != 5*time.Minute {
			t.Errorf("%s: time to live %v, want the minimum of 5m", name, d.left(t))
		}
	}
}

func TestManyRequestsAtOnceResumeOnce(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(object{"autoPause": true, "autoResume": object{"enabled": true}})
	r.want(200, r.do("POST", "/files?path=/f", "text", b.route(49983)...))
	r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil))
	r.backend.Hook = func(op, _ string) error {
		if op == "resume" {
			time.Sleep(100 * time.Millisecond)
		}
		return nil
	}
	results := make(chan int, 20)
	for range cap(results) {
		go func() { results <- r.do("GET", "/files?path=/f", nil, b.route(49983)...).status }()
	}
	for range cap(results) {
		if s := <-results; s != 200 {
			t.Errorf("status %d", s)
		}
	}
	if n := len(r.backend.Made()); n != 2 {
		t.Errorf("%d VMs made, want the first and one resumed", n)
	}
}

func TestAClientThatNeverReadsHoldsUpOnlyItself(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	c, err := net.Dial("tcp", strings.TrimPrefix(r.server.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	body := envelope("flood")
	fmt.Fprintf(c, "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: %s\r\nContent-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n%s", b.ID, b.Token, len(body), body)
	time.Sleep(300 * time.Millisecond)
	begin := time.Now()
	r.want(200, r.do("POST", "/files?path=/f", "x", b.route(49983)...))
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("another request took %v", took)
	}
	r.want(204, r.do("DELETE", "/sandboxes/"+b.ID, nil))
}

func TestABodyThatIsCutReachesNobodyAsAWhole(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	for _, text := range []string{
		"POST /files?path=/cut HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: %s\r\nContent-Length: 100\r\n\r\nonly this",
		"POST /files?path=/cut HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: %s\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: %s\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nonly this\r\n",
	} {
		c, err := net.Dial("tcp", strings.TrimPrefix(r.server.URL(), "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, text, b.ID, b.Token)
		c.Close()
	}
	time.Sleep(200 * time.Millisecond)
	if a := r.do("GET", "/files?path=/cut", nil, b.route(49983)...); a.status != 404 {
		t.Errorf("the agent took a cut body for whole: %d %q", a.status, a.body)
	}
}

func TestPausedSandboxesAreThereAfterTheNextStart(t *testing.T) {
	r := newRig(t, func(c *gateway.Config) { c.OnExit = gateway.OnExitPause })
	b := r.create(object{"metadata": object{"a": "b"}})
	r.want(200, r.do("POST", "/files?path=/f", "text", b.route(49983)...))
	r.stop()
	if live, kept := r.backend.Count(); live != 0 || kept != 1 {
		t.Fatalf("after the end: %d live, %d kept", live, kept)
	}
	r.start()
	if d := r.detail(b.ID); d.State != "paused" || d.Token != b.Token {
		t.Errorf("after the start: %+v", d)
	}
	r.want(201, r.do("POST", "/v2/sandboxes/"+b.ID+"/connect", object{}))
	if a := r.do("GET", "/files?path=/f", nil, b.route(49983)...); string(a.body) != "text" {
		t.Errorf("its file: %d %q", a.status, a.body)
	}
	r.config.OnExit = gateway.OnExitKill
	r.stop()
	if live, kept := r.backend.Count(); live != 0 || kept != 0 {
		t.Errorf("after an end that kills: %d live, %d kept", live, kept)
	}
}
