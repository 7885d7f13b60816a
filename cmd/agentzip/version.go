package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// revision is the git revision, set by the Makefile through -ldflags. Empty in
// a plain `go build`: then the revision that Go recorded counts, if any.
var revision string

// versionInfo is what `agentzip version --json` prints.
type versionInfo struct {
	Revision string `json:"revision"`
	Go       string `json:"go"`
	Agent    string `json:"agent,omitempty"` // path of the guest agent; empty: not found
	Shim     string `json:"shim,omitempty"`  // path of the VMM's shim; empty: not found
}

func newVersionCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the revision, and whether the agent and the shim lie beside this binary",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := readVersion()
			if asJSON {
				return printJSON(cmd.OutOrStdout(), v)
			}
			out := cmd.OutOrStdout()
			fmt.Fprintf(out, "agentzip %s (%s)\n", v.Revision, v.Go)
			fmt.Fprintf(out, "guest agent: %s\n", orMissing(v.Agent))
			fmt.Fprintf(out, "VMM shim:    %s\n", orMissing(v.Shim))
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func readVersion() versionInfo {
	v := versionInfo{Revision: revision, Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok && v.Revision == "" {
		v.Revision = vcsRevision(info.Settings)
	}
	if v.Revision == "" {
		v.Revision = "unknown"
	}
	v.Agent = libFile("agentzip-guest")
	v.Shim = libFile("agentzip-shim.so")
	return v
}

// vcsRevision builds "abcdef123456-dirty" from what `go build` recorded.
func vcsRevision(settings []debug.BuildSetting) string {
	var rev, suffix string
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision":
			rev = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			suffix = "-dirty"
		}
	}
	if rev == "" {
		return ""
	}
	return rev + suffix
}

// libDir is where the guest agent and the shim are: beside this binary, or in
// $AGENTZIP_LIBDIR.
func libDir() string {
	self, err := os.Executable()
	if err != nil {
		self = "bin/agentzip"
	}
	return envOr("AGENTZIP_LIBDIR", filepath.Dir(self))
}

// libFile returns the path of a file in libDir, or "" when it is not there.
func libFile(name string) string {
	path := filepath.Join(libDir(), name)
	if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() {
		return ""
	}
	return path
}

func orMissing(path string) string {
	if path == "" {
		return "missing (run: make build)"
	}
	return path
}
