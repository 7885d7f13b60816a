// Package scripts_test holds the set-up script to its promise: each thing that
// can be missing ends in one line that names it and says how to get it.
package scripts_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A stage is a copy of setup.sh in a folder of its own, with programs of ours
// first in PATH: nothing of the machine is changed.
type stage struct {
	t    *testing.T
	dir  string
	bin  string
	env  []string
	head string // run before the script, in the same shell; "" is nothing
}

// newStage returns a stage on which `setup.sh all` succeeds.
func newStage(t *testing.T) *stage {
	t.Helper()
	dir := t.TempDir()
	s := &stage{t: t, dir: dir, bin: filepath.Join(dir, "fakebin")}
	script, err := os.ReadFile("setup.sh")
	if err != nil {
		t.Fatal(err)
	}
	s.write("scripts/setup.sh", string(script))
	s.fake("id", `echo 0`)
	s.fake("uname", `[ "$1" = -s ] && echo Linux || echo x86_64`)
	s.fake("df", `echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "/dev/x 99999999 1 88888888 1% /"`)
	s.fake("go", `case "$*" in
"env GOVERSION") echo go1.26.0 ;;
"env GOPROXY") echo https://proxy.invalid ;;
build*) while [ "$1" != -o ]; do shift; done; echo binary >"$2" ;;
esac`)
	s.fake("make", `echo library >build/out/agentzip-shim.so`)
	s.fake("apt-get", `exit 0`)
	for _, tool := range []string{"gcc", "git", "qemu-system-x86_64", "mmdebstrap", "mke2fs"} {
		s.fake(tool, `exit 0`)
	}
	s.write("bin/agentzip", "#!/bin/sh\nexit 0\n")
	// The packages whose proof is a file of this machine are not what is tested.
	s.edit("/usr/include/stdio.h", "/")
	s.edit("/usr/include/zstd.h", "/")
	s.edit("/usr/share/keyrings/debian-archive-keyring.gpg", "/")
	s.edit("/etc/ssl/certs/ca-certificates.crt", "/")
	// A fake compiler makes no agentzip that could build a template.
	s.edit("bin/agentzip setup", "true setup")
	return s
}

func (s *stage) write(name, text string) {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) fake(name, body string) { s.write("fakebin/"+name, "#!/bin/sh\n"+body+"\n") }

// without takes a program away, from the system's folders too.
func (s *stage) without(name string) {
	s.t.Helper()
	if err := os.Remove(filepath.Join(s.bin, name)); err != nil {
		s.t.Fatal(err)
	}
	s.edit(":"+name, ":no-such-"+name)
}

// edit changes the copy of the script.
func (s *stage) edit(from, to string) {
	s.t.Helper()
	path := filepath.Join(s.dir, "scripts/setup.sh")
	text, err := os.ReadFile(path)
	if err != nil {
		s.t.Fatal(err)
	}
	if !strings.Contains(string(text), from) {
		s.t.Fatalf("setup.sh no longer has %q: this test needs a look", from)
	}
	s.write("scripts/setup.sh", strings.ReplaceAll(string(text), from, to))
}

// run returns what the script says, split by output, and its exit code.
func (s *stage) run(what string) (stdout, stderr string, code int) {
	s.t.Helper()
	shell := s.head + "\nexec bash scripts/setup.sh " + what
	name, args := "bash", []string{"-c", shell}
	if s.head != "" {
		name, args = "unshare", []string{"--mount", "--propagation", "private", "bash", "-c", shell}
	}
	cmd := exec.CommandContext(s.t.Context(), name, args...)
	cmd.Dir = s.dir
	cmd.Env = append([]string{"PATH=" + s.bin + ":/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + s.dir, "AGENTZIP_STATE_DIR=" + s.dir + "/state"}, s.env...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // the code below says it
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func TestWhatIsMissingIsNamedInOneLineWithTheFix(t *testing.T) {
	tests := []struct {
		name string
		what string // the script's argument
		hurt func(*stage)
		want []string // parts of the line
	}{
		{"not root", "all", func(s *stage) { s.fake("id", "echo 1000") }, []string{"not root (uid 1000)", "sudo"}},
		{"another processor", "build", func(s *stage) { s.fake("uname", `[ "$1" = -s ] && echo Linux || echo aarch64`) }, []string{"aarch64", "64-bit x86 Linux only"}},
		{"no Go", "build", func(s *stage) { s.edit("command -v go ", "command -v no-such-go ") }, []string{"Go is missing", "go.dev/dl", "PATH"}},
		{"an old Go", "build", func(s *stage) { s.fake("go", "echo go1.19.8") }, []string{"Go is go1.19.8", "Install Go 1.26 or newer"}},
		{
			"no disk", "all",
			func(s *stage) {
				s.fake("df", `echo H; echo "/dev/x 9 9 2048000 9% /"`)
			},
			[]string{"only 2000 MiB of disk are free", "5859 MiB are needed", "AGENTZIP_STATE_DIR"},
		},
		{
			"a package is missing and there is no root to install it", "build",
			func(s *stage) { s.without("gcc"); s.fake("id", "echo 1000") },
			[]string{"missing Debian packages: gcc", "apt-get install gcc"},
		},
		{
			"the mirror does not answer", "all",
			func(s *stage) {
				s.without("mmdebstrap")
				s.fake("apt-get", `echo "Reading package lists..."
echo "E: Failed to fetch http://mirror.invalid/mmdebstrap.deb  Could not connect" >&2
exit 100`)
			},
			[]string{"cannot install mmdebstrap", "Could not connect", "Check that apt reaches a Debian mirror", "build/log/apt.log"},
		},
		{
			"apt says yes and brings nothing", "all",
			func(s *stage) { s.without("mke2fs") },
			[]string{"apt installed e2fsprogs but its files are not where they should be"},
		},
		{
			"the module proxy does not answer", "build",
			func(s *stage) {
				s.fake("go", `case "$*" in
"env GOVERSION") echo go1.26.0 ;;
"env GOPROXY") echo https://proxy.invalid ;;
*) echo "go: example.com/x@v1: dial tcp: no such host" >&2; exit 1 ;;
esac`)
			},
			[]string{"cannot download the Go modules", "no such host", "GOPROXY (now https://proxy.invalid)"},
		},
		{"an unknown stage", "frobnicate", func(*stage) {}, []string{"unknown stage 'frobnicate'"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t)
			tt.hurt(s)
			oneLine(t, s, tt.what, tt.want)
		})
	}
}

func TestTooLittleMemoryIsNamed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to put another /proc/meminfo before the script")
	}
	s := newStage(t)
	s.write("meminfo", "MemTotal: 2000000 kB\nMemAvailable: 1024000 kB\n")
	s.head = "mount --bind meminfo /proc/meminfo"
	oneLine(t, s, "all", []string{"only 1000 MiB of memory are available", "3906 MiB are needed", "more memory"})
}

func TestACompilerErrorIsShownBeforeTheLine(t *testing.T) {
	s := newStage(t)
	s.fake("go", `case "$*" in
"env GOVERSION") echo go1.26.0 ;;
build*) echo "x.go:1: syntax error"; exit 1 ;;
esac`)
	_, stderr, code := s.run("build")
	if code != 1 || !strings.Contains(stderr, "x.go:1: syntax error") || !strings.Contains(stderr, "setup: building agentzip failed") {
		t.Errorf("exit code %d, stderr:\n%s", code, stderr)
	}
}

func TestASecondRunChangesNothing(t *testing.T) {
	s := newStage(t)
	for range 2 {
		if stdout, stderr, code := s.run("all"); code != 0 || stdout+stderr != "" {
			t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
		}
	}
	before, err := os.Stat(filepath.Join(s.dir, "bin/agentzip-guest"))
	if err != nil {
		t.Fatal(err)
	}
	s.run("all")
	after, err := os.Stat(filepath.Join(s.dir, "bin/agentzip-guest"))
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("an equal binary was replaced")
	}
}

func TestTwoAtOnceWaitForEachOther(t *testing.T) {
	s := newStage(t)
	// A build that notices a second one beside it.
	s.fake("go", `case "$*" in
"env GOVERSION") echo go1.26.0 ;;
build*)
  mkdir busy || { echo "two builds at once"; exit 1; }
  sleep 0.2; rmdir busy
  while [ "$1" != -o ]; do shift; done; echo binary >"$2" ;;
esac`)
	type result struct {
		out  string
		code int
	}
	results := make(chan result, 2)
	for range 2 {
		go func() {
			stdout, stderr, code := s.run("build")
			results <- result{stdout + stderr, code}
		}()
	}
	waited := false
	for range 2 {
		r := <-results
		if r.code != 0 {
			t.Errorf("exit code %d:\n%s", r.code, r.out)
		}
		waited = waited || strings.Contains(r.out, "another make is setting up here; waiting for it")
	}
	if !waited {
		t.Error("neither of the two said that it waits")
	}
}

// oneLine runs the script and wants a failure of one line with all parts.
func oneLine(t *testing.T, s *stage, what string, want []string) {
	t.Helper()
	_, stderr, code := s.run(what)
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if lines := strings.Count(stderr, "\n"); lines != 1 || !strings.HasPrefix(stderr, "setup: ") {
		t.Errorf("want one line from setup, got:\n%s", stderr)
	}
	for _, part := range want {
		if !strings.Contains(stderr, part) {
			t.Errorf("%q is not in: %s", part, stderr)
		}
	}
}
