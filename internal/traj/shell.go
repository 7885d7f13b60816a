package traj

import (
	"encoding/base64"
	"path"
	"strconv"
	"strings"
)

// quote makes s one word of a POSIX shell.
func quote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+:@%") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

// readLines prints n numbered lines of a file from line from on, as Claude
// Code's Read does: 2,000 lines by default, each cut at 2,000 characters.
func readLines(file string, from, n int) string {
	if file == "" {
		return ""
	}
	from = max(1, from)
	if n <= 0 || n > 2000 {
		n = 2000
	}
	p := quote(target(file))
	first := strconv.Itoa(from)
	return "[ -f " + p + " ] || { echo 'File does not exist.' >&2; exit 1; }; tail -n +" + first + " -- " + p +
		" | head -n " + strconv.Itoa(n) + " | cut -c1-2000 | nl -ba -v " + first
}

// viewPath is R2E-Gym's view: a folder two levels deep, or numbered lines.
func viewPath(p string, from, n int) string {
	if p == "" {
		return ""
	}
	q := quote(target(p))
	return "if [ -d " + q + " ]; then find " + q + " -maxdepth 2 -not -path '*/.*' | sort; exit; fi; " + readLines(p, from, n)
}

// writeFile writes a whole file. Unless overwrite is set an existing file makes
// it fail, as R2E-Gym's create does.
func writeFile(file, content string, overwrite bool) string {
	if file == "" {
		return ""
	}
	p := target(file)
	guard := ""
	if !overwrite {
		guard = "[ ! -e " + quote(p) + " ] || { echo 'File already exists.' >&2; exit 1; }; "
	}
	return guard + "mkdir -p " + quote(path.Dir(p)) + " && printf %s '" + b64(content) + "' | base64 -d > " + quote(p)
}

// replaceScript replaces text in a file: argv is path, old, new (base64), and
// "all" or "one". It exits 1 with the agent tool's complaint when the old text
// is not there, or not unique.
const replaceScript = `import base64, sys
path, old, new = sys.argv[1], *(base64.b64decode(a).decode("utf-8", "surrogateescape") for a in sys.argv[2:4])
try:
    text = open(path, newline="", errors="surrogateescape").read()
except OSError as e:
    sys.exit("cannot read file: %s" % e.strerror)
count = text.count(old) if old else 0
if count == 0:
    sys.exit("String to replace not found in file.")
if count > 1 and sys.argv[4] == "one":
    sys.exit("Found %d matches of the string to replace." % count)
open(path, "w", newline="", errors="surrogateescape").write(text.replace(old, new))
print("The file", path, "has been updated.")`

func replaceText(file, old, repl string, all bool) string {
	if file == "" {
		return ""
	}
	mode := "one"
	if all {
		mode = "all"
	}
	return "python3 -c '" + replaceScript + "' " + quote(target(file)) + " '" + b64(old) + "' '" + b64(repl) + "' " + mode
}

// insertScript inserts text after a line: argv is path, line, text (base64).
const insertScript = `import base64, sys
path, line, text = sys.argv[1], int(sys.argv[2]), base64.b64decode(sys.argv[3]).decode("utf-8", "surrogateescape")
try:
    lines = open(path, newline="", errors="surrogateescape").read().split("\n")
except OSError as e:
    sys.exit("cannot read file: %s" % e.strerror)
if not 0 <= line <= len(lines):
    sys.exit("Invalid line %d." % line)
lines[line:line] = text.split("\n")
open(path, "w", newline="", errors="surrogateescape").write("\n".join(lines))
print("The file", path, "has been edited.")`

func insertText(file string, line int, text string) string {
	if file == "" {
		return ""
	}
	return "python3 -c '" + insertScript + "' " + quote(target(file)) + " " + strconv.Itoa(line) + " '" + b64(text) + "'"
}

// globCommand lists what a pattern with ** matches, at most 100 as Claude
// Code's Glob does. compgen expands the pattern without running it.
func globCommand(dir, pattern string) string {
	if pattern == "" {
		return ""
	}
	if strings.HasPrefix(pattern, "/") {
		dir = "/"
	}
	return "shopt -s globstar; cd " + quote(target(dir)) + " && compgen -G " + quote(pattern) + " | sort | head -n 100"
}
