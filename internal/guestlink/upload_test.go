package guestlink_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// form is a multipart body with a part named "file" for each name, content pair.
func form(t *testing.T, pairs ...string) (contentType string, body *bytes.Buffer) {
	t.Helper()
	body = &bytes.Buffer{}
	w := multipart.NewWriter(body)
	for i := 0; i < len(pairs); i += 2 {
		h := textproto.MIMEHeader{}
		h.Set("Content-Disposition", `form-data; name="file"; filename="`+pairs[i]+`"`)
		h.Set("Content-Type", "application/octet-stream")
		part, err := w.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(part, pairs[i+1])
	}
	_ = w.WriteField("other", "ignored")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), body
}

func zipped(t *testing.T, content string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, content)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestAFormWritesEachFileUnderItsFullName(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	kind, b := form(t, "a/b/one.txt", "1", "/"+filepath.Join(g.home, "two"), "22", "grüße.txt", "", "~/four", "4444")
	status, _, text := do(t, c, http.MethodPost, "/files?username=user", map[string]string{"Content-Type": kind}, b)
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	var got []map[string]string
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	file := func(path string) map[string]string {
		return map[string]string{"path": filepath.Join(g.home, path), "name": filepath.Base(path), "type": "file"}
	}
	if diff := cmp.Diff([]map[string]string{file("a/b/one.txt"), file("two"), file("grüße.txt"), file("four")}, got); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
	for name, want := range map[string]string{"a/b/one.txt": "1", "two": "22", "grüße.txt": "", "four": "4444"} {
		if content, err := os.ReadFile(filepath.Join(g.home, name)); err != nil || string(content) != want {
			t.Errorf("%s: %q, %v", name, content, err)
		}
	}
}

func TestAnUploadIsTruncatedInPlaceAndKeepsItsMode(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	path := filepath.Join(g.home, "script")
	write(t, path, "a long old content")
	if err := os.Chmod(path, 0o750); err != nil {
		t.Fatal(err)
	}
	kind, b := form(t, "ignored-because-of-the-path", "new")
	if status, _, text := do(t, c, http.MethodPost, "/files?path=script", map[string]string{"Content-Type": kind}, b); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	content, err := os.ReadFile(path)
	st, _ := os.Stat(path)
	if err != nil || string(content) != "new" || st.Mode() != 0o750 {
		t.Errorf("%q, %v, %v", content, st.Mode(), err)
	}
}

func TestUploadsAreRefusedForTheirReason(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	write(t, filepath.Join(g.home, "dir/file"), "")
	if err := unix.Mkfifo(filepath.Join(g.home, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	octets := map[string]string{"Content-Type": "application/octet-stream"}
	twice, twiceBody := form(t, "x", "1", "./x", "2")
	nameless, namelessBody := form(t, "", "1")
	cut, cutBody := form(t, "cut", strings.Repeat("x", 1000))
	cutBody.Truncate(500)
	for _, tc := range []struct {
		what, query string
		headers     map[string]string
		body        io.Reader
		status      int
	}{
		{"no path", "", octets, strings.NewReader("x"), 400},
		{"a folder", "?path=dir", octets, strings.NewReader("x"), 400},
		{"a path that ends like a folder", "?path=new/", octets, strings.NewReader("x"), 400},
		{"below a file", "?path=dir/file/x", octets, strings.NewReader("x"), 400},
		{"a FIFO", "?path=fifo", octets, strings.NewReader("x"), 400},
		{"NUL", "?path=a%00b", octets, strings.NewReader("x"), 400},
		{"a name of 256 bytes", "?path=" + strings.Repeat("n", 256), octets, strings.NewReader("x"), 400},
		{"a path of 5000 bytes", "?path=" + strings.Repeat("a/", 2500) + "b", octets, strings.NewReader("x"), 400},
		{"an unknown user", "?path=x&username=nobody-here", octets, strings.NewReader("x"), 401},
		{"no content type", "?path=x", nil, strings.NewReader("x"), 400},
		{"another content type", "?path=x", map[string]string{"Content-Type": "text/plain"}, strings.NewReader("x"), 400},
		{"a form without a boundary", "", map[string]string{"Content-Type": "multipart/form-data"}, strings.NewReader("x"), 400},
		{"one path twice", "", map[string]string{"Content-Type": twice}, twiceBody, 400},
		{"a part without a name", "", map[string]string{"Content-Type": nameless}, namelessBody, 400},
		{"a form that is cut", "", map[string]string{"Content-Type": cut}, cutBody, 400},
		{"no form at all", "", map[string]string{"Content-Type": "multipart/form-data; boundary=x"}, zerosUpTo(1 << 20), 400},
		{"what is not gzip", "?path=x", map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, strings.NewReader("not gzip at all"), 400},
		{"an unknown encoding", "?path=x", map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "br"}, strings.NewReader("x"), 400},
		{"a full device", "?path=/dev/full", octets, strings.NewReader("x"), 400},
		{"metadata that is not ASCII", "?path=x", map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-K": "\u00fc"}, strings.NewReader("x"), 400},
		{"much metadata", "?path=x", map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-K": strings.Repeat("v", 4097)}, strings.NewReader("x"), 400},
	} {
		status, _, text := do(t, c, http.MethodPost, "/files"+tc.query, tc.headers, tc.body)
		var e struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil || status != tc.status || e.Code != status || e.Message == "" {
			t.Errorf("%s: %d %s, want %d", tc.what, status, text, tc.status)
		}
	}
}

func zerosUpTo(n int64) io.Reader { return io.LimitReader(zeros{}, n) }

func TestAFullFileSystemIs507(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	small := filepath.Join(g.home, "small")
	if err := os.Mkdir(small, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=64k"); err != nil {
		t.Skip("cannot mount: ", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	status, _, text := do(t, g.connect(t), http.MethodPost, "/files?path=small/x", map[string]string{"Content-Type": "application/octet-stream"}, zerosUpTo(1<<20))
	if status != http.StatusInsufficientStorage {
		t.Errorf("%d %s", status, text)
	}
}

func TestMetadataIsReplacedAsASet(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	if err := unix.Setxattr(g.home, "user.test", []byte("x"), 0); errors.Is(err, unix.ENOTSUP) {
		t.Skip("no extended attributes here")
	}
	for _, tc := range []struct {
		headers map[string]string
		want    map[string]any
	}{
		{map[string]string{"X-Metadata-Author": "me", "X-Metadata-Run-Id": "7 of 9"}, map[string]any{"author": "me", "run-id": "7 of 9"}},
		{map[string]string{"X-Metadata-Author": "you"}, map[string]any{"author": "you"}},
		{nil, nil},
	} {
		headers := map[string]string{"Content-Type": "application/octet-stream"}
		maps.Copy(headers, tc.headers)
		if status, _, text := do(t, c, http.MethodPost, "/files?path=m", headers, strings.NewReader("x")); status != http.StatusOK {
			t.Fatalf("%d %s", status, text)
		}
		answer, _ := call(t, c, "filesystem.Filesystem/Stat", body(t, "path", "m"))
		entry, _ := answer["entry"].(map[string]any)
		got, _ := entry["metadata"].(map[string]any)
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("metadata after %v (-want +got):\n%s", tc.headers, diff)
		}
	}
}

func TestFilesAreSentAsTheClientTakesThem(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	text := strings.Repeat("hello ", 1000)
	write(t, filepath.Join(g.home, "file"), text)
	write(t, filepath.Join(g.home, "empty"), "")
	get := func(query string, headers map[string]string) (int, http.Header, string) {
		return do(t, c, http.MethodGet, "/files?"+query, headers, nil)
	}
	for encoding, want := range map[string]string{
		"": "", "gzip, deflate": "", "gzip": "gzip", "gzip;q=1, identity;q=0": "gzip", "br, *;q=0": "406", "identity;q=0": "406", "gzip;q=0": "", "*": "",
	} {
		headers := map[string]string{}
		if encoding != "" {
			headers["Accept-Encoding"] = encoding
		}
		status, h, content := get("path=file", headers)
		if want == "406" {
			if status != http.StatusNotAcceptable {
				t.Errorf("%q: %d", encoding, status)
			}
			continue
		}
		if h.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(strings.NewReader(content))
			if err != nil {
				t.Fatal(err)
			}
			plain, _ := io.ReadAll(z)
			content = string(plain)
		}
		if status != http.StatusOK || h.Get("Content-Encoding") != want || content != text || h.Get("Vary") != "Accept-Encoding" {
			t.Errorf("%q: %d, %v, %d bytes", encoding, status, h, len(content))
		}
	}
	if status, h, content := get("path=file", map[string]string{"Range": "bytes=6-10"}); status != http.StatusPartialContent || content != "hello" || h.Get("Content-Range") != "bytes 6-10/6000" {
		t.Errorf("a range: %d, %v, %q", status, h, content)
	}
	_, h, _ := get("path=file", nil)
	if status, _, _ := get("path=file", map[string]string{"If-Modified-Since": h.Get("Last-Modified")}); status != http.StatusNotModified {
		t.Errorf("an unchanged file: %d", status)
	}
	if status, h, _ := get("path=empty", nil); status != http.StatusOK || h.Get("Content-Length") != "0" {
		t.Errorf("an empty file: %d, %v", status, h)
	}
	for _, path := range []string{"/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"} {
		want, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		if status, _, content := get("path="+url.QueryEscape(path), nil); status != http.StatusOK || len(content) == 0 || content[:4] != string(want[:4]) {
			t.Errorf("%s: %d, %q", path, status, content)
		}
	}
	status, _, content := do(t, c, http.MethodPost, "/files?path=unzipped", map[string]string{
		"Content-Type": "application/octet-stream", "Content-Encoding": "gzip",
	}, zipped(t, text))
	if got, err := os.ReadFile(filepath.Join(g.home, "unzipped")); status != http.StatusOK || err != nil || string(got) != text {
		t.Errorf("gzip upload: %d %s, %d bytes, %v", status, content, len(got), err)
	}
}

func TestALargeFileIsStreamedInBoundedMemory(t *testing.T) { //nolint:paralleltest // it measures the heap
	g := startGuest(t, false)
	c := g.connect(t)
	const size = 100 << 20
	pr, pw := io.Pipe()
	w := multipart.NewWriter(pw)
	var peak uint64
	go func() {
		part, _ := w.CreateFormFile("file", "large")
		buf := make([]byte, 1<<20)
		for range size >> 20 {
			_, _ = part.Write(buf)
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapAlloc)
		}
		_ = w.Close()
		pw.Close()
	}()
	if status, _, text := do(t, c, http.MethodPost, "/files", map[string]string{"Content-Type": w.FormDataContentType()}, pr); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	if st, err := os.Stat(filepath.Join(g.home, "large")); err != nil || st.Size() != size {
		t.Errorf("%v, %v", st, err)
	}
	if peak > 32<<20 {
		t.Errorf("the heap grew to %d MiB", peak>>20)
	}
	var n counter
	if err := c.Download(testContext(t), "large", "", &n); err != nil || n != size {
		t.Errorf("download: %d bytes, %v", n, err)
	}
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
