package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/internal/gateway/keys"
)

func request(t testing.TB, media string, body []byte) *http.Request {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, "http://x"+startRoute, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", media)
	return r
}

func framed(message []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
}

func TestTheKindOfACommand(t *testing.T) {
	message := func(cmd string, args ...string) []byte {
		raw, err := proto.Marshal(&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: cmd, Args: args}})
		if err != nil {
			t.Fatal(err)
		}
		return framed(raw)
	}
	const binary, text = "application/connect+proto", "application/connect+json; charset=utf-8"
	for name, c := range map[string]struct {
		media string
		body  []byte
		want  string
	}{
		"a line of the SDK":        {text, framed([]byte(`{"process":{"cmd":"/bin/bash","args":["-l","-c","pytest -q"]}}`)), "pytest"},
		"a terminal":               {text, framed([]byte(`{"process":{"cmd":"/bin/bash","args":["-i","-l"]},"pty":{}}`)), "bash"},
		"a program":                {binary, message("/usr/bin/git", "log"), "git"},
		"behind cd and variables":  {binary, message("/bin/sh", "-c", "cd /x && A=1 B=2 /usr/bin/make all"), "make"},
		"nothing but cd":           {binary, message("/bin/sh", "-c", "cd /x"), "cd"},
		"an empty line":            {binary, message("/bin/bash", "-lc", ""), "bash"},
		"bytes that are no text":   {binary, message("/bin/x"), "x"},
		"no message":               {text, nil, ""},
		"a message cut in half":    {text, framed([]byte(`{"process":{"cmd":"/bin/bash"}}`))[:20], ""},
		"a length that is a lie":   {text, []byte{0, 0xff, 0xff, 0xff, 0xff, '{'}, ""},
		"no JSON":                  {text, framed([]byte(`{{{`)), ""},
		"another type":             {"text/plain", framed([]byte(`{}`)), ""},
		"a very long name is cut":  {binary, message("/bin/" + strings.Repeat("y", 500)), strings.Repeat("y", maxKind)},
		"a very long command line": {binary, message("/bin/bash", "-c", strings.Repeat("z", peekLimit)), ""},
	} {
		r := request(t, c.media, c.body)
		if got := kindOf(r); got != c.want {
			t.Errorf("%s: kind %q, want %q", name, got, c.want)
		}
		rest, err := io.ReadAll(r.Body)
		if err != nil || !bytes.Equal(rest, c.body) {
			t.Errorf("%s: the guest is sent %d bytes, %v, want all %d", name, len(rest), err, len(c.body))
		}
	}
}

// Whatever a client sends as a start message: no panic, a short kind, and the
// guest gets every byte of it.
func FuzzKindOf(f *testing.F) {
	f.Add("application/connect+json", framed([]byte(`{"process":{"cmd":"/bin/bash","args":["-l","-c","echo"]}}`)))
	f.Add("application/connect+proto", []byte{0, 0, 0, 0, 2, 10, 0})
	f.Add("application/grpc", []byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, media string, body []byte) {
		r := request(t, media, body)
		if kind := kindOf(r); len(kind) > maxKind {
			t.Errorf("kind of %d bytes", len(kind))
		}
		rest, err := io.ReadAll(r.Body)
		if err != nil || !bytes.Equal(rest, body) {
			t.Errorf("the guest is sent other bytes: %v", err)
		}
	})
}

// Whatever the headers and the URL are: either it is routed to an id that is one
// and a port that is one, or refused with a status, or the control plane's.
func FuzzParse(f *testing.F) {
	f.Add("iabc", "80", "localhost", "/files", "path=x&signature=v1_x", true, true)
	f.Add("", "", "80-iabc-x.localhost:7070", "/", "", false, false)
	f.Add("../", "-1", "0-i.x", "/files", "signature=%zz", true, false)
	f.Fuzz(func(t *testing.T, id, port, host, path, query string, hasID, hasPort bool) {
		r, err := http.NewRequest(http.MethodGet, "http://x/", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host, r.URL.Host, r.URL.Path, r.URL.RawQuery = host, "", path, query
		if hasID {
			r.Header[headerID] = []string{id}
		}
		if hasPort {
			r.Header[headerPort] = []string{port}
		}
		target, ok, err := Parse(r, func(keys.Signature) (string, bool) { return "", false })
		switch {
		case err != nil:
			e, isRoute := errors.AsType[*RouteError](err)
			if !ok || !isRoute || e.Status < 400 || e.Status > 499 {
				t.Errorf("refused with %v", err)
			}
		case ok && (!idPattern.MatchString(target.ID) || target.Port == 0):
			t.Errorf("routed to %+v", target)
		case !ok && (hasID || hasPort):
			t.Error("a request that names a sandbox goes to the control plane")
		}
	})
}
