package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/traj"
)

// childEnv makes the test binary act as `agentzip native-replay`.
const childEnv = "AGENTZIP_TEST_NATIVE_CHILD"

func runNativeChildOfTest() bool {
	if os.Getenv(childEnv) == "" {
		return false
	}
	if err := NativeMain(os.Stdin, os.Stdout); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		os.Exit(1)
	}
	return true
}

// rootImage makes an ext4 image with bash, a few programs and what they need.
func rootImage(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	run := func(name string, args ...string) []byte {
		out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
		if err != nil {
			t.Skipf("%s: %v: %s", name, err, out)
		}
		return out
	}
	for _, d := range []string{"bin", "proc", "dev", "tmp", "testbed", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(root, "testbed"), nativeUser, nativeUser); err != nil {
		t.Fatal(err)
	}
	lib := regexp.MustCompile(`/\S+`)
	for _, bin := range []string{"/bin/bash", "/bin/sleep", "/bin/cat"} {
		files := []string{}
		for _, l := range lib.FindAllString(string(run("ldd", bin)), -1) {
			files = append(files, strings.TrimRight(l, ":"))
		}
		for _, f := range append(files, bin) {
			data, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			p := filepath.Join(root, f)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, data, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	img := filepath.Join(dir, "root.ext4")
	run("mke2fs", "-q", "-t", "ext4", "-d", root, img, "32M")
	return img
}

func nativeSpec(t *testing.T, image string, lanes ...[]string) NativeSpec {
	t.Helper()
	spec := NativeSpec{Exe: []string{"/usr/bin/env", childEnv + "=1", os.Args[0]}, RootImage: image}
	for _, l := range lanes {
		var tr traj.Trajectory
		for _, s := range l {
			tr.Steps = append(tr.Steps, traj.Step{Shell: s})
		}
		spec.Plans = append(spec.Plans, Plan{Trajectory: tr})
	}
	return spec
}

func mounts(t *testing.T) string {
	t.Helper()
	m, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	return string(m)
}

func TestNativeReplayRunsInOrderInAFreshCopyAndLeavesNothing(t *testing.T) {
	image := rootImage(t)
	before := mounts(t)
	// A command that exits at once would show a wrong world by its duration
	// only, so each one that finds what it should not find sleeps.
	slow := "sleep 3"
	spec := nativeSpec(t, image,
		[]string{
			"[ ! -e made ] || " + slow, // a fresh copy, also after the warm-up
			"echo x > made",
			"[ -e made ] || " + slow, // the state of the call before
			"[ $UID = 1000 ] || " + slow,
			"(: > /bin/evil) 2>/dev/null && " + slow,
			"exit 3",
		},
		[]string{"[ ! -e made ] || " + slow, "[ -c /dev/null ] && [ -e /proc/self/stat ] || " + slow, "sleep 0.5"})
	res := ReplayNative(t.Context(), spec)
	if res.Missing != "" {
		t.Skip("cannot run here: " + res.Missing)
	}
	for i, lane := range res.Durations {
		for n, d := range lane {
			shell := spec.Plans[i].Trajectory.Steps[n].Shell
			want := 2 * time.Second
			if d <= 0 || d > want {
				t.Errorf("lane %d call %d took %v (0 = unknown): %s", i, n+1, d, shell)
			}
		}
	}
	if d := res.Durations[1][2]; d < 500*time.Millisecond {
		t.Errorf("sleep 0.5 took %v", d)
	}
	if after := mounts(t); after != before {
		t.Errorf("mounts changed:\n%s\nwere:\n%s", after, before)
	}
	deadline := time.Now().Add(5 * time.Second)
	for loopOf(t, image) && time.Now().Before(deadline) {
		time.Sleep(50 * time.Millisecond) // the kernel detaches it after the namespace is gone
	}
	if loopOf(t, image) {
		t.Error("a loop device still holds the image")
	}
}

// loopOf reports whether a loop device is backed by the image.
func loopOf(t *testing.T, image string) bool {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(data)) == image {
			return true
		}
	}
	return false
}

func TestNativeCallsPastTheirTimeAreUnknown(t *testing.T) {
	image := rootImage(t)
	spec := nativeSpec(t, image, []string{"sleep 60 & sleep 60", ":"}, []string{":"})
	spec.Budget = time.Second
	begin := time.Now()
	res := ReplayNative(t.Context(), spec)
	if time.Since(begin) > 30*time.Second {
		t.Errorf("took %v with a budget of 1 s", time.Since(begin))
	}
	if len(res.Durations) > 0 && res.Durations[0][0] != 0 {
		t.Errorf("a call past the budget took %v, want unknown", res.Durations[0][0])
	}
	if res.Missing == "" && len(res.Notes) == 0 {
		t.Error("nothing says that calls are missing")
	}
}

func TestNativeReplaySaysWhyItCannotRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	res := ReplayNative(t.Context(), nativeSpec(t, filepath.Join(t.TempDir(), "absent"), []string{":"}))
	if !strings.Contains(res.Missing, "open root image") {
		t.Errorf("got %q", res.Missing)
	}
	spec := nativeSpec(t, "x", []string{":"})
	spec.Exe = []string{"/nonexistent/agentzip"}
	if res := ReplayNative(t.Context(), spec); res.Missing == "" {
		t.Error("a missing program is not named")
	}
}

func TestTheNativeChildRefusesToRunOutsideNamespaces(t *testing.T) {
	t.Parallel()
	if err := NativeMain(strings.NewReader("{}"), os.Stdout); err == nil || !strings.Contains(err.Error(), "started by agentzip itself") {
		t.Errorf("got %v", err)
	}
}
