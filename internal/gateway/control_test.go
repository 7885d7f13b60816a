package gateway_test

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/gateway"
)

func TestEveryAnswerHasTheFieldsThatPythonRequires(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(object{"metadata": object{"a": "b"}})
	r.do("GET", "/sandboxes/"+b.ID+"/metrics", nil)
	sandbox := "sandboxID templateID clientID envdVersion"
	listed := sandbox + " startedAt endAt state cpuCount memoryMB diskSizeMB metadata"
	metric := "timestamp timestampUnix cpuCount cpuUsedPct memUsed memTotal memCache diskUsed diskTotal"
	one := func(a answer) object {
		var o object
		a.json(t, &o)
		return o
	}
	first := func(a answer) object {
		var l []object
		a.json(t, &l)
		if len(l) == 0 {
			t.Fatalf("empty list")
		}
		return l[0]
	}
	for name, c := range map[string]struct {
		got  object
		want string
	}{
		"create v1": {one(r.want(201, r.do("POST", "/sandboxes", object{"templateID": "base", "timeout": 300, "secure": true, "metadata": object{}, "envVars": object{}}))), sandbox + " envdAccessToken"},
		"create v2": {one(r.want(201, r.do("POST", "/v2/sandboxes", object{"templateID": "base"}))), sandbox + " envdAccessToken domain"},
		"list v1":   {first(r.want(200, r.do("GET", "/sandboxes", nil))), listed},
		"list v2":   {first(r.want(200, r.do("GET", "/v2/sandboxes", nil))), listed},
		"detail":    {one(r.want(200, r.do("GET", "/sandboxes/"+b.ID, nil))), listed + " envdAccessToken lifecycle allowInternetAccess volumeMounts"},
		"connect":   {one(r.want(200, r.do("POST", "/v2/sandboxes/"+b.ID+"/connect", object{}))), sandbox},
		"metrics":   {first(r.want(200, r.do("GET", "/sandboxes/"+b.ID+"/metrics", nil))), metric},
		"snapshot":  {one(r.want(201, r.do("POST", "/sandboxes/"+b.ID+"/snapshots", object{}))), "snapshotID names"},
		"snapshots": {first(r.want(200, r.do("GET", "/snapshots", nil))), "snapshotID names"},
		"fork":      {first(r.want(201, r.do("POST", "/sandboxes/"+b.ID+"/fork", object{}))), "sandbox"},
		"templates": {first(r.want(200, r.do("GET", "/templates", nil))), "templateID buildID cpuCount memoryMB diskSizeMB public aliases names createdAt updatedAt envdVersion buildStatus"},
	} {
		for field := range strings.FieldsSeq(c.want) {
			if _, ok := c.got[field]; !ok {
				t.Errorf("%s: %s is missing among %s", name, field, keysOf(c.got))
			}
		}
	}
}

func TestALifeByTheRoutesOfBothGenerations(t *testing.T) {
	for _, v := range []string{"", "/v2"} {
		r := newRig(t, nil)
		var b box
		r.want(201, r.do("POST", v+"/sandboxes", object{"templateID": "base"})).json(t, &b)
		fallback := map[string]time.Duration{"": 15 * time.Second, "/v2": 300 * time.Second}[v]
		if left := r.detail(b.ID).left(t); left != fallback {
			t.Errorf("%s: time to live %v, want %v", v, left, fallback)
		}
		r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/timeout", object{"timeout": 100}))
		r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/refreshes", object{"duration": 10}))
		if left := r.detail(b.ID).left(t); left != 100*time.Second {
			t.Errorf("%s: time to live after a shorter refresh %v, want 100s", v, left)
		}
		a := r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil))
		if len(a.body) != 0 {
			t.Errorf("pause answers %q", a.body)
		}
		r.want(409, r.do("POST", "/sandboxes/"+b.ID+"/pause", object{}))
		r.want(409, r.do("POST", "/sandboxes/"+b.ID+"/timeout", object{"timeout": 100}))
		r.want(409, r.do("POST", "/sandboxes/"+b.ID+"/fork", object{}))
		r.want(409, r.do("POST", "/sandboxes/"+b.ID+"/snapshots", object{}))
		if s := r.detail(b.ID).State; s != "paused" {
			t.Errorf("state %q after the pause", s)
		}
		var again box
		r.want(201, r.do("POST", v+"/sandboxes/"+b.ID+"/connect", object{"timeout": 50})).json(t, &again)
		if again.ID != b.ID || again.Token != b.Token {
			t.Errorf("resumed as %+v, want the id and token of %+v", again, b)
		}
		r.want(200, r.do("POST", v+"/sandboxes/"+b.ID+"-suffix/connect", object{"timeout": 500}))
		r.want(409, r.do("POST", "/sandboxes/"+b.ID+"/resume", object{"timeout": 500}))
		if left := r.detail(b.ID).left(t); left != 500*time.Second {
			t.Errorf("%s: time to live after connect %v, want 500s", v, left)
		}
		r.want(204, r.do("DELETE", "/sandboxes/"+b.ID, nil))
		for _, probe := range [][2]string{
			{"DELETE", ""},
			{"GET", ""},
			{"POST", "/connect"},
			{"POST", "/pause"},
			{"POST", "/timeout"},
			{"GET", "/metrics"},
			{"PUT", "/network"},
			{"POST", "/snapshots"},
			{"POST", "/fork"},
			{"POST", "/resume"},
		} {
			a := r.want(404, r.do(probe[0], "/sandboxes/"+b.ID+probe[1], object{"timeout": 1}))
			if !strings.Contains(string(a.body), "killed") {
				t.Errorf("%s %s does not say why it is gone: %s", probe[0], probe[1], a.body)
			}
		}
	}
}

func TestWhatIsRefusedAndHow(t *testing.T) {
	r := newRig(t, func(c *gateway.Config) { c.MaxTimeout = 2 * time.Hour })
	b := r.create(nil)
	for name, c := range map[string]struct {
		method, path string
		body         any
		header       []string
		status       int
		says         string
	}{
		"no key":                           {"GET", "/sandboxes", nil, []string{"X-Api-Key", ""}, 401, "key"},
		"a wrong key":                      {"GET", "/sandboxes", nil, []string{"X-Api-Key", testKey + "0"}, 401, "key"},
		"no body":                          {"POST", "/sandboxes", nil, nil, 400, ""},
		"a body that is no JSON":           {"POST", "/sandboxes", "{", nil, 400, ""},
		"a body of another type":           {"POST", "/sandboxes", `{"templateID":5}`, nil, 400, ""},
		"no template":                      {"POST", "/v2/sandboxes", object{}, nil, 400, "templateID"},
		"an unknown template":              {"POST", "/v2/sandboxes", object{"templateID": "nope"}, nil, 404, "nope"},
		"an unknown tag":                   {"POST", "/v2/sandboxes", object{"templateID": "base:v9"}, nil, 404, "tag"},
		"a timeout above the maximum":      {"POST", "/v2/sandboxes", object{"templateID": "base", "timeout": 7201}, nil, 400, "Timeout cannot be greater than 2 hours"},
		"a negative timeout":               {"POST", "/v2/sandboxes", object{"templateID": "base", "timeout": -1}, nil, 400, "timeout"},
		"disk-only pause without a pause":  {"POST", "/v2/sandboxes", object{"templateID": "base", "autoPauseMemory": false}, nil, 400, "autoPause"},
		"disk-only pause woken by traffic": {"POST", "/v2/sandboxes", object{"templateID": "base", "autoPause": true, "autoPauseMemory": false, "autoResume": object{"enabled": true}}, nil, 400, "autoResume"},
		"a variable that is none":          {"POST", "/v2/sandboxes", object{"templateID": "base", "envVars": object{"a=b": "c"}}, nil, 400, "envVars"},
		"mcp":                              {"POST", "/v2/sandboxes", object{"templateID": "base", "mcp": object{"x": 1}}, nil, 400, "mcp is not supported"},
		"iam":                              {"POST", "/v2/sandboxes", object{"templateID": "base", "iam": object{"tokens": object{}}}, nil, 400, "iam is not supported"},
		"volume mounts":                    {"POST", "/v2/sandboxes", object{"templateID": "base", "volumeMounts": []object{{"name": "v"}}}, nil, 400, "volumeMounts"},
		"an egress proxy":                  {"POST", "/v2/sandboxes", object{"templateID": "base", "network": object{"egressProxy": object{"address": "x"}}}, nil, 400, "egressProxy"},
		"header rules":                     {"POST", "/v2/sandboxes", object{"templateID": "base", "network": object{"rules": object{"a.b": 1}}}, nil, 400, "rules"},
		"a name among the denied":          {"POST", "/v2/sandboxes", object{"templateID": "base", "network": object{"denyOut": []string{"example.com"}}}, nil, 400, "denyOut"},
		"a name allowed and none denied":   {"POST", "/v2/sandboxes", object{"templateID": "base", "network": object{"allowOut": []string{"*.example.com"}}}, nil, 400, "0.0.0.0/0"},
		"a host with a line break":         {"POST", "/v2/sandboxes", object{"templateID": "base", "network": object{"maskRequestHost": "a\r\nb"}}, nil, 400, "maskRequestHost"},
		"a cohort that is no name":         {"POST", "/v2/sandboxes", object{"templateID": "base", "metadata": object{"agentzip.cohort": "../x"}}, nil, 400, "cohort"},
		"a cursor that is none":            {"GET", "/v2/sandboxes?nextToken=xyz", nil, nil, 400, "nextToken"},
		"a limit that is too large":        {"GET", "/v2/sandboxes?limit=101", nil, nil, 400, "limit"},
		"a limit that is no number":        {"GET", "/v2/sandboxes?limit=x", nil, nil, 400, ""},
		"an unknown state":                 {"GET", "/v2/sandboxes?state=dead", nil, nil, 400, "state"},
		"a template with a tag":            {"GET", "/v2/sandboxes?template=a:b", nil, nil, 400, "tag"},
		"metadata that is no query":        {"GET", "/v2/sandboxes?metadata=%25zz", nil, nil, 400, "metadata"},
		"connect v1 without a timeout":     {"POST", "/sandboxes/" + b.ID + "/connect", object{}, nil, 400, "timeout"},
		"too many forks":                   {"POST", "/sandboxes/" + b.ID + "/fork", object{"count": 101}, nil, 400, "count"},
		"a name of another team":           {"POST", "/sandboxes/" + b.ID + "/snapshots", object{"name": "blue/x"}, nil, 400, "team"},
		"a name that climbs":               {"POST", "/sandboxes/" + b.ID + "/snapshots", object{"name": "../../x"}, nil, 400, "name"},
		"a signal of no kind":              {"POST", "/agentzip/v1/sandboxes/" + b.ID + "/signals", object{"kind": "x"}, nil, 400, "kind"},
		"volumes":                          {"POST", "/volumes", object{"name": "x"}, nil, 501, "volumes"},
		"secrets":                          {"GET", "/secrets", nil, nil, 501, "secrets"},
		"an unknown route":                 {"GET", "/nothing", nil, nil, 404, "route"},
		"a path that climbs":               {"GET", "/sandboxes/../teams", nil, nil, 404, "route"},
		"a path with two slashes":          {"GET", "//sandboxes", nil, nil, 404, "route"},
		"a host template to be deleted":    {"DELETE", "/templates/base", nil, nil, 403, "host"},
		"an unknown template to delete":    {"DELETE", "/templates/nope", nil, nil, 404, ""},
		"an id with a NUL":                 {"GET", "/sandboxes/%00", nil, nil, 404, ""},
		"a very long id":                   {"GET", "/sandboxes/" + strings.Repeat("a", 8000), nil, nil, 404, ""},
		"a body without an end in sight":   {"POST", "/sandboxes", `{"templateID":"` + strings.Repeat("a", 2<<20) + `"}`, nil, 413, "larger"},
	} {
		t.Run(name, func(t *testing.T) {
			a := r.do(c.method, c.path, c.body, c.header...)
			sub := &rig{t: t}
			sub.want(c.status, a)
			if !strings.Contains(string(a.body), c.says) {
				t.Errorf("%s does not mention %q", a.body, c.says)
			}
		})
	}
}

func TestListsInPagesWithFilters(t *testing.T) {
	r := newRig(t, nil)
	var ids []string
	for i := range 7 {
		b := r.create(object{"metadata": object{"n": fmt.Sprint(i % 2), "odd key&=%": "b c/ü"}, "templateID": []string{"base", "other"}[i%2]})
		ids = append(ids, b.ID)
	}
	r.want(204, r.do("POST", "/sandboxes/"+ids[3]+"/pause", nil))
	list := func(query url.Values) (found []string, token, running string) {
		a := r.want(200, r.do("GET", "/v2/sandboxes?"+query.Encode(), nil))
		var l []box
		a.json(t, &l)
		for _, b := range l {
			found = append(found, b.ID)
		}
		return found, a.header.Get("X-Next-Token"), a.header.Get("X-Total-Running")
	}
	for _, order := range []string{"asc", "desc"} {
		want := slices.Clone(ids)
		if order == "desc" {
			slices.Reverse(want)
		}
		var got []string
		q := url.Values{"order": {order}, "limit": {"3"}}
		for pages := 0; ; pages++ {
			found, token, running := list(q)
			if running != "6" {
				t.Errorf("X-Total-Running %q, want 6", running)
			}
			got = append(got, found...)
			if token == "" {
				if pages != 2 {
					t.Errorf("%d pages, want 3", pages+1)
				}
				break
			}
			other := map[string]string{"asc": "desc", "desc": "asc"}[order]
			r.want(400, r.do("GET", "/v2/sandboxes?"+url.Values{"order": {other}, "nextToken": {token}}.Encode(), nil))
			q.Set("nextToken", token)
			if pages == 0 { // what ends between two pages moves nothing
				q.Set("limit", "3")
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", order, got, want)
		}
	}
	// As the JS client sends it: pairs escaped, joined, escaped again by the URL.
	filter := url.QueryEscape("odd key&=%") + "=" + url.QueryEscape("b c/ü") + "&n=1"
	for name, c := range map[string]struct {
		query url.Values
		want  []string
	}{
		"metadata, twice escaped":  {url.Values{"metadata": {url.QueryEscape(filter)}}, []string{ids[5], ids[3], ids[1]}},
		"metadata that nobody has": {url.Values{"metadata": {"n=7"}}, nil},
		"running":                  {url.Values{"state": {"running"}, "limit": {"2"}}, []string{ids[6], ids[5]}},
		"paused":                   {url.Values{"state": {"paused"}}, []string{ids[3]}},
		"both":                     {url.Values{"state": {"running,paused"}, "order": {"asc"}, "limit": {"1"}}, []string{ids[0]}},
		"template":                 {url.Values{"template": {"other"}, "state": {"running"}}, []string{ids[5], ids[1]}},
		"unknown template":         {url.Values{"template": {"nope"}}, nil},
		"started after now":        {url.Values{"startedAfter": {time.Now().Format(time.RFC3339Nano)}}, nil},
		"started after the fifth":  {url.Values{"startedAfter": {r.detail(ids[4]).StartAt}}, []string{ids[6], ids[5]}},
	} {
		if got, _, _ := list(c.query); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	var running []box
	r.want(200, r.do("GET", "/sandboxes?metadata="+url.QueryEscape("n=1"), nil)).json(t, &running)
	if len(running) != 2 {
		t.Errorf("v1 lists %d, want the two that run", len(running))
	}
}

func TestForksAndSnapshotsHaveTheStateAndNotTheIdentity(t *testing.T) {
	r := newRig(t, nil)
	src := r.create(object{"metadata": object{"k": "v"}, "autoPause": true})
	r.want(200, r.do("POST", "/files?path=/f", "one", src.route(49983)...))
	var forks []struct {
		Sandbox *box `json:"sandbox"`
		Error   any  `json:"error"`
	}
	r.want(201, r.do("POST", "/sandboxes/"+src.ID+"/fork", object{"count": 3, "timeout": 60})).json(t, &forks)
	if len(forks) != 3 {
		t.Fatalf("%d forks, want 3", len(forks))
	}
	seen := map[string]bool{src.ID: true, src.Token: true}
	for _, f := range forks {
		if f.Sandbox == nil || seen[f.Sandbox.ID] || seen[f.Sandbox.Token] {
			t.Fatalf("fork %+v: want a sandbox with an id and token of its own", f)
		}
		seen[f.Sandbox.ID], seen[f.Sandbox.Token] = true, true
		if a := r.do("GET", "/files?path=/f", nil, f.Sandbox.route(49983)...); string(a.body) != "one" {
			t.Errorf("the fork's file is %q", a.body)
		}
		if left := r.detail(f.Sandbox.ID).left(t); left != time.Minute {
			t.Errorf("the fork lives for %v", left)
		}
	}
	var snap struct {
		ID    string   `json:"snapshotID"`
		Names []string `json:"names"`
	}
	r.want(201, r.do("POST", "/sandboxes/"+src.ID+"/snapshots", object{"name": "mine"})).json(t, &snap)
	if snap.ID != "default/mine:default" {
		t.Errorf("snapshot %q", snap.ID)
	}
	r.want(200, r.do("POST", "/files?path=/f", "two", src.route(49983)...))
	for _, name := range []string{snap.ID, "mine", "mine:default", "default/mine"} {
		b := r.create(object{"templateID": name})
		if b.Template != snap.ID {
			t.Errorf("created from %q: templateID %q", name, b.Template)
		}
		if a := r.do("GET", "/files?path=/f", nil, b.route(49983)...); string(a.body) != "one" {
			t.Errorf("created from %q: the file is %q, want that of the snapshot", name, a.body)
		}
	}
	// The same name again is a new build under it; the old one is given up.
	r.want(201, r.do("POST", "/sandboxes/"+src.ID+"/snapshots", object{"name": "mine"}))
	b := r.create(object{"templateID": "mine"})
	if a := r.do("GET", "/files?path=/f", nil, b.route(49983)...); string(a.body) != "two" {
		t.Errorf("created from the new build: %q", a.body)
	}
	if _, kept := r.backend.Count(); kept != 1 {
		t.Errorf("%d images kept, want 1", kept)
	}
	// Ids come percent-encoded within one segment.
	r.want(204, r.do("DELETE", "/templates/"+url.PathEscape(snap.ID), nil))
	r.want(404, r.do("DELETE", "/templates/"+url.PathEscape(snap.ID), nil))
	if _, kept := r.backend.Count(); kept != 0 {
		t.Errorf("%d images kept after the delete, want 0", kept)
	}
}

func TestQuotasAreAnsweredWithRetryAfter(t *testing.T) {
	r := newRig(t, func(c *gateway.Config) { c.MaxPerTeam = 2 })
	b := r.create(nil)
	r.create(nil)
	a := r.want(429, r.do("POST", "/v2/sandboxes", object{"templateID": "base"}))
	if a.header.Get("Retry-After") != "1" {
		t.Errorf("Retry-After %q, want whole seconds", a.header.Get("Retry-After"))
	}
	r.want(400, r.do("POST", "/sandboxes/"+b.ID+"/fork", object{"count": 2}))
	r.want(204, r.do("DELETE", "/sandboxes/"+b.ID, nil))
	r.create(nil)
}

func TestAPauseThatCannotBeDoneNowIs503AndChangesNothing(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	r.backend.Hook = func(op, _ string) error {
		if op == "pause" {
			return fmt.Errorf("no space left on device")
		}
		return nil
	}
	r.want(503, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil))
	if s := r.detail(b.ID).State; s != "running" {
		t.Errorf("state %q", s)
	}
	r.want(200, r.do("POST", "/files?path=/f", "x", b.route(49983)...))
}

func TestTeamsDoNotSeeEachOther(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	other, _, err := r.server.Keys().Create("k", "blue")
	if err != nil {
		t.Fatal(err)
	}
	for _, probe := range [][2]string{{"GET", ""}, {"DELETE", ""}, {"POST", "/connect"}, {"POST", "/pause"}} {
		r.want(404, r.do(probe[0], "/sandboxes/"+b.ID+probe[1], object{"timeout": 1}, "X-API-Key", other))
	}
	if a := r.do("GET", "/v2/sandboxes", nil, "X-API-Key", other); string(a.body) != "[]\n" {
		t.Errorf("another team's list: %s", a.body)
	}
}

func TestNoSecretsInTheLog(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(object{"envVars": object{"PASSWORD": "hunter2"}, "network": object{"allowPublicTraffic": false}})
	r.do("GET", "/files?path=/f", nil, b.route(49983)...)
	r.do("GET", "/x", nil, b.route(8080)...)
	r.want(204, r.do("POST", "/sandboxes/"+b.ID+"/pause", nil))
	r.stop()
	log := r.log.String()
	for what, secret := range map[string]string{"API key": testKey, "access token": b.Token, "traffic token": *b.Traffic, "variable": "hunter2"} {
		if strings.Contains(log, secret) {
			t.Errorf("the log holds the %s", what)
		}
	}
	if !strings.Contains(log, b.ID) {
		t.Error("the log does not mention the sandbox: it proves nothing")
	}
}
