package gateway_test

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// A buildAnswer is what polls of a build tell.
type buildAnswer struct {
	Status  string `json:"status"`
	Entries []struct {
		Message string `json:"message"`
		Step    string `json:"step"`
	} `json:"logEntries"`
	Reason *struct {
		Message string `json:"message"`
		Step    string `json:"step"`
	} `json:"reason"`
}

// build goes through the wire order of the Template SDK.
func (r *rig) build(name string, definition object) (templateID string, b buildAnswer, log string) {
	r.t.Helper()
	var made struct {
		Template string `json:"templateID"`
		Build    string `json:"buildID"`
	}
	r.want(202, r.do("POST", "/v3/templates", object{"name": name, "cpuCount": 2, "memoryMB": 512})).json(r.t, &made)
	a := r.want(202, r.do("POST", "/v2/templates/"+made.Template+"/builds/"+made.Build, definition))
	if a.length != 0 {
		r.t.Errorf("the empty answer to the start has Content-Length %d, want 0: JS fails on a chunked one", a.length)
	}
	deadline := time.Now().Add(20 * time.Second)
	for seen := 0; time.Now().Before(deadline); {
		var page buildAnswer
		r.want(200, r.do("GET", fmt.Sprintf("/templates/%s/builds/%s/status?logsOffset=%d", made.Template, made.Build, seen), nil)).json(r.t, &page)
		for _, e := range page.Entries {
			log += e.Message + "\n"
		}
		seen += len(page.Entries)
		if (page.Status == "ready" || page.Status == "error") && len(page.Entries) == 0 {
			return made.Template, page, log
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.t.Fatal("the build does not end")
	return "", b, ""
}

func TestATemplateIsBuiltStepByStepAndTheNextBuildStartsWhereItDiffers(t *testing.T) {
	r := newRig(t, nil)
	hash := strings.Repeat("ab", 32)
	var up struct {
		Present bool   `json:"present"`
		URL     string `json:"url"`
	}
	r.want(201, r.do("GET", "/templates/x/files/"+hash, nil)).json(t, &up)
	if up.Present {
		t.Fatal("files are there before they were sent")
	}
	put := func(url, body string) int {
		req, _ := http.NewRequest("PUT", url, bytes.NewReader([]byte(body)))
		resp, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if s := put(strings.Replace(up.URL, "token=", "token=0", 1), "tar"); s != 403 {
		t.Errorf("an upload with a wrong token: %d", s)
	}
	if s := put(up.URL, "tar"); s != 200 {
		t.Errorf("upload: %d", s)
	}
	r.want(201, r.do("GET", "/templates/x/files/"+hash, nil)).json(t, &up)
	if !up.Present {
		t.Fatal("the files were not kept")
	}
	steps := []object{
		{"type": "ENV", "args": []string{"A", "1"}},
		{"type": "RUN", "args": []string{"echo one"}},
		{"type": "COPY", "args": []string{".", "/app", "user", "755"}, "filesHash": hash},
		{"type": "WORKDIR", "args": []string{"/app"}},
		{"type": "USER", "args": []string{"root"}},
		{"type": "RUN", "args": []string{"echo two", "root"}},
	}
	id, b, log := r.build("mine", object{"fromTemplate": "base", "steps": steps, "startCmd": "sleep 0", "readyCmd": "echo ok"})
	if b.Status != "ready" {
		t.Fatalf("status %q: %+v\n%s", b.Status, b.Reason, log)
	}
	for _, want := range []string{"[2/6] RUN echo one", "one", "two"} {
		if !strings.Contains(log, want+"\n") {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	steps[5] = object{"type": "RUN", "args": []string{"fail now"}}
	_, b, log = r.build("mine:v2", object{"fromTemplate": "base", "steps": steps})
	if b.Status != "error" || b.Reason == nil || b.Reason.Step != "6" || !strings.Contains(b.Reason.Message, "exit status 3") {
		t.Errorf("a failing step: %+v", b)
	}
	if n := strings.Count(log, "CACHED"); n != 3 {
		t.Errorf("%d steps came from the cache, want the 3 up to the COPY:\n%s", n, log)
	}
	sb := r.create(object{"templateID": "mine", "envVars": object{"B": "2"}})
	made := r.backend.Made()
	spec := made[len(made)-1]
	if spec.Env["A"] != "1" || spec.Env["B"] != "2" || spec.User != "root" || spec.Workdir != "/app" {
		t.Errorf("a sandbox of it: %+v", spec)
	}
	r.want(204, r.do("DELETE", "/sandboxes/"+sb.ID, nil))
	if live, _ := r.backend.Count(); live != 0 {
		t.Errorf("%d sandboxes are left of the builds", live)
	}
	r.want(200, r.do("GET", "/templates/aliases/mine", nil))
	r.want(404, r.do("GET", "/templates/aliases/mine:v2", nil))
	r.want(204, r.do("DELETE", "/templates/"+id, nil))
	r.want(404, r.do("GET", "/templates/aliases/mine", nil))
}

func TestBuildsThatAreRefused(t *testing.T) {
	r := newRig(t, nil)
	for name, c := range map[string]struct {
		definition object
		says       string
	}{
		"no base":                 {object{}, "fromImage"},
		"two bases":               {object{"fromImage": "x", "fromTemplate": "base"}, "fromImage"},
		"an unknown instruction":  {object{"fromTemplate": "base", "steps": []object{{"type": "ADD", "args": []string{"x"}}}}, "ADD"},
		"files that never came":   {object{"fromTemplate": "base", "steps": []object{{"type": "COPY", "args": []string{"a", "b"}, "filesHash": strings.Repeat("0", 64)}}}, "uploaded"},
		"a hash that climbs":      {object{"fromTemplate": "base", "steps": []object{{"type": "COPY", "args": []string{"a", "b"}, "filesHash": "../../etc/passwd"}}}, "uploaded"},
		"a source that climbs":    {object{"fromTemplate": "base", "steps": []object{{"type": "COPY", "args": []string{"../a", "b"}, "filesHash": "x"}}}, "context"},
		"an argument with a NUL":  {object{"fromTemplate": "base", "steps": []object{{"type": "RUN", "args": []string{"a\x00b"}}}}, "NUL"},
		"a registry that logs in": {object{"fromImage": "x", "fromImageRegistry": object{"type": "aws"}}, "fromImageRegistry"},
	} {
		var made struct {
			Template string `json:"templateID"`
			Build    string `json:"buildID"`
		}
		r.want(202, r.do("POST", "/v3/templates", object{"name": "x"})).json(t, &made)
		a := r.do("POST", "/v2/templates/"+made.Template+"/builds/"+made.Build, c.definition)
		if a.status != 400 || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s: %d %s, want 400 and %q", name, a.status, a.body, c.says)
		}
	}
	r.want(400, r.do("POST", "/v3/templates", object{"name": "a/b/c"}))
	r.want(400, r.do("POST", "/v3/templates", object{}))
	r.want(404, r.do("POST", "/v2/templates/t/builds/b", object{}))
	r.want(404, r.do("GET", "/templates/t/builds/b/status", nil))
	r.want(400, r.do("GET", "/templates/t/files/..%2F..%2Fetc", nil))
}

func TestAnImageIsImported(t *testing.T) {
	r := newRig(t, nil)
	_, b, log := r.build("fromimage", object{"fromImage": "registry.example/thing:1"})
	if b.Status != "ready" || !strings.Contains(log, "imported registry.example/thing:1") {
		t.Errorf("%+v\n%s", b, log)
	}
	if made := r.backend.Made(); made[0].Template != "other" {
		t.Errorf("it starts from %q", made[0].Template)
	}
	if _, b, _ = r.build("frombase", object{"fromImage": "e2bdev/base:latest"}); b.Status != "ready" {
		t.Errorf("%+v", b)
	}
	if made := r.backend.Made(); made[1].Template != "base" {
		t.Errorf("E2B's base image is %q here, want the template base", made[1].Template)
	}
}
