package traj

import (
	"encoding/json"
	"path"
	"strconv"
	"strings"
	"time"
)

// rawStep is one recorded call, the union of the fields of all known sets.
type rawStep struct {
	N       int             `json:"n"`
	Tool    string          `json:"tool"`
	Kind    string          `json:"kind"` // fork16: cmd, write, write+run, ...
	Cmd     string          `json:"cmd"`  // fork16
	Path    string          `json:"path"` // fork16
	Sub     int             `json:"sub"`  // issued by a sub-agent
	ThinkS  *float64        `json:"think_s"`
	ExecS   *float64        `json:"exec_s"`
	StreamS *float64        `json:"stream_s"` // Claude Code: the model wrote the call so long
	ArgsRaw json.RawMessage `json:"args"`

	args args
}

// args are a call's arguments. Sources give numbers and booleans as JSON or as
// text ("[135, 150]", "False"), so the getters take both.
type args map[string]json.RawMessage

func (a args) str(name string) string {
	var s string
	if raw, ok := a[name]; ok && json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

func (a args) num(name string) int {
	var f float64
	raw, ok := a[name]
	if !ok {
		return 0
	}
	if json.Unmarshal(raw, &f) != nil {
		n, err := strconv.Atoi(strings.TrimSpace(a.str(name)))
		if err != nil {
			return 0
		}
		return n
	}
	return int(max(-1e9, min(f, 1e9)))
}

func (a args) flag(name string) bool {
	var b bool
	raw, ok := a[name]
	if ok && json.Unmarshal(raw, &b) != nil {
		return strings.EqualFold(a.str(name), "true")
	}
	return b
}

// pair reads [a, b], as JSON or as text of it.
func (a args) pair(name string) (from, to int, ok bool) {
	raw, present := a[name]
	if !present {
		return 0, 0, false
	}
	var p []int
	if json.Unmarshal(raw, &p) != nil && json.Unmarshal([]byte(a.str(name)), &p) != nil || len(p) != 2 {
		return 0, 0, false
	}
	return p[0], p[1], true
}

// outcome says what became of a recorded call.
type outcome uint8

const (
	mapped outcome = iota
	noSandbox
	unmappable
)

// maxShell bounds a command: the kernel takes at most 128 KiB in one argument.
const maxShell = 100 << 10

// networkTimeout bounds commands that need a network there is not: they fail
// fast as a rule, and what retries for minutes would only stretch the replay.
const networkTimeout = 30 * time.Second

// mapStep turns a recorded call into a step without its times.
func mapStep(r rawStep) (Step, outcome) {
	s, out := mapTool(r)
	if out != mapped {
		return s, out
	}
	s.Shell = strings.TrimSpace(s.Shell)
	if s.Shell == "" || len(s.Shell) > maxShell || strings.ContainsRune(s.Shell, 0) {
		return Step{}, unmappable
	}
	if s.Kind == "" {
		s.Kind = classify(s.Shell)
	}
	if s.Kind == Net && (s.Timeout == 0 || s.Timeout > networkTimeout) {
		s.Timeout = networkTimeout
	}
	return s, mapped
}

func mapTool(r rawStep) (Step, outcome) {
	a := r.args
	s := Step{Tool: r.Tool}
	switch r.Tool {
	case "Bash":
		s.Shell = a.str("command")
		s.Timeout = time.Duration(max(0, a.num("timeout"))) * time.Millisecond
	case "bash", "execute_bash":
		s.Shell = a.str("cmd")
	case "Read":
		s.Kind, s.Shell = Read, readLines(a.str("file_path"), a.num("offset"), a.num("limit"))
	case "Edit":
		s.Kind, s.Shell = Edit, replaceText(a.str("file_path"), a.str("old_string"), a.str("new_string"), a.flag("replace_all"))
	case "Write":
		s.Kind, s.Shell = Write, writeFile(a.str("file_path"), a.str("content"), true)
	case "Grep":
		s.Kind, s.Shell = Search, grepCommand(a)
	case "Glob":
		s.Kind, s.Shell = List, globCommand(a.str("path"), a.str("pattern"))
	case "search":
		s.Kind, s.Shell = Search, "grep -rnI --exclude-dir=.git -e "+quote(a.str("search_term"))+" -- "+quote(target(a.str("path")))+" | head -n 200"
		if a.str("search_term") == "" {
			return s, unmappable
		}
	case "file_editor":
		s.Tool += " " + a.str("command")
		return mapFileEditor(s, a)
	case "":
		return mapFork(r)
	case "none", "finish", "TodoWrite", "Task", "TaskOutput", "TaskCreate", "TaskUpdate", "WebFetch", "WebSearch",
		"KillShell", "BashOutput", "ExitPlanMode", "AskUserQuestion", "Skill":
		return s, noSandbox
	default:
		// Names that the recorded agent made up ("str_replace" as a tool) did
		// nothing in the recording either.
		return s, unmappable
	}
	return s, mapped
}

// mapFileEditor maps R2E-Gym's file_editor.
func mapFileEditor(s Step, a args) (Step, outcome) {
	p := a.str("path")
	switch a.str("command") {
	case "view":
		from, to, ok := a.pair("view_range")
		n := 0
		switch {
		case !ok:
			from = 0
		case to > 0:
			n = max(1, to-from+1)
		}
		s.Kind, s.Shell = Read, viewPath(p, from, n)
	case "create":
		s.Kind, s.Shell = Write, writeFile(p, a.str("file_text"), false)
	case "str_replace":
		s.Kind, s.Shell = Edit, replaceText(p, a.str("old_str"), a.str("new_str"), false)
	case "insert":
		s.Kind, s.Shell = Edit, insertText(p, a.num("insert_line"), a.str("new_str"))
	default:
		return s, unmappable
	}
	return s, mapped
}

// mapFork maps a step of agentseism-fork16, whose written files lost their
// content: a comment stands in for it.
func mapFork(r rawStep) (Step, outcome) {
	s := Step{Tool: r.Kind, Shell: r.Cmd}
	switch r.Kind {
	case "cmd":
	case "write", "write+run":
		if r.Path == "" {
			return s, unmappable
		}
		s.StandIn, s.Kind = true, Write
		s.Shell = strings.TrimRight(writeFile(r.Path, "# content not recorded\n", true)+"\n"+r.Cmd, "\n")
	default:
		return s, unmappable
	}
	return s, mapped
}

// target gives a search path its default and an absolute form.
func target(p string) string {
	switch {
	case p == "":
		return WorkTree
	case strings.HasPrefix(p, "/"):
		return path.Clean(p)
	}
	return path.Join(WorkTree, p)
}

// grepTypes are the file types of ripgrep that the recordings use.
var grepTypes = map[string]string{
	"py": "*.py", "python": "*.py", "js": "*.js", "ts": "*.ts", "md": "*.md", "rst": "*.rst",
	"json": "*.json", "yaml": "*.y*ml", "toml": "*.toml", "c": "*.[ch]", "rust": "*.rs", "go": "*.go", "sh": "*.sh", "html": "*.html",
}

// grepCommand maps Claude Code's Grep (ripgrep) to GNU grep with Perl regular
// expressions, the nearest dialect.
func grepCommand(a args) string {
	pattern := a.str("pattern")
	if pattern == "" {
		return ""
	}
	b := strings.Builder{}
	b.WriteString("grep -rIP --exclude-dir=.git")
	mode := a.str("output_mode")
	switch mode {
	case "content":
		if a.flag("-n") {
			b.WriteString(" -n")
		}
		for _, o := range []string{"-A", "-B", "-C"} {
			if n := a.num(o); n > 0 {
				b.WriteString(" " + o + " " + strconv.Itoa(min(n, 1000)))
			}
		}
	case "count":
		b.WriteString(" -c")
	default:
		b.WriteString(" -l")
	}
	if a.flag("-i") {
		b.WriteString(" -i")
	}
	if t := grepTypes[a.str("type")]; t != "" {
		b.WriteString(" --include=" + quote(t))
	}
	if g := a.str("glob"); g != "" {
		// grep matches base names only.
		b.WriteString(" --include=" + quote(path.Base(g)))
	}
	b.WriteString(" -e " + quote(pattern) + " -- " + quote(target(a.str("path"))))
	if n := a.num("head_limit"); n > 0 {
		b.WriteString(" | head -n " + strconv.Itoa(n))
	}
	return b.String()
}

// classify names the kind of a shell command by its first word that counts.
func classify(shell string) Kind {
	kind := Other
	for line := range strings.SplitSeq(shell, "\n") {
		for _, part := range splitCommands(line) {
			k := classifyOne(part)
			if k == Net {
				return Net
			}
			if kind == Other {
				kind = k
			}
		}
		if kind != Other {
			return kind
		}
	}
	return kind
}

func splitCommands(line string) []string {
	r := strings.NewReplacer("&&", "\x00", "||", "\x00", ";", "\x00", "|", "\x00")
	return strings.Split(r.Replace(line), "\x00")
}

// classifyOne looks at one simple command.
func classifyOne(cmd string) Kind {
	f := strings.Fields(cmd)
	for len(f) > 0 && (strings.Contains(f[0], "=") || f[0] == "sudo" || f[0] == "time" || f[0] == "env") {
		f = f[1:]
	}
	if len(f) == 0 {
		return Other
	}
	rest := strings.Join(f[1:], " ")
	switch word := path.Base(f[0]); word {
	case "ls", "find", "tree", "fd", "du", "wc":
		return List
	case "grep", "rg", "egrep", "ag":
		return Search
	case "cat", "tee":
		if strings.Contains(rest, ">") || strings.Contains(rest, "<<") {
			return Write
		}
		return Read
	case "nl", "head", "tail", "less", "awk":
		return Read
	case "sed":
		if strings.Contains(" "+rest, " -i") {
			return Edit
		}
		return Read
	case "git":
		if len(f) > 1 && (f[1] == "clone" || f[1] == "fetch" || f[1] == "pull" || f[1] == "push") {
			return Net
		}
		return Git
	case "pytest", "tox", "nosetests", "runtests.py":
		return Test
	case "curl", "wget", "pip", "pip3", "apt", "apt-get", "conda", "npm", "uv", "gh":
		return Net
	case "python", "python3":
		switch {
		case strings.HasPrefix(rest, "-m pip "):
			return Net
		case strings.HasPrefix(rest, "-m pytest"), strings.HasPrefix(rest, "-m unittest"), strings.HasPrefix(rest, "-m tornado.testing"), strings.Contains(rest, "runtests"):
			return Test
		}
		return Python
	}
	return Other
}
