package guestlink_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/guestlink"
)

// watchStream is a WatchDir in progress, as the E2B SDKs make it.
type watchStream struct {
	body io.ReadCloser
	stop context.CancelFunc
}

func watchDir(t *testing.T, c *guestlink.Client, request string, headers map[string]string) *watchStream {
	t.Helper()
	envelope := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(request)))
	ctx, stop := context.WithCancel(testContext(t))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/filesystem.Filesystem/WatchDir", bytes.NewReader(append(envelope, request...)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/connect+json")
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := c.HTTPClient().Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	w := &watchStream{body: resp.Body, stop: stop}
	t.Cleanup(func() {
		stop()
		resp.Body.Close()
	})
	return w
}

// next returns a message: "start", "keepalive", "CREATE name", "end code".
func (w *watchStream) next(t *testing.T) string {
	t.Helper()
	var head [5]byte
	if _, err := io.ReadFull(w.body, head[:]); err != nil {
		t.Fatal(err)
	}
	message := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(w.body, message); err != nil {
		t.Fatal(err)
	}
	var m struct {
		Start, Keepalive *struct{}
		Filesystem       *struct {
			Name, Type string
			Entry      *struct{ Path string }
		}
		Error *struct{ Code string }
	}
	if err := json.Unmarshal(message, &m); err != nil {
		t.Fatal(err)
	}
	switch {
	case m.Start != nil:
		return "start"
	case m.Keepalive != nil:
		return "keepalive"
	case m.Error != nil:
		return "end " + m.Error.Code
	case m.Filesystem == nil:
		return "end"
	}
	text := strings.TrimPrefix(m.Filesystem.Type, "EVENT_TYPE_") + " " + m.Filesystem.Name
	if m.Filesystem.Entry != nil {
		text += " @" + m.Filesystem.Entry.Path
	}
	return text
}

// until reads events up to the one wanted, and returns all but WRITE and CHMOD.
func (w *watchStream) until(t *testing.T, last string) []string {
	t.Helper()
	var all []string
	for {
		e := w.next(t)
		if strings.HasPrefix(e, "end") {
			t.Fatalf("%s after %v", e, all)
		}
		if !strings.HasPrefix(e, "WRITE") && !strings.HasPrefix(e, "CHMOD") {
			all = append(all, e)
		}
		if e == last {
			return all
		}
	}
}

func TestAWatchTellsWhatHappensInItsFolder(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	w := watchDir(t, g.connect(t), `{"path":"~"}`, nil)
	if e := w.next(t); e != "start" {
		t.Fatal(e)
	}
	path := filepath.Join(g.home, "file")
	write(t, path, "content")
	w.until(t, "CREATE file")
	w.until(t, "WRITE file")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	w.until(t, "CHMOD file")
	if err := os.Rename(path, path+"2"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"RENAME file", "CREATE file2"}, w.until(t, "CREATE file2")); diff != "" {
		t.Errorf("a rename (-want +got):\n%s", diff)
	}
	write(t, filepath.Join(g.home, "sub/unseen"), "") // not recursive
	w.until(t, "CREATE sub")
	if err := os.Remove(path + "2"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"REMOVE file2"}, w.until(t, "REMOVE file2")); diff != "" {
		t.Errorf("a removal (-want +got):\n%s", diff)
	}
}

func TestARecursiveWatchPicksUpNewFolders(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	write(t, filepath.Join(g.home, "old/deep/x"), "")
	w := watchDir(t, g.connect(t), `{"path":".","recursive":true,"includeEntry":true}`, nil)
	w.until(t, "start")
	create := func(name string) string { return "CREATE " + name + " @" + filepath.Join(g.home, name) }
	write(t, filepath.Join(g.home, "old/deep/y"), "")
	w.until(t, create("old/deep/y"))
	// Made faster than anybody can watch them: every one is reported, and once.
	var want []string
	for _, d := range []string{"a", "a/b", "a/b/c", "a/b/c/f"} {
		want = append(want, create(d))
	}
	write(t, filepath.Join(g.home, "a/b/c/f"), "")
	write(t, filepath.Join(g.home, "end"), "")
	got := w.until(t, create("end"))
	slices.Sort(got)
	if diff := cmp.Diff(append(want, create("end")), got); diff != "" {
		t.Errorf("new folders (-want +got):\n%s", diff)
	}
	if err := os.Rename(filepath.Join(g.home, "a"), filepath.Join(g.home, "moved")); err != nil {
		t.Fatal(err)
	}
	w.until(t, create("moved"))
	write(t, filepath.Join(g.home, "moved/b/c/g"), "")
	w.until(t, create("moved/b/c/g"))
	if err := os.RemoveAll(filepath.Join(g.home, "moved")); err != nil {
		t.Fatal(err)
	}
	w.until(t, "REMOVE moved")
}

func TestAWatchThatIsRefusedEndsItsStream(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "file"), "")
	for request, want := range map[string]string{
		`{"path":"none"}`: "end not_found", `{"path":"file"}`: "end invalid_argument", `{"path":"a\u0000"}`: "end invalid_argument", `{`: "end invalid_argument",
	} {
		if got := watchDir(t, c, request, nil).next(t); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
	w := watchDir(t, c, `{"path":"."}`, map[string]string{"Connect-Timeout-Ms": "300", "Keepalive-Ping-Interval": "1"})
	w.until(t, "start")
	if got := w.next(t); got != "end deadline_exceeded" {
		t.Errorf("at the deadline: %s", got)
	}
	w = watchDir(t, c, `{"path":"."}`, map[string]string{"Keepalive-Ping-Interval": "1"})
	w.until(t, "start")
	if got := w.next(t); got != "keepalive" {
		t.Errorf("after a second: %s", got)
	}
}

func TestAPollingWatcherKeepsEventsUntilTheyAreTaken(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	answer, code := call(t, c, "filesystem.Filesystem/CreateWatcher", body(t, "path", "."))
	id, _ := answer["watcherId"].(string)
	if code != "" || id == "" {
		t.Fatal(answer)
	}
	const files = 300
	for i := range files {
		write(t, filepath.Join(g.home, fmt.Sprintf("f%03d", i)), "")
	}
	created := map[string]int{}
	for deadline := time.Now().Add(10 * time.Second); len(created) < files && time.Now().Before(deadline); {
		answer, code := call(t, c, "filesystem.Filesystem/GetWatcherEvents", body(t, "watcherId", id))
		if code != "" {
			t.Fatal(answer)
		}
		events, _ := answer["events"].([]any)
		for _, e := range events {
			event, _ := e.(map[string]any)
			if event["type"] == "EVENT_TYPE_CREATE" {
				name, _ := event["name"].(string)
				created[name]++
			}
		}
	}
	if len(created) != files {
		t.Errorf("%d files were reported, want %d", len(created), files)
	}
	if _, code := call(t, c, "filesystem.Filesystem/RemoveWatcher", body(t, "watcherId", id)); code != "" {
		t.Error(code)
	}
	if _, code := call(t, c, "filesystem.Filesystem/GetWatcherEvents", body(t, "watcherId", id)); code != "not_found" {
		t.Errorf("after its removal: %q", code)
	}
}
