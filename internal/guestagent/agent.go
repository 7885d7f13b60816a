package guestagent

import (
	"errors"
	"log/slog"
	"os"
	"runtime/debug"

	"github.com/agentzip/agentzip/api/link"
)

const (
	// busyGCPercent keeps the heap small while commands run.
	busyGCPercent = 50
	// memoryLimit is where garbage is collected although nothing runs.
	memoryLimit = 32 << 20
	// sealFile lies on a tmpfs: it is in the snapshot and not in the root image.
	sealFile = "/run/agentzip/sealed"
	// settingsFile and markDir are on the same tmpfs.
	settingsFile = "/run/agentzip/settings.json"
	markDir      = "/run/e2b"
)

// Run is the agent of a real guest. It returns only when the link's port fails.
func Run(version string) error {
	if os.Getuid() != 0 {
		return errors.New("the agent runs as root of a guest only")
	}
	// The runtime collects every two minutes even if nothing was allocated, and
	// marking writes to pages the host has compressed. Switched off, it does not.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(memoryLimit)
	port, err := OpenPort(link.PortName)
	if err != nil {
		return err
	}
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return err
	}
	server := New(Options{
		System:   LinuxSystem{},
		Version:  version,
		SealFile: sealFile, SettingsFile: settingsFile, MarkDir: markDir,
		Shielded: len(score) > 0 && score[0] == '-',
		Busy: func(busy bool) {
			if busy {
				debug.SetGCPercent(busyGCPercent)
			} else {
				debug.SetGCPercent(-1)
			}
		},
	})
	// Whoever holds the port keeps the agent from it, not the sandbox from its host.
	if inside, err := ListenInside(); err != nil {
		slog.Error("the agent does not answer inside the guest", "err", err)
	} else {
		go func() { slog.Error("the agent no longer answers inside the guest", "err", server.ServeInside(inside)) }()
	}
	return server.Serve(NewListener(port))
}
