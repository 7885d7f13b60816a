package tool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestAFailureCarriesTheCodeAndTheLastLine(t *testing.T) {
	err := Run(t.Context(), Command{Name: "sh", Args: []string{"-c", "echo first; echo last >&2; exit 3"}})
	te, ok := errors.AsType[*Error](err)
	if !ok || te.Code != 3 || !strings.HasSuffix(err.Error(), "last") {
		t.Errorf("got %v, want code 3 and the last line", err)
	}
}

func TestAMissingProgramIsNamed(t *testing.T) {
	if err := Run(t.Context(), Command{Name: "no-such-program"}); !errors.Is(err, ErrMissing) {
		t.Errorf("got %v, want ErrMissing", err)
	}
	if Have("no-such-program") || !Have("sh") {
		t.Error("Have is wrong about sh or about a program that does not exist")
	}
}

func TestLinesArriveAsTheyAreWritten(t *testing.T) {
	var lines []string
	err := Run(t.Context(), Command{
		Name: "sh", Args: []string{"-c", `printf 'a\nb\rc'`},
		OnLine: func(l string) { lines = append(lines, l) },
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, lines); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

func TestAFloodOfOutputIsBounded(t *testing.T) {
	err := Run(t.Context(), Command{Name: "sh", Args: []string{"-c", "head -c 5000000 /dev/zero | tr '\\0' x; exit 1"}})
	te, ok := errors.AsType[*Error](err)
	if !ok || len(te.Tail) > tailSize {
		t.Errorf("got an error of %d bytes, want at most %d", len(te.Tail), tailSize)
	}
	if _, err := Output(t.Context(), Command{Name: "head", Args: []string{"-c", "20000000", "/dev/zero"}}); err == nil {
		t.Error("20 MB of output were accepted")
	}
}

func TestCancellingEndsTheWholeGroup(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		// The grandchild ignores SIGTERM: only the SIGKILL to the group ends it.
		done <- Run(ctx, Command{Name: "sh", Args: []string{"-c", `(trap '' TERM; echo $$ > ` + pidFile + `.tmp; sh -c 'echo $PPID' > ` + pidFile + `.tmp; mv ` + pidFile + `.tmp ` + pidFile + `; sleep 60; sleep 60) & wait`}})
	}()
	var pid int
	for range 500 {
		if data, err := os.ReadFile(pidFile); err == nil {
			for _, c := range strings.TrimSpace(string(data)) {
				pid = pid*10 + int(c-'0')
			}
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if pid == 0 {
		t.Fatal("the program did not start")
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	for range 200 { // the kill is sent; init needs a moment to collect the orphan
		if gone(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("process %d is still there", pid)
}

func gone(pid int) bool {
	if unix.Kill(pid, 0) != nil {
		return true
	}
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestMountsEndWithTheProgram(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount")
	}
	dir := t.TempDir()
	err := Run(t.Context(), Command{Name: "sh", OwnMounts: true, Args: []string{"-c", "mount -t tmpfs x " + dir + " && echo y > " + dir + "/y"}})
	if err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("the mount is visible outside: %v, %v", entries, err)
	}
}
