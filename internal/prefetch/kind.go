package prefetch

import (
	"path"
	"slices"
	"strings"
)

// maxKindPrograms bounds how many programs name a kind of call: with more, each command
// would be a kind of its own, and nothing would be learned from others.
const maxKindPrograms = 2

// light are programs whose pages hardly differ from those of the shell that starts them. They
// name a call only if nothing else does.
var light = map[string]bool{
	"": true, ":": true, "[": true, "cat": true, "cd": true, "cut": true, "echo": true, "exit": true, "export": true,
	"false": true, "head": true, "ls": true, "mkdir": true, "nl": true, "printf": true, "pwd": true, "rm": true,
	"set": true, "sort": true, "tail": true, "test": true, "tr": true, "true": true, "uniq": true, "wc": true, "xargs": true,
}

// KindOf names the kind of a shell command by the programs that it runs: "python3 -m pytest",
// "git", "grep+sed". It looks at words, not at syntax: a wrong name costs a worse guess. The
// shape of here-documents and quoted scripts does not matter; their text is left out.
func KindOf(command string) string {
	var heavy, other []string
	last := ""
	for _, part := range commands(command) {
		name := program(part)
		switch {
		case name == "":
		case name == "cd" || name == "set" || name == "export": // before what the command is about
			last = name
		case light[name]:
			other = append(other, name)
		case !slices.Contains(heavy, name):
			heavy = append(heavy, name)
		}
	}
	switch {
	case len(heavy) > 0:
	case len(other) > 0:
		heavy = other[:1]
	default:
		return last
	}
	heavy = heavy[:min(len(heavy), maxKindPrograms)]
	slices.Sort(heavy)
	return strings.Join(heavy, "+")
}

// commands splits a command line at what separates commands, outside of quotes, up to the
// first here-document.
func commands(s string) (parts []string) {
	if i := strings.Index(s, "<<"); i >= 0 {
		s = s[:i]
	}
	start, quote := 0, byte(0)
	for i := range len(s) {
		c := s[i]
		switch {
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '\'' || c == '"':
			quote = c
		case c == '&' && i > 0 && s[i-1] == '>': // 2>&1
		case strings.IndexByte("|&;\n()", c) >= 0:
			parts = append(parts, s[start:i])
			start = i + 1
		}
	}
	return append(parts, s[start:])
}

// program names what a simple command runs. Of interpreters the module belongs to the name.
func program(s string) string {
	words := strings.Fields(s)
	for len(words) > 0 && (strings.Contains(words[0], "=") || words[0] == "sudo" || words[0] == "env" || words[0] == "time" || words[0] == "exec") {
		words = words[1:]
	}
	if len(words) == 0 || strings.ContainsAny(words[0], "<>#$`'\"") {
		return ""
	}
	name := path.Base(words[0])
	for i := 1; i+1 < len(words); i++ {
		if words[i] == "-m" && strings.HasPrefix(name, "python") {
			return name + " -m " + words[i+1]
		}
	}
	return name
}
