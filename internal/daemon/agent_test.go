package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/template"
)

// interpreterTemplate is built by `agentzip template build`; without it its test is skipped.
const interpreterTemplate = "code-interpreter-v1"

// toPort is a client of an HTTP server in the guest.
func toPort(t *testing.T, s *sandbox.Sandbox, port int) *http.Client {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return s.Dial(ctx, port) }}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func exchange(t *testing.T, c *http.Client, method, path, kind, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, string(text)
}

func TestAGuestServesFilesPortsAndItsOwnPrograms(t *testing.T) { //nolint:paralleltest // VMs
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // of a test
	s, err := d.Clone(t.Context(), CloneOptions{Template: vmTemplate, Cohort: c, Settings: &guestlink.Settings{
		SandboxID: new("sb"), AccessToken: new("secret"), Envs: map[string]string{"COLOUR": "red"}, DefaultWorkdir: new("/home/user"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close() //nolint:errcheck // of a test
	if out := first(sh(t, s, "user", `echo "$E2B_SANDBOX_ID $COLOUR $PWD"; cat /run/e2b/.E2B_SANDBOX_ID`)); out != "sb red /home/user\nsb" {
		t.Errorf("settings: %q", out)
	}
	const inside = `python3 -c '
import urllib.request
print(urllib.request.urlopen(urllib.request.Request("http://localhost:49983/envs", headers={"X-Access-Token": "secret"})).read().decode())'`
	if out := first(sh(t, s, "user", inside)); strings.TrimSpace(out) != `{"COLOUR":"red"}` {
		t.Errorf("/envs inside: %q", out)
	}
	agent := &http.Client{Transport: s.Agent()}
	content := strings.Repeat("0123456789abcdef", 1<<16)
	if status, text := exchange(t, agent, http.MethodPost, "/files?path=/srv/new/file&username=user", "application/octet-stream", content); status != http.StatusOK {
		t.Fatalf("upload where only root may: %d %s", status, text)
	}
	status, text := exchange(t, agent, http.MethodPost, "/filesystem.Filesystem/Stat", "application/json", `{"path":"/srv/new/file"}`)
	var stat struct{ Entry struct{ Size, Owner string } }
	if err := json.Unmarshal([]byte(text), &stat); err != nil || status != http.StatusOK || stat.Entry.Size != "1048576" || stat.Entry.Owner != "user" {
		t.Errorf("stat: %d %s", status, text)
	}
	// On the overlay, with the user's rights and extended attributes.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://guest/files?path=deep/er/note", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = http.Header{"Content-Type": {"application/octet-stream"}, "X-Metadata-Run": {"7"}}
	resp, err := agent.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	const look = `stat -c '%U %a' /home/user/deep /home/user/deep/er/note; python3 -c 'import os; print(os.getxattr("/home/user/deep/er/note", "user.e2b.run"))'`
	if out := first(sh(t, s, "user", look)); strings.TrimSpace(out) != "user 755\nuser 644\nb'7'" {
		t.Errorf("an upload to the user's home: %s, %q", resp.Status, out)
	}
	sh(t, s, "user", "ln -s /etc/hosts planted")
	if status, text := exchange(t, agent, http.MethodPost, "/files?path=planted", "application/octet-stream", "x"); status != http.StatusForbidden {
		t.Errorf("an upload through a planted link: %d %s", status, text)
	}
	// A template's folder lies in the lower layer of the overlay: it cannot be renamed in place.
	if status, text := exchange(t, agent, http.MethodPost, "/filesystem.Filesystem/Move", "application/json", `{"source":"/testbed/tornado/test","destination":"/testbed/moved"}`); status != http.StatusOK {
		t.Errorf("move a folder of the image: %d %s", status, text)
	}
	if _, exit := sh(t, s, "user", "cd /srv/new && (setsid python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &) ; for i in $(seq 100); do (echo >/dev/tcp/127.0.0.1/8123) 2>/dev/null && exit 0; sleep .2; done; exit 1"); exit.Code != 0 {
		t.Fatal("no server in the guest")
	}
	if status, text := exchange(t, toPort(t, s, 8123), http.MethodGet, "/file", "", ""); status != http.StatusOK || text != content {
		t.Errorf("a port of the guest: %d, %d bytes", status, len(text))
	}
	if _, err := s.Dial(t.Context(), 8124); !errors.Is(err, guestlink.ErrPortClosed) {
		t.Errorf("a closed port: %v", err)
	}
}

func TestClonesOfTheCodeInterpreterRunAtOnceAndAlone(t *testing.T) { //nolint:paralleltest // VMs
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: interpreterTemplate})
	if errors.Is(err, template.ErrNotFound) {
		t.Skipf("no template %s: run `agentzip template build %[1]s`", interpreterTemplate)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // of a test
	host, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	go func() {
		for {
			conn, err := host.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(conn, "host")
			conn.Close()
		}
	}()
	port := host.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // of a TCP listener
	seen := map[string]bool{}
	for _, internet := range []bool{true, false} {
		s, err := d.Clone(t.Context(), CloneOptions{Template: interpreterTemplate, Cohort: c, Settings: &guestlink.Settings{
			SandboxID: new(fmt.Sprintf("sb-%v", internet)), AccessToken: new("secret"), Internet: &internet,
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close() //nolint:errcheck // of a test
		// 10.0.2.2 is the host's loopback to QEMU's user network. Whatever root does, without a cable nobody answers.
		const reach = `sudo ip link set eth0 up; sudo ip addr add 10.0.2.15/24 dev eth0 2>/dev/null; timeout 5 bash -c 'exec 3<>/dev/tcp/10.0.2.2/%d; cat <&3'`
		if out := first(sh(t, s, "user", fmt.Sprintf(reach, port))); (out == "host") != internet {
			t.Errorf("with internet %v the host answers %q", internet, out)
		}
		if !internet {
			if err := s.Configure(t.Context(), guestlink.Settings{Internet: new(true)}); err != nil {
				t.Fatal(err)
			}
			if out := first(sh(t, s, "user", fmt.Sprintf(reach, port))); out != "host" {
				t.Errorf("after it was switched on: %q", out)
			}
		}
		client := toPort(t, s, 49999)
		cell := func(what string) (int, string) {
			begin := time.Now()
			defer func() { t.Logf("%s: %v", what, time.Since(begin)) }()
			return exchange(t, client, http.MethodPost, "/execute", "application/json", `{"code":"import random, matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nrandom.random()"}`)
		}
		status, text := cell("first cell with a plot")
		cell("the same again") // what is above it is the price of being first
		if status != http.StatusOK || !strings.Contains(text, `"png": "iVBOR`) || !strings.Contains(text, `"chart": {"type": "line"`) {
			t.Fatalf("%d %.2000s", status, text)
		}
		value := text[bytes.LastIndex([]byte(text), []byte(`"text": "`)):]
		if seen[value] {
			t.Errorf("two clones drew the same random number: %s", value)
		}
		seen[value] = true
	}
}
