package guestlink_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/guestlink"
)

// do sends a request with a body to the guest and returns status, headers and body of the answer.
func do(t *testing.T, c *guestlink.Client, method, path string, headers map[string]string, body io.Reader) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(testContext(t), method, "http://guest"+path, body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := c.HTTPClient().Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, resp.Header, string(answer)
}

// call is a unary Connect call as the E2B SDKs make it. It returns the answer, or the code of the error.
func call(t *testing.T, c *guestlink.Client, method, body string) (answer map[string]any, code string) {
	t.Helper()
	status, _, text := do(t, c, http.MethodPost, "/"+method, map[string]string{
		"Content-Type": "application/json", "Connect-Protocol-Version": "1",
	}, strings.NewReader(body))
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		t.Fatalf("%s: status %d, body %q: %v", method, status, text, err)
	}
	if status != http.StatusOK {
		code, _ = answer["code"].(string)
		if message, _ := answer["message"].(string); message == "" {
			t.Errorf("%s: an error without a message: %s", method, text)
		}
	}
	return answer, code
}

// body is the JSON of a request with strings.
func body(t *testing.T, pairs ...string) string {
	t.Helper()
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFileCallsAnswerWithE2BsCodes(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "file"), "x")
	write(t, filepath.Join(g.home, "dir/inner"), "x")
	for _, link := range [][2]string{{"file", "link"}, {"nowhere", "broken"}, {"dir", "dirlink"}, {"loop", "loop"}} {
		if err := os.Symlink(link[0], filepath.Join(g.home, link[1])); err != nil {
			t.Fatal(err)
		}
	}
	const fs = "filesystem.Filesystem/"
	long := strings.Repeat("n", 256)
	for _, tc := range []struct{ what, method, body, code string }{
		{"stat of nothing", "Stat", body(t, "path", "none"), "not_found"},
		{"stat of a broken link", "Stat", body(t, "path", "broken"), ""},
		{"stat below a file", "Stat", body(t, "path", "file/x"), "invalid_argument"},
		{"stat of a name with NUL", "Stat", `{"path":"a\u0000b"}`, "invalid_argument"},
		{"stat of a name of 256 bytes", "Stat", body(t, "path", long), "invalid_argument"},
		{"stat of a path of 5000 bytes", "Stat", body(t, "path", strings.Repeat("a/", 2500)), "invalid_argument"},
		{"stat of another user's home", "Stat", body(t, "path", "~other"), "invalid_argument"},
		{"stat with an unknown field", "Stat", `{"path":"file","novel":1}`, ""},
		{"stat with invalid UTF-8", "Stat", "{\"path\":\"\xff\"}", "invalid_argument"},
		{"stat with half a body", "Stat", `{"path":"fi`, "invalid_argument"},
		{"making a folder", "MakeDir", body(t, "path", "a/b/c"), ""},
		{"making a folder that is there", "MakeDir", body(t, "path", "dir"), "already_exists"},
		{"making a folder where a file is", "MakeDir", body(t, "path", "file"), "invalid_argument"},
		{"making a folder below a file", "MakeDir", body(t, "path", "file/x"), "invalid_argument"},
		{"listing nothing", "ListDir", body(t, "path", "none"), "not_found"},
		{"listing a file", "ListDir", body(t, "path", "file"), "invalid_argument"},
		{"listing a loop", "ListDir", body(t, "path", "loop"), "invalid_argument"},
		{"listing a link to a folder", "ListDir", body(t, "path", "dirlink"), ""},
		{"moving nothing", "Move", body(t, "source", "none", "destination", "x/y"), "not_found"},
		{"moving without a destination", "Move", body(t, "source", "file"), "invalid_argument"},
		{"moving a folder into itself", "Move", body(t, "source", "dir", "destination", "dir/sub"), "invalid_argument"},
		{"removing nothing", "Remove", body(t, "path", "none"), ""},
		{"removing below a file", "Remove", body(t, "path", "file/x"), "invalid_argument"},
		{"removing without a path", "Remove", `{}`, "invalid_argument"},
		{"removing the root", "Remove", body(t, "path", "/../"), "invalid_argument"},
		{"watching nothing", "CreateWatcher", body(t, "path", "none"), "not_found"},
		{"watching a file", "CreateWatcher", body(t, "path", "file"), "invalid_argument"},
		{"an unknown watcher", "GetWatcherEvents", body(t, "watcherId", "none"), "not_found"},
		{"removing an unknown watcher", "RemoveWatcher", body(t, "watcherId", "none"), "not_found"},
	} {
		if answer, code := call(t, c, fs+tc.method, tc.body); code != tc.code {
			t.Errorf("%s: code %q, want %q: %v", tc.what, code, tc.code, answer)
		}
	}
	if _, err := os.Stat(filepath.Join(g.home, "x")); err == nil {
		t.Error("moving nothing made folders")
	}
	if status, _, text := do(t, c, http.MethodPost, "/filesystem.Filesystem/Stat", map[string]string{
		"Content-Type": "application/json", "Authorization": "Basic bm9ib2R5LWhlcmU6",
	}, strings.NewReader(`{"path":"/"}`)); status != http.StatusUnauthorized || !strings.Contains(text, "invalid username: 'nobody-here'") {
		t.Errorf("an unknown user: %d, %s", status, text)
	}
}

func TestAnEntryIsDescribedAsE2BDoes(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "file"), "12345")
	for _, l := range [][2]string{{"file", "link"}, {"nowhere", "broken"}} {
		if err := os.Symlink(l[0], filepath.Join(g.home, l[1])); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) map[string]any {
		answer, code := call(t, c, "filesystem.Filesystem/Stat", body(t, "path", name))
		entry, _ := answer["entry"].(map[string]any)
		if code != "" || entry["modifiedTime"] == "" || entry["owner"] == "" || entry["group"] == "" {
			t.Fatalf("%s: %v", name, answer)
		}
		for _, k := range []string{"modifiedTime", "owner", "group"} {
			delete(entry, k)
		}
		return entry
	}
	path := func(name string) string { return filepath.Join(g.home, name) }
	for _, want := range []map[string]any{
		{"name": "file", "type": "FILE_TYPE_FILE", "path": path("file"), "size": "5", "mode": float64(0o644), "permissions": "-rw-r--r--"},
		{"name": "link", "type": "FILE_TYPE_FILE", "path": path("link"), "size": "4", "mode": float64(0o644), "permissions": "lrwxrwxrwx", "symlinkTarget": path("file")},
		{"name": "broken", "type": "FILE_TYPE_SYMLINK", "path": path("broken"), "size": "7", "mode": float64(0o777), "permissions": "lrwxrwxrwx", "symlinkTarget": "nowhere"},
	} {
		if diff := cmp.Diff(want, get(want["name"].(string))); diff != "" { //nolint:forcetypeassert // from the line above
			t.Errorf("entry (-want +got):\n%s", diff)
		}
	}
}

func TestAListGoesAsDeepAsAskedAndNotThroughLinks(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "real/b/c/deep"), "")
	write(t, filepath.Join(g.home, "real/a"), "")
	for _, l := range [][2]string{{"real", "root"}, {"/", "real/b/out"}} {
		if err := os.Symlink(l[0], filepath.Join(g.home, l[1])); err != nil {
			t.Fatal(err)
		}
	}
	for depth, want := range map[string][]string{
		"0": {"a", "b"}, "1": {"a", "b"}, "2": {"a", "b", "b/c", "b/out"}, "9": {"a", "b", "b/c", "b/c/deep", "b/out"},
	} {
		answer, code := call(t, c, "filesystem.Filesystem/ListDir", `{"path":"root","depth":`+depth+`}`)
		if code != "" {
			t.Fatal(answer)
		}
		var got []string
		found, _ := answer["entries"].([]any)
		for _, e := range found {
			entry, _ := e.(map[string]any)
			path, _ := entry["path"].(string)
			got = append(got, strings.TrimPrefix(path, filepath.Join(g.home, "root")+"/"))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("depth %s (-want +got):\n%s", depth, diff)
		}
	}
}

func TestMovingCrossesFileSystems(t *testing.T) {
	t.Parallel()
	other, err := os.MkdirTemp("/dev/shm", "agentzip-test-") //nolint:usetesting // another file system is the point
	if err != nil {
		t.Skip("no /dev/shm here")
	}
	t.Cleanup(func() { os.RemoveAll(other) })
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "dir/-inner"), "content")
	if answer, code := call(t, c, "filesystem.Filesystem/Move", body(t, "source", "dir", "destination", other+"/new/-dir")); code != "" {
		t.Fatal(answer)
	}
	got, err := os.ReadFile(other + "/new/-dir/-inner")
	if err != nil || string(got) != "content" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := os.Stat(filepath.Join(g.home, "dir")); err == nil {
		t.Error("the source is still there")
	}
}

func TestAMessageHasALimit(t *testing.T) {
	t.Parallel()
	c := startGuest(t, false).connect(t)
	huge := io.MultiReader(strings.NewReader(`{"path":"`), io.LimitReader(zeros{}, 20<<20), strings.NewReader(`"}`))
	req, err := http.NewRequestWithContext(testContext(t), http.MethodPost, "http://guest/filesystem.Filesystem/Stat", huge)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.HTTPClient().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(text, []byte("resource_exhausted")) {
		t.Errorf("got %s, %s, %v", resp.Status, text, err)
	}
	output(t, c, "true") // the session goes on
}

// zeros is an endless run of the digit.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '0'
	}
	return len(p), nil
}
