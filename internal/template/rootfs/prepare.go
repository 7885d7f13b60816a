package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// The user that tool calls run as, and where its files are.
const (
	UserName = "user"
	UserID   = 1000
	UserHome = "home/user"
)

// GuestAgent is where the guest agent lies in the root image.
const GuestAgent = "usr/lib/agentzip/agentzip-guest"

// Guest says what Prepare adds to a tree.
type Guest struct {
	Agent string   // path on the host of the agent's binary
	Env   []string // set in login shells, "NAME=value": a container image's environment
}

// folders every guest needs, with their modes; all belong to root. The
// first group are mount points.
var folders = []struct {
	name string
	mode fs.FileMode
}{
	{"proc", 0o555},
	{"sys", 0o555},
	{"dev", 0o755},
	{"run", 0o755},
	{"tmp", 0o777 | fs.ModeSticky},
	{"var/tmp", 0o777 | fs.ModeSticky},
	{"var/log", 0o755},
	{"root", 0o700},
	{"home", 0o755},
	{"mnt", 0o755},
	{"etc", 0o755},
	{"usr/lib/agentzip", 0o755},
}

// Prepare makes a tree into a guest's root: mount points, the user, the agent, and
// neutral host identity (the agent sets the real one after each clone).
func Prepare(t *Tree, g Guest) error {
	for _, f := range folders {
		if err := t.Mkdir(f.name, f.mode, 0, 0); err != nil {
			return fmt.Errorf("prepare root: %w", err)
		}
	}
	if !t.Exists("bin/sh") {
		return errors.New("prepare root: no /bin/sh in the image: tool calls are shell commands, choose an image with a shell")
	}
	steps := []func() error{
		func() error { return addAgent(t, g.Agent) },
		func() error { return addUser(t) },
		func() error { return addHome(t) },
		func() error { return addSudo(t) },
		func() error { return addEnv(t, g.Env) },
		func() error { return neutral(t) },
	}
	for _, s := range steps {
		if err := s(); err != nil {
			return fmt.Errorf("prepare root: %w", err)
		}
	}
	return nil
}

func addAgent(t *Tree, path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read guest agent: %w", err)
	}
	return t.WriteFile(GuestAgent, data, 0o755, 0, 0)
}

// addUser puts user and group at the top of the account files: where an image has another
// account with uid 1000 (node, ubuntu) both names stay valid and ours wins look-ups by number.
func addUser(t *Tree) error {
	shell := "/bin/sh"
	if t.Exists("bin/bash") {
		shell = "/bin/bash"
	}
	files := []struct {
		name, line string
		mode       fs.FileMode
		needed     bool // shadow files are only completed where the image has them
	}{
		{"etc/passwd", fmt.Sprintf("%s:x:%d:%d:agent,,,:/%s:%s", UserName, UserID, UserID, UserHome, shell), 0o644, true},
		{"etc/group", fmt.Sprintf("%s:x:%d:", UserName, UserID), 0o644, true},
		{"etc/shadow", UserName + ":*:19700:0:99999:7:::", 0o640, false},
		{"etc/gshadow", UserName + ":*::", 0o640, false},
	}
	for _, f := range files {
		old, err := t.ReadFile(f.name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err != nil && !f.needed {
			continue
		}
		if hasAccount(old, UserName) {
			continue
		}
		if len(old) == 0 && f.name == "etc/passwd" {
			old = []byte("root:x:0:0:root:/root:" + shell + "\n")
		}
		if len(old) == 0 && f.name == "etc/group" {
			old = []byte("root:x:0:\n")
		}
		gid := 0
		if f.mode == 0o640 {
			gid = 42 // Debian's group shadow
		}
		if err := t.WriteFile(f.name, accountFile(old, f.line), f.mode, 0, gid); err != nil {
			return err
		}
	}
	return nil
}

func hasAccount(file []byte, name string) bool {
	return bytes.HasPrefix(file, []byte(name+":")) || bytes.Contains(file, []byte("\n"+name+":"))
}

// accountFile puts line after the first one, which is root's and which some programs expect there.
func accountFile(old []byte, line string) []byte {
	first, rest, _ := bytes.Cut(old, []byte("\n"))
	return fmt.Appendf(nil, "%s\n%s\n%s", first, line, rest)
}

func addHome(t *Tree) error {
	if err := t.Mkdir(UserHome, 0o755, UserID, UserID); err != nil {
		return err
	}
	for _, f := range []string{".bashrc", ".profile"} {
		data, err := t.ReadFile("etc/skel/" + f)
		if errors.Is(err, fs.ErrNotExist) || t.Exists(UserHome+"/"+f) {
			continue
		}
		if err != nil {
			return err
		}
		if err := t.WriteFile(UserHome+"/"+f, data, 0o644, UserID, UserID); err != nil {
			return err
		}
	}
	return nil
}

func addSudo(t *Tree) error {
	if !t.Exists("etc/sudoers") {
		return nil
	}
	return t.WriteFile("etc/sudoers.d/agentzip", []byte(UserName+" ALL=(ALL:ALL) NOPASSWD: ALL\n"), 0o440, 0, 0)
}

// addEnv makes a container image's environment that of login shells.
func addEnv(t *Tree, env []string) error {
	var b strings.Builder
	for _, e := range env {
		k, v, ok := strings.Cut(e, "=")
		if !ok || !isShellName(k) {
			continue
		}
		fmt.Fprintf(&b, "export %s='%s'\n", k, strings.ReplaceAll(v, "'", `'\''`))
	}
	if b.Len() == 0 {
		return nil
	}
	return t.WriteFile("etc/profile.d/agentzip-image.sh", []byte(b.String()), 0o644, 0, 0)
}

func isShellName(s string) bool {
	for i, c := range s {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// neutral removes what the image inherited from the host it was made on. machine-id
// is there and empty: unset, to be filled after each clone. The name server is the one
// QEMU's user network offers; a sandbox without network never asks it.
func neutral(t *Tree) error {
	files := []struct{ name, text string }{
		{"etc/hostname", "sandbox\n"},
		{"etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"},
		{"etc/machine-id", ""},
		{"etc/resolv.conf", "nameserver 10.0.2.3\n"},
	}
	for _, f := range files {
		if err := t.WriteFile(f.name, []byte(f.text), 0o644, 0, 0); err != nil {
			return err
		}
	}
	return nil
}
