package template

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// sayPrefix starts each line the guest agent prints on the console.
const sayPrefix = "agentzip-guest:"

// printkTime is the time the kernel puts before its lines.
var printkTime = regexp.MustCompile(`^\[ *[0-9]+\.[0-9]{6}\] ?`)

// lastWords returns why a guest died, out of its console, in one line: the agent's last
// line and the kernel's panic. The call trace behind a panic is of no use to who
// builds a template. Without either it is the last line there is, or "".
func lastWords(console []byte) string {
	var agent, panicked, last string
	for l := range bytes.Lines(console) {
		line := printkTime.ReplaceAllString(strings.TrimSpace(strings.ToValidUTF8(string(l), "?")), "")
		switch {
		case line == "":
			continue
		case strings.HasPrefix(line, sayPrefix):
			agent = line
		case strings.HasPrefix(line, "Kernel panic"):
			panicked = line
		}
		last = line
	}
	switch {
	case agent != "" && panicked != "":
		return agent + "; " + panicked
	case agent != "" || panicked != "":
		return agent + panicked
	case last != "":
		return last
	}
	return ""
}

// explainConsole returns the cause of a failed boot in one line and where the rest is. A
// template has one such file, of its last failed build.
func (b *build) explainConsole(console []byte) string {
	cause := lastWords(console)
	if cause == "" { // a kernel that finds too little memory does not get far enough to say so
		return fmt.Sprintf("it said nothing; it had %v of memory", b.spec.Hardware.Memory)
	}
	dir := b.store.cache("console")
	path := filepath.Join(dir, b.spec.Name+".log")
	if os.MkdirAll(dir, 0o755) != nil || os.WriteFile(path, console, 0o600) != nil {
		return cause // a full disk must not hide what went wrong first
	}
	return fmt.Sprintf("%s (console: %s)", cause, path)
}
