package traj

import (
	"bytes"
	"compress/gzip"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(name, ".gz") {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if _, err := z.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		text = b.String()
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

// One line in the shape of each recorded set, written by us.
const (
	claudeLine = `{"id":"acg/a","task":"t1","repo":"r","steps":[` +
		`{"n":0,"tool":"TodoWrite","think_s":2,"exec_s":0.5,"args":{"todos":[]}},` +
		`{"n":1,"tool":"Bash","think_s":3,"exec_s":1.5,"stream_s":0.8,"args":{"command":"pip install x","timeout":600000}},` +
		`{"n":2,"tool":"Grep","think_s":1,"stream_s":7,"exec_s":0.1,"args":{"pattern":"def (a|b)","output_mode":"content","-n":true,"-C":2,"type":"py","path":"src"}},` +
		`{"n":3,"tool":"Task","think_s":1,"exec_s":100,"args":{"prompt":"p"}},` +
		`{"n":4,"tool":"Mystery","think_s":1,"exec_s":100,"args":{}},` +
		`{"n":5,"tool":"Glob","think_s":0.5,"args":{"pattern":"**/x*.py"}}]}`
	r2eLine = `{"id":"r2e/b","task":"t2","repo":"aiohttp","steps":[` +
		`{"tool":"file_editor","think_s":4,"exec_s":0.1,"args":{"command":"view","path":"/testbed/a.py","view_range":"[10, 12]"}},` +
		`{"tool":"search","think_s":4,"exec_s":0.1,"args":{"search_term":"it's","path":"/testbed"}},` +
		`{"tool":"str_replace","think_s":4,"exec_s":0.1,"args":{"path":"x"}},` +
		`{"tool":"finish","think_s":4,"exec_s":0.1,"args":{"command":"submit"}}]}`
	miniLine = `{"id":"mini/c","task":"t3","repo":"django/django","steps":[{"tool":"bash","turn_s":4,"args":{"cmd":"nl -ba x | head"}},{"tool":"none","args":{}}]}`
	forkLine = `{"id":"fork/A_0","task":"t4","steps":[{"n":0,"kind":"cmd","cmd":"sed -i s/a/b/ x","period_s":null},{"n":1,"kind":"write+run","path":"/tmp/fix.py","cmd":"python /tmp/fix.py"},{"kind":"sed -i, no match"}]}`
)

func TestLoadMapsAllFourSets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a/trajectories.jsonl.gz", claudeLine+"\n"+r2eLine+"\n")
	write(t, dir, "b/trajectories.jsonl", miniLine+"\n\n"+forkLine)
	write(t, dir, "b/other.jsonl", "not json")
	got, err := Load(Selection{Path: dir})
	if err != nil {
		t.Fatal(err)
	}
	type step struct {
		Tool    string
		Kind    Kind
		Timeout time.Duration
		Drawn   bool
		Think   time.Duration // recorded ones only
	}
	type run struct {
		ID    string
		Steps []step
		Tally Tally
	}
	var have []run
	for _, tr := range got {
		r := run{ID: tr.ID, Tally: tr.Tally}
		for _, s := range tr.Steps {
			st := step{s.Tool, s.Kind, s.Timeout, s.Drawn, s.Think}
			if s.Drawn {
				st.Think = 0
			}
			r.Steps = append(r.Steps, st)
		}
		have = append(have, r)
	}
	ms := time.Millisecond
	want := []run{
		{"acg/a", []step{
			{"Bash", Net, 30 * time.Second, false, 5500 * ms}, // 2 think + 0.5 to-do list + 3 think
			{"Grep", Search, 0, false, 1000 * ms},
			{"Glob", List, 0, false, 2500 * ms}, // the sub-agent's 100 s are not the gap's
		}, Tally{Mapped: 3, NoSandbox: 2, Unmappable: 1}},
		{"r2e/b", []step{
			{"file_editor view", Read, 0, false, 4000 * ms},
			{"search", Search, 0, false, 4000 * ms},
		}, Tally{Mapped: 2, NoSandbox: 1, Unmappable: 1}},
		{"mini/c", []step{{"bash", Read, 0, true, 0}}, Tally{Mapped: 1, NoSandbox: 1, Drawn: 1}},
		{"fork/A_0", []step{{"cmd", Edit, 0, true, 0}, {"write+run", Write, 0, true, 0}}, Tally{Mapped: 2, Unmappable: 1, StandIns: 1, Drawn: 2}},
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Errorf("mapped trajectories (-want +got):\n%s", d)
	}
	leads := []time.Duration{got[0].Steps[0].Lead, got[0].Steps[1].Lead, got[0].Steps[2].Lead}
	if d := cmp.Diff([]time.Duration{800 * ms, 1000 * ms, 0}, leads); d != "" { // as recorded, the whole thinking, not recorded
		t.Errorf("leads (-want +got):\n%s", d)
	}
}

func TestSelectionByGroupAndMatch(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := write(t, dir, "set/trajectories.jsonl", miniLine+"\n"+r2eLine+"\n"+claudeLine+"\n")
	write(t, dir, "groups.json", `[{"group":"g","members":["acg/a","mini/c"]}]`)
	ids := func(sel Selection) []string {
		trs, err := Load(sel)
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, tr := range trs {
			ids = append(ids, tr.ID)
		}
		return ids
	}
	if d := cmp.Diff([]string{"acg/a", "mini/c"}, ids(Selection{Path: file, Group: "g"})); d != "" {
		t.Errorf("a group keeps its own order (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"r2e/b"}, ids(Selection{Path: dir, Match: "aiohttp"})); d != "" {
		t.Errorf("match by repository (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"r2e/b", "acg/a"}, ids(Selection{Path: dir, MinSteps: 2})); d != "" {
		t.Errorf("at least two steps (-want +got):\n%s", d)
	}
	if _, err := Load(Selection{Path: dir, Match: "nothing has this"}); !errors.Is(err, ErrNone) {
		t.Errorf("got %v, want ErrNone", err)
	}
	if _, err := Load(Selection{Path: dir, Group: "h"}); err == nil || !strings.Contains(err.Error(), `no group "h"`) {
		t.Errorf("unknown group: got %v", err)
	}
}

func TestBadFilesAreRefusedWithFileAndLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, c := range map[string]struct{ text, want string }{
		"no JSON":       {miniLine + "\nhello\n", "x.jsonl:2: parse trajectory"},
		"no id":         {`{"steps":[]}`, `x.jsonl:1: parse trajectory: no "id"`},
		"no commands":   {`{"session":"s","events":[]}`, "x.jsonl:1: records when tools ran but no commands"},
		"steps no list": {`{"id":"a","steps":{}}`, "x.jsonl:1: parse steps of a"},
		"long line":     {`{"id":"` + strings.Repeat("a", maxLine) + `"}`, "x.jsonl:1: line is longer than 16 MB"},
		"many steps":    {`{"id":"a","steps":[{}` + strings.Repeat(",{}", maxSteps) + `]}`, "more than 10000"},
		"nothing":       {"", "no trajectory selected"},
	} {
		p := write(t, dir, "x.jsonl", c.text)
		if _, err := Load(Selection{Path: p}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q in it", name, err, c.want)
		}
	}
	if _, err := Load(Selection{Path: filepath.Join(dir, "absent")}); err == nil {
		t.Error("an absent path: no error")
	}
	if _, err := Load(Selection{Path: t.TempDir()}); err == nil {
		t.Error("an empty folder: no error")
	}
	p := write(t, dir, "cut.jsonl.gz", claudeLine)
	data, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, data[:len(data)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(Selection{Path: p}); err == nil || !strings.Contains(err.Error(), "cut.jsonl.gz:1") {
		t.Errorf("a truncated gzip file: got %v", err)
	}
}

func TestDrawnThinkTimesAreStableAndFollowTheDistribution(t *testing.T) {
	t.Parallel()
	if a, b := drawThink(7, "id", 3), drawThink(7, "id", 3); a != b {
		t.Errorf("the same draw gave %v and %v", a, b)
	}
	if a, b := drawThink(7, "id", 3), drawThink(8, "id", 3); a == b {
		t.Errorf("two seeds gave the same %v", a)
	}
	const n = 20000
	below := map[float64]int{}
	for i := range n {
		d := drawThink(1, "x", i).Seconds()
		for _, q := range thinkQuantiles {
			if d <= q.s {
				below[q.s]++
			}
		}
	}
	for _, q := range thinkQuantiles {
		if got := float64(below[q.s]) / n; got < q.p-0.02 || got > q.p+0.02 {
			t.Errorf("share of draws up to %.1f s is %.3f, want %.2f", q.s, got, q.p)
		}
	}
}

func FuzzDecodeNeverPanicsAndKeepsTheBounds(f *testing.F) {
	for _, s := range []string{claudeLine, r2eLine, miniLine, forkLine, `{"id":"a","steps":[{"tool":"Read","args":{"file_path":3}}]}`, "\x1f\x8b\x08"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		budget := int64(1 << 20)
		trs, _, err := decode(bytes.NewReader(data), "fuzz", Selection{}, func(*rawRun) bool { return true }, &budget)
		if err != nil {
			return
		}
		for _, tr := range trs {
			for _, s := range tr.Steps {
				if s.Shell == "" || len(s.Shell) > maxShell || s.Think < 0 || s.Think > maxSeconds*time.Second {
					t.Errorf("step out of bounds: %+v", s)
				}
			}
		}
	})
}

func TestDrawnLeadsAreStableAndNeverLongerThanTheThinking(t *testing.T) {
	t.Parallel()
	var all []time.Duration
	for n := range 2000 {
		s := Step{Kind: Read, Think: time.Minute}
		d := DrawLead("a", n, s)
		if d != DrawLead("a", n, s) {
			t.Fatal("the same step has two leads")
		}
		all = append(all, d)
		if got := DrawLead("a", n, Step{Kind: Write, Think: time.Second}); got != time.Second {
			t.Fatalf("a model that thinks for 1 s writes for %v of it, want all: files take 8 s and more", got)
		}
	}
	slices.Sort(all)
	if p50 := all[len(all)/2].Seconds(); p50 < 0.6 || p50 > 0.75 {
		t.Errorf("median lead of a read %.2f s, recorded 0.67", p50)
	}
}
