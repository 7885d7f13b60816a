package guestagent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHostsNamesThisHostOnce(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, hosts, want string }{
		{"none yet", "", "127.0.0.1 localhost\n127.0.1.1 clone\n"},
		{"a former name", "127.0.0.1\tlocalhost\n127.0.1.1\told old.example\n::1 ip6-localhost\n", "127.0.0.1\tlocalhost\n::1 ip6-localhost\n127.0.1.1 clone\n"},
		{"comments stay", "# mine\n127.0.0.1 localhost\n\n#127.0.1.1 no", "# mine\n127.0.0.1 localhost\n\n#127.0.1.1 no\n127.0.1.1 clone\n"},
	} {
		got := hostsWith(tc.hosts, "clone")
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
		if again := hostsWith(got, "clone"); again != got {
			t.Errorf("%s: not stable: %q", tc.name, again)
		}
	}
}

func TestAReplacedFileIsWholeAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, content := range []string{"one\n", "a longer two\n", "3\n"} {
		if err := replaceFile(path, content, 0o444); err != nil {
			t.Fatal(err)
		}
		if got, err := readLine(path); err != nil || got+"\n" != content {
			t.Errorf("got %q, %v", got, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("folder: %v, %v", entries, err)
	}
	if err := replaceFile(filepath.Join(dir, "no", "f"), "x", 0o444); err == nil {
		t.Error("a missing folder was no error")
	}
}

func TestThePortIsFoundByItsName(t *testing.T) {
	t.Parallel()
	class := t.TempDir()
	for device, name := range map[string]string{"vport1p1": "org.qemu.agent\n", "vport1p2": "agentzip.link\n"} {
		if err := os.MkdirAll(filepath.Join(class, device), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(class, device, "name"), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := findPort(class, "agentzip.link"); err != nil || got != "/dev/vport1p2" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := findPort(class, "agentzip"); err == nil {
		t.Error("a part of a name was enough")
	}
}

func TestPathsStartAtHome(t *testing.T) {
	t.Parallel()
	a := Account{Home: "/home/user"}
	for path, want := range map[string]string{
		"~": "/home/user", "~/x": "/home/user/x", "x/../y": "/home/user/y", "/a//b": "/a/b", "": "/home/user",
		"/../../etc": "/etc", "../x": "/home/x", "caf\xe9": "/home/user/caf\xe9",
	} {
		if got, err := a.resolve(path, ""); got != want || err != nil {
			t.Errorf("resolve(%q) = %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := a.resolve("", "/work"); got != "/work" || err != nil {
		t.Errorf("an empty path = %q, %v, want the work folder", got, err)
	}
	for _, path := range []string{"a\x00b", "~other", "~other/x", strings.Repeat("a/", 40000)} {
		if got, err := a.resolve(path, ""); err == nil {
			t.Errorf("resolve(%.20q) = %.20q, want an error", path, got)
		}
	}
}
