// Package interpreter is the code interpreter of a template: the Python files
// that run inside the guest, and how a template gets and starts them.
//
//	server.py           E2B's HTTP protocol on port 49999, over the kernels
//	startup.py          runs in each kernel: formats for data and charts, variables of one run
//	agentzip_charts.py  what a matplotlib figure shows
//
// They need the Debian packages python3-ipykernel and python3-jupyter-client;
// python3-matplotlib and python3-pandas for charts and data.
package interpreter

import (
	"embed"
	"fmt"
	"strings"
)

//go:embed *.py
var files embed.FS

// Dir is where the files lie in the guest.
const Dir = "/usr/lib/agentzip/interpreter"

// Start and Ready are the template's commands of these names.
const (
	Start = "exec python3 " + Dir + "/server.py"
	Ready = "curl -sf --max-time 10 http://localhost:49999/health"
)

// end closes a file within Setup's script.
const end = "END_OF_INTERPRETER_FILE"

// Setup is a shell script that puts the files into a root, for rootfs.Debian.Setup.
func Setup() string {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic("interpreter: read embedded folder: " + err.Error())
	}
	var b strings.Builder
	fmt.Fprintf(&b, "mkdir -p %s\n", Dir)
	for _, e := range entries {
		content, err := files.ReadFile(e.Name())
		if err != nil {
			panic("interpreter: read embedded file: " + err.Error())
		}
		fmt.Fprintf(&b, "cat > %s/%s <<'%s'\n%s%s\n", Dir, e.Name(), end, content, end)
	}
	fmt.Fprintf(&b, "python3 -m compileall -q %s\n", Dir)
	return b.String()
}
