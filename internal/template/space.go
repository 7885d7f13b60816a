package template

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/template/tool"
	"github.com/agentzip/agentzip/internal/units"
)

// needSpace refuses work that would fill the disk dir is on.
func needSpace(dir string, need units.Bytes) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look at free space of %s: %w", dir, err)
	}
	free := units.Bytes(st.Bavail) * units.Bytes(st.Bsize) //nolint:gosec // G115: a disk is smaller than 2^63 bytes
	if free < need {
		return fmt.Errorf("not enough disk space at %s: %v free, %v needed; free some or set AGENTZIP_STATE_DIR to a larger disk: %w", dir, free, need, unix.ENOSPC)
	}
	return nil
}

// explainSpace says where the disk is full when that is what an error is about.
func explainSpace(err error, dir string) error {
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
	if te, ok := errors.AsType[*tool.Error](err); ok && strings.Contains(te.Tail, "No space left on device") {
		full = true
	}
	if full && !strings.Contains(err.Error(), "AGENTZIP_STATE_DIR") {
		return fmt.Errorf("disk full at %s (free some, or set AGENTZIP_STATE_DIR to a larger disk): %w", dir, err)
	}
	return err
}

// toolVersions notes what wrote the files, for the day one of them turns out wrong.
func toolVersions(ctx context.Context) map[string]string {
	versions := map[string]string{}
	for name, cmd := range map[string]tool.Command{
		"mmdebstrap": {Name: "mmdebstrap", Args: []string{"--version"}},
		"qemu":       {Name: qemuProgram, Args: []string{"--version"}},
	} {
		if out, err := tool.Output(ctx, cmd); err == nil {
			versions[name], _, _ = strings.Cut(strings.TrimSpace(out), "\n")
		}
	}
	// mke2fs says it where errors go.
	var first string
	cmd := tool.Command{Name: "mke2fs", Args: []string{"-V"}, OnLine: func(l string) {
		if first == "" {
			first = l
		}
	}}
	if tool.Run(ctx, cmd) == nil {
		versions["mke2fs"] = first
	}
	return versions
}
