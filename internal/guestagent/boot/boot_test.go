package boot

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestTheKernelCommandLineNamesTheDevices(t *testing.T) {
	t.Parallel()
	usual := kernelParameters{root: "/dev/pmem0", disk: "/dev/vda"}
	for _, tc := range []struct {
		name, cmdline string
		want          kernelParameters
	}{
		{"nothing said", "console=ttyS0 quiet\n", usual},
		{"both", "a agentzip.root=/dev/vda agentzip.disk=/dev/vdb b", kernelParameters{root: "/dev/vda", disk: "/dev/vdb"}},
		{"the last one wins", "agentzip.disk=/dev/vdb agentzip.disk=/dev/vdc", kernelParameters{root: "/dev/pmem0", disk: "/dev/vdc"}},
		{"empty and unknown ones do not count", "agentzip.root= agentzip.rooot=/x agentzip.disk", usual},
	} {
		if diff := cmp.Diff(tc.want, parseKernelParameters(tc.cmdline), cmp.AllowUnexported(kernelParameters{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

func TestTheModuleListMayHaveCommentsAndRelativePaths(t *testing.T) {
	t.Parallel()
	want := []string{"/mod/a.ko", "/mod/b.ko"}
	if diff := cmp.Diff(want, modulePaths("# order matters\nmod/a.ko\n\n  /mod/b.ko \n")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNoModuleListMeansNoModules(t *testing.T) {
	t.Parallel()
	if err := loadModules(filepath.Join(t.TempDir(), "modules")); err != nil {
		t.Error(err)
	}
}

func TestAMissingModuleIsNamed(t *testing.T) {
	t.Parallel()
	list := filepath.Join(t.TempDir(), "modules")
	if err := os.WriteFile(list, []byte("/no/such.ko\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := loadModules(list)
	if want := "open module: open /no/such.ko: no such file or directory (the file or a module it depends on is missing from the initramfs)"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAMissingDeviceIsNamed(t *testing.T) {
	t.Parallel()
	if err := waitForDevices(10*time.Millisecond, "/dev/null", "/dev/no-such"); err == nil {
		t.Error("no error")
	}
	if err := waitForDevices(time.Second, "/dev/null"); err != nil {
		t.Error(err)
	}
}

func TestRemovingStaysOnOneFileSystem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a", "b", "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", filepath.Join(dir, "a", "link")); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	removeBelow(dir, st.Dev+1)
	if _, err := os.Stat(filepath.Join(dir, "a", "b", "f")); err != nil {
		t.Errorf("a file of another file system is gone: %v", err)
	}
	removeBelow(dir, st.Dev)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Stat("/etc/passwd"); err != nil {
		t.Error("it followed a link")
	}
}
