package traj

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// run maps a call, runs its command in bash with the work tree replaced by a
// temporary folder, and returns stdout, exit code and the folder.
func runTool(t *testing.T, tool, argsJSON string, files map[string]string) (string, int, string) {
	t.Helper()
	bash := needBash(t)
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := rawStep{Tool: tool}
	if err := json.Unmarshal([]byte(argsJSON), &r.args); err != nil {
		t.Fatal(err)
	}
	s, out := mapStep(r)
	if out != mapped {
		t.Fatalf("%s %s: not mapped", tool, argsJSON)
	}
	cmd := exec.CommandContext(t.Context(), bash, "-c", strings.ReplaceAll(s.Shell, WorkTree, dir))
	cmd.Dir = dir
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	err := cmd.Run()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(stdout.String(), dir, WorkTree), cmd.ProcessState.ExitCode(), dir
}

func TestMappedToolsDoWhatTheToolDid(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3")
	}
	text := "one\ntwo it's\nthree\n"
	for _, c := range []struct {
		name, tool, args string
		exit             int
		out              string // expected in stdout
		file             string // expected content of a.py afterwards
	}{
		{"Read prints numbered lines from an offset", "Read", `{"file_path":"/testbed/a.py","offset":2,"limit":1}`, 0, "     2\ttwo it's\n", text},
		{"Read of an absent file fails", "Read", `{"file_path":"/testbed/b.py"}`, 1, "", text},
		{"Edit replaces a unique text", "Edit", `{"file_path":"/testbed/a.py","old_string":"two it's","new_string":"2\n$x \"q\""}`, 0, "updated", "one\n2\n$x \"q\"\nthree\n"},
		{"Edit of an absent text exits 1 and changes nothing", "Edit", `{"file_path":"/testbed/a.py","old_string":"four","new_string":"4"}`, 1, "", text},
		{"Edit of a text that occurs twice exits 1", "Edit", `{"file_path":"/testbed/a.py","old_string":"e\n","new_string":"E\n"}`, 1, "", text},
		{"Edit with replace_all replaces all", "Edit", `{"file_path":"/testbed/a.py","old_string":"e\n","new_string":"E\n","replace_all":true}`, 0, "updated", "onE\ntwo it's\nthreE\n"},
		{"Write replaces a file", "Write", `{"file_path":"/testbed/a.py","content":"é\n"}`, 0, "", "é\n"},
		{"Grep lists files by default", "Grep", `{"pattern":"two\\s+it"}`, 0, "/testbed/a.py\n", text},
		{"Grep shows content", "Grep", `{"pattern":"TWO","-i":true,"-n":true,"output_mode":"content","glob":"**/*.py"}`, 0, "/testbed/a.py:2:two it's\n", text},
		{"Grep without a match exits 1", "Grep", `{"pattern":"absent","path":"a.py"}`, 1, "", text},
		{"Glob matches with two stars", "Glob", `{"pattern":"**/*.py"}`, 0, "a.py\n", text},
		{"search finds a text with a quote", "search", `{"search_term":"it's","path":"/testbed"}`, 0, "/testbed/a.py:2:two it's\n", text},
		{"view takes its range as text", "file_editor", `{"command":"view","path":"/testbed/a.py","view_range":"[1, 2]"}`, 0, "     1\tone\n     2\ttwo it's\n", text},
		{"view of a folder lists it", "file_editor", `{"command":"view","path":"/testbed"}`, 0, "/testbed/a.py\n", text},
		{"create refuses an existing file", "file_editor", `{"command":"create","path":"/testbed/a.py","file_text":"x"}`, 1, "", text},
		{"insert takes its line as text", "file_editor", `{"command":"insert","path":"/testbed/a.py","insert_line":"1","new_str":"1.5"}`, 0, "edited", "one\n1.5\ntwo it's\nthree\n"},
		{"str_replace replaces", "file_editor", `{"command":"str_replace","path":"/testbed/a.py","old_str":"three","new_str":"3"}`, 0, "updated", "one\ntwo it's\n3\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			out, exit, dir := runTool(t, c.tool, c.args, map[string]string{"a.py": text})
			if exit != c.exit {
				t.Errorf("exit %d, want %d", exit, c.exit)
			}
			if !strings.Contains(out, c.out) || c.out == "" && out != "" {
				t.Errorf("stdout %q, want %q", out, c.out)
			}
			got, err := os.ReadFile(filepath.Join(dir, "a.py"))
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != c.file {
				t.Errorf("a.py is %q, want %q", got, c.file)
			}
		})
	}
}

func TestCallsWithoutACommandAreNotMapped(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tool, args string
		want       outcome
	}{
		{"Bash", `{}`, unmappable},
		{"Bash", `{"command":"  "}`, unmappable},
		{"Bash", `{"command":"a\u0000b"}`, unmappable},
		{"Bash", `{"command":"` + strings.Repeat("x", maxShell+1) + `"}`, unmappable},
		{"Read", `{"file_path":["a"]}`, unmappable},
		{"Grep", `{"path":"/"}`, unmappable},
		{"file_editor", `{"command":"undo_edit","path":"/testbed/a"}`, unmappable},
		{"WebFetch", `{"url":"u"}`, noSandbox},
		{"finish", `{}`, noSandbox},
	} {
		r := rawStep{Tool: c.tool}
		if err := json.Unmarshal([]byte(c.args), &r.args); err != nil {
			t.Fatal(err)
		}
		if _, got := mapStep(r); got != c.want {
			t.Errorf("%s %.40s: got %d, want %d", c.tool, c.args, got, c.want)
		}
	}
}

func TestCommandsAreClassified(t *testing.T) {
	t.Parallel()
	for cmd, want := range map[string]Kind{
		"cd /testbed && python -m pytest -q x":   Test,
		"ls -la | head":                          List,
		"sed -n 1,2p x":                          Read,
		"sed -i s/a/b/ x":                        Edit,
		"cat <<'EOF' > x.py\npip install y\nEOF": Write,
		"FOO=1 python3 x.py":                     Python,
		"cd x && pip install -e . && pytest":     Net,
		"git clone https://example.invalid/x":    Net,
		"git diff":                               Git,
		"# comment\ngrep -rn x .":                Search,
		"rm -f x":                                Other,
	} {
		if got := classify(cmd); got != want {
			t.Errorf("%q: got %s, want %s", cmd, got, want)
		}
	}
}
