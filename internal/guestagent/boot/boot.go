// Package boot takes a guest from the kernel's hand-over to a running agent.
//
//	kernel -> Init (in the initramfs)   modules, root image (DAX), disk, overlay, switch root
//	       -> Supervise (PID 1)         settles the system, runs the agent, reaps, ends the guest
//	            -> agent                a child of PID 1, started again when it dies
//
// Everything runs as root in a guest and on its console: an error here is a
// sentence on the serial port and then the end of PID 1, which the kernel
// answers with a panic and (panic=-1, reboot=t) a reset that the VMM sees.
package boot

import (
	"fmt"
	"os"
	"strings"
)

// AgentPath is where the root image holds this binary. It is run from there, so
// that under DAX its text costs no guest memory.
const AgentPath = "/usr/lib/agentzip/agentzip-guest"

// searchPath is the PATH of the agent and, until a login shell says otherwise,
// of the commands it runs.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// say writes one line to the console.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "agentzip-guest: "+format+"\n", args...)
}

// kernelParameters are the agentzip.* settings of the kernel command line.
type kernelParameters struct {
	root string // block device with the root image
	disk string // block device with the writable file system
}

// parseKernelParameters reads the content of /proc/cmdline. The last value wins.
func parseKernelParameters(cmdline string) kernelParameters {
	p := kernelParameters{root: "/dev/pmem0", disk: "/dev/vda"}
	for word := range strings.FieldsSeq(cmdline) {
		name, value, found := strings.Cut(word, "=")
		if !found || value == "" {
			continue
		}
		switch name {
		case "agentzip.root":
			p.root = value
		case "agentzip.disk":
			p.disk = value
		}
	}
	return p
}
