package gateway_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/gateway"
)

// The Python clients cannot be installed where these tests run, so their wire is
// kept as transcripts in testdata/pywire, written from the clients' source. What
// breaks a generated Python client is what is checked: a success code other than
// the one it knows, a field that is missing or null where it parses an object, an
// error whose status is not the one that its exception hangs on.
//
// A transcript is a list of steps:
//
//	=== NAME
//	KIND METHOD PATH          KIND: api, anon (no key), envd, rpc, stream, plain
//	Header: value
//
//	body, as it is sent; $NAME is replaced everywhere
//	--- STATUS
//	save NAME PATH            keep a field for later steps
//	has PATH...               each is there and not null
//	object PATH...            each is an object or absent, never null
//	is PATH JSON              equal
//	absent PATH
//	match PATH REGEXP
//	length PATH N
//	header NAME VALUE         VALUE may be "-": absent
//	empty                     no body at all, Content-Length 0 or status 204
//	body TEXT                 the whole body
//	poll                      first: ask again, as the client does, until all checks hold
//
// PATH is a dotted path with array indices; "." is the whole body. The answer of
// a stream is an array of {"flags":N,"message":{}}.
func TestThePythonClientsWire(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/pywire/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			p := newPython(t)
			for _, s := range parseSteps(t, string(text)) {
				p.step(s)
			}
		})
	}
}

// step is one request and what is expected of its answer.
type step struct {
	name, kind, method, path string
	header                   [][2]string
	body                     string
	status                   int
	checks                   []string
}

var stepHead = regexp.MustCompile(`^(api|anon|envd|rpc|stream|plain) ([A-Z]+) (\S+)$`)

func parseSteps(t *testing.T, text string) []step {
	t.Helper()
	var steps []step
	for _, part := range strings.Split(text, "\n=== ")[1:] {
		request, answer, ok := strings.Cut(part, "\n--- ")
		name, rest, _ := strings.Cut(request, "\n")
		head, rest, _ := strings.Cut(rest, "\n")
		m := stepHead.FindStringSubmatch(head)
		if !ok || m == nil {
			t.Fatalf("step %q is not a request and its answer", name)
		}
		s := step{name: name, kind: m[1], method: m[2], path: m[3]}
		headers, body, _ := strings.Cut("\n"+rest, "\n\n")
		for line := range strings.SplitSeq(strings.TrimSpace(headers), "\n") {
			if k, v, ok := strings.Cut(line, ": "); ok {
				s.header = append(s.header, [2]string{k, v})
			}
		}
		s.body = strings.TrimRight(body, "\n")
		lines := strings.Split(strings.TrimSpace(answer), "\n")
		var err error
		if s.status, err = strconv.Atoi(lines[0]); err != nil {
			t.Fatalf("step %q: %v", name, err)
		}
		s.checks = lines[1:]
		steps = append(steps, s)
	}
	return steps
}

// python plays a client.
type python struct {
	*rig
	vars map[string]string
}

func newPython(t *testing.T) *python {
	t.Helper()
	home := t.TempDir()
	p := &python{vars: map[string]string{"HOME": home, "KEY": testKey}}
	p.rig = newRig(t, func(c *gateway.Config) { c.MaxTotal = 4 })
	p.backend.Guest = func(string) (http.RoundTripper, func()) { return startAgent(t, home) }
	return p
}

func (p *python) expand(text string) string {
	return os.Expand(text, func(name string) string {
		if name == "$" {
			return name // "$$" is a dollar
		}
		v, ok := p.vars[name]
		if !ok {
			p.t.Fatalf("$%s is not known yet", name)
		}
		return v
	})
}

// send puts on the headers that the client puts on every request of the kind.
func (p *python) send(s step) (int, http.Header, []byte) {
	p.t.Helper()
	body := []byte(p.expand(s.body))
	h := http.Header{"User-Agent": {"e2b-python-sdk/2.45.1"}, "Accept": {"*/*"}, "Accept-Encoding": {"gzip, deflate"}}
	h.Set("Lang", "python")
	h.Set("Package_version", "2.45.1")
	switch s.kind {
	case "api":
		h.Set("X-Api-Key", testKey)
		h.Set("Content-Type", "application/json")
	case "envd", "rpc", "stream":
		h.Set("X-Access-Token", p.vars["TOKEN"])
		h.Set("E2b-Sandbox-Id", p.vars["ID"])
		h.Set("E2b-Sandbox-Port", "49983")
	}
	switch s.kind {
	case "rpc":
		h.Set("Content-Type", "application/json")
		h.Set("Connect-Protocol-Version", "1")
	case "stream":
		h.Set("Content-Type", "application/connect+json")
		h.Set("Connect-Protocol-Version", "1")
		h.Set("Keepalive-Ping-Interval", "50")
		body = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	}
	for _, kv := range s.header {
		h.Set(kv[0], p.expand(kv[1]))
	}
	if s.kind == "envd" && strings.HasPrefix(h.Get("Content-Type"), "multipart/") {
		body = bytes.ReplaceAll(body, []byte("\n"), []byte("\r\n"))
	}
	req, err := http.NewRequest(s.method, p.server.URL()+p.expand(s.path), bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header = h
	resp, err := p.client.Do(req)
	if err != nil {
		p.t.Fatalf("%s: %v", s.name, err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatalf("%s: %v", s.name, err)
	}
	if resp.ContentLength >= 0 {
		resp.Header.Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	}
	return resp.StatusCode, resp.Header, raw
}

func (p *python) step(s step) {
	p.t.Helper()
	if len(s.checks) > 0 && s.checks[0] == "poll" {
		s.checks = s.checks[1:]
		p.poll(s)
		return
	}
	status, header, raw := p.send(s)
	if status != s.status {
		p.t.Fatalf("%s: status %d, the client knows %d only; body: %.300s", s.name, status, s.status, raw)
	}
	var body any
	if s.kind == "stream" && status == http.StatusOK {
		body = envelopes(p.t, s.name, raw)
	} else if len(raw) > 0 && json.Unmarshal(raw, &body) != nil {
		body = nil
	}
	if status >= 400 && (s.kind == "api" || s.kind == "anon") {
		p.t.Run("error", func(t *testing.T) {
			if code, _ := lookup(body, "code"); code != float64(status) {
				t.Errorf("%s: code in the body is %v, want the status %d", s.name, code, status)
			}
			if m, _ := lookup(body, "message"); reflect.TypeOf(m) != reflect.TypeFor[string]() {
				t.Errorf("%s: message is %v", s.name, m)
			}
		})
	}
	for _, why := range p.wrong(s.checks, header, raw, body) {
		p.t.Errorf("%s: %s; body: %.500s", s.name, why, raw)
	}
}

// poll repeats a request until its checks hold, for what happens a moment later.
func (p *python) poll(s step) {
	p.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		status, header, raw := p.send(s)
		var body any
		if err := json.Unmarshal(raw, &body); err != nil || status != s.status {
			p.t.Fatalf("%s: status %d, body: %.300s", s.name, status, raw)
		}
		why := p.wrong(s.checks, header, raw, body)
		if len(why) == 0 {
			return
		}
		if time.Now().After(end) {
			p.t.Fatalf("%s: %v; body: %.500s", s.name, why, raw)
		}
	}
}

// wrong lists the checks that do not hold, and why.
func (p *python) wrong(checks []string, header http.Header, raw []byte, body any) (why []string) {
	for _, check := range checks {
		if w := p.check(check, header, raw, body); w != "" {
			why = append(why, check+": "+w)
		}
	}
	return why
}

// check returns why a line does not hold, "" if it does.
func (p *python) check(line string, header http.Header, raw []byte, body any) string {
	word, rest, _ := strings.Cut(p.expand(line), " ")
	path, arg, _ := strings.Cut(rest, " ")
	v, ok := lookup(body, path)
	switch word {
	case "save":
		if v, ok = lookup(body, arg); !ok || v == nil {
			return "is not there"
		}
		p.vars[path] = fmt.Sprint(v)
	case "has":
		for path := range strings.FieldsSeq(rest) {
			if v, ok := lookup(body, path); !ok || v == nil {
				return path + " is missing"
			}
		}
	case "object":
		for path := range strings.FieldsSeq(rest) {
			if v, ok := lookup(body, path); ok && reflect.TypeOf(v) != reflect.TypeFor[map[string]any]() {
				return fmt.Sprintf("%s is %v", path, v)
			}
		}
	case "is":
		var want any
		if err := json.Unmarshal([]byte(arg), &want); err != nil {
			return err.Error()
		}
		if !reflect.DeepEqual(v, want) {
			return fmt.Sprintf("is %v", v)
		}
	case "absent":
		if ok {
			return fmt.Sprintf("is %v", v)
		}
	case "match":
		if !ok || v == nil || !regexp.MustCompile(arg).MatchString(fmt.Sprint(v)) {
			return fmt.Sprintf("is %v", v)
		}
	case "length":
		if list, _ := v.([]any); strconv.Itoa(len(list)) != arg {
			return fmt.Sprintf("has %d", len(list))
		}
	case "header":
		if got := header.Get(path); (arg == "-") != (got == "") || arg != "-" && !regexp.MustCompile("^("+arg+")$").MatchString(got) {
			return "is " + strconv.Quote(got)
		}
	case "empty":
		if len(raw) != 0 {
			return "is not empty"
		}
	case "body":
		if string(raw) != rest {
			return "differs"
		}
	default:
		return "no such check"
	}
	return ""
}

// lookup follows a dotted path.
func lookup(v any, path string) (any, bool) {
	if path == "." {
		return v, true
	}
	for key := range strings.SplitSeq(path, ".") {
		switch c := v.(type) {
		case map[string]any:
			var ok bool
			if v, ok = c[key]; !ok {
				return nil, false
			}
		case []any:
			i, err := strconv.Atoi(key)
			if key == "last" {
				i, err = len(c)-1, nil
			}
			if err != nil || i < 0 || i >= len(c) {
				return nil, false
			}
			v = c[i]
		default:
			return nil, false
		}
	}
	return v, true
}

func envelopes(t *testing.T, name string, raw []byte) any {
	t.Helper()
	all := []any{}
	for len(raw) >= 5 {
		n := int(binary.BigEndian.Uint32(raw[1:]))
		if len(raw) < 5+n {
			break
		}
		var m any
		if err := json.Unmarshal(raw[5:5+n], &m); err != nil {
			t.Fatalf("%s: envelope %q: %v", name, raw[5:5+n], err)
		}
		all = append(all, map[string]any{"flags": float64(raw[0]), "message": m})
		raw = raw[5+n:]
	}
	if len(raw) != 0 {
		t.Fatalf("%s: %d bytes after the last envelope", name, len(raw))
	}
	return all
}

func TestATranscriptThatDoesNotHoldIsSeen(t *testing.T) {
	t.Parallel()
	body := map[string]any{"a": map[string]any{"b": []any{"x", nil}}, "n": nil, "one": 1.0}
	p := &python{vars: map[string]string{}}
	bad := []string{
		"has a.c", "has a.b.1", "has n", "object n", `is one 2`, `is a.b ["x"]`, "absent one", "match one ^2$", "match a.b.1 .*", "match z .*",
		"length a.b 3", "header X-There -", "header X-There other", "header X-Absent .*", "empty", "body other", "save Z n", "nonsense x",
	}
	header := http.Header{"X-There": {"yes"}}
	for _, line := range bad {
		if p.check(line, header, []byte("text"), body) == "" {
			t.Errorf("%q held", line)
		}
	}
	good := []string{"has a.b.0 one", "object a absent", "is one 1", "absent a.z", "match a.b.0 ^x$", "length a.b 2", "header X-There yes", "header X-Absent -", "body text", "save Z one"}
	for _, line := range good {
		if why := p.check(line, header, []byte("text"), body); why != "" {
			t.Errorf("%q: %s", line, why)
		}
	}
	if p.vars["Z"] != "1" || !slices.Equal(slices.Sorted(maps.Keys(p.vars)), []string{"Z"}) {
		t.Errorf("saved %v", p.vars)
	}
}
