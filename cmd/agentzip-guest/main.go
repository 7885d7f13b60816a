// Command agentzip-guest is everything AgentZip runs inside a guest: the
// initramfs's /init, PID 1 and the agent. One static binary, three modes.
package main

import (
	"fmt"
	"os"
	"runtime/debug"

	"github.com/agentzip/agentzip/internal/guestagent"
	"github.com/agentzip/agentzip/internal/guestagent/boot"
)

// version is set by the linker.
var version = ""

func main() {
	mode := ""
	switch {
	case os.Args[0] == "/init":
		mode = "init"
	case len(os.Args) == 2:
		mode = os.Args[1]
	}
	var err error
	switch mode {
	case "init":
		err = boot.Init()
	case "supervise":
		err = boot.Supervise()
	case "agent":
		err = guestagent.Run(buildVersion())
	case "version":
		fmt.Println(buildVersion())
	default:
		fmt.Fprintln(os.Stderr, "usage: agentzip-guest init|supervise|agent|version (run by the kernel and by itself, inside a guest)")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentzip-guest: %s failed: %v\n", mode, err)
		os.Exit(1)
	}
}

func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
