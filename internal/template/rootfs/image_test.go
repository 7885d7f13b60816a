package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/template/tool"
	"github.com/agentzip/agentzip/internal/units"
)

// debugfs asks an ext4 image a question.
func debugfs(t *testing.T, image, question string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/usr/sbin/debugfs", "-R", question, image)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("debugfs %s: %v", question, err)
	}
	return string(out)
}

func needTool(t *testing.T, name string) {
	t.Helper()
	if !tool.Have(name) {
		t.Skipf("needs %s", name)
	}
}

func fsck(t *testing.T, image string) {
	t.Helper()
	if err := tool.Run(t.Context(), tool.Command{Name: "e2fsck", Args: []string{"-fn", image}}); err != nil {
		t.Errorf("file system of %s is not clean: %v", filepath.Base(image), err)
	}
}

// preparedTree is a minimal root that went through Prepare.
func preparedTree(t *testing.T) *Tree {
	t.Helper()
	tree, _ := newTestTree(t)
	data := makeTar(
		t, symlink("bin", "usr/bin"), file("usr/bin/sh", "#!"), file("usr/bin/bash", "#!"), file("etc/sudoers", "root ALL=(ALL) ALL\n"),
		file("etc/passwd", "root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh\n"), file("etc/group", "root:x:0:\n"),
		file("etc/shadow", "root:*:1::::::\n"), file("etc/skel/.bashrc", "# rc\n"), symlink("etc/resolv.conf", "/run/resolv.conf"), symlink("etc/hosts", "../../../../etc/passwd"),
	)
	if err := newUnpacker(tree, DefaultLimits, false).apply(t.Context(), bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("agent"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(tree, Guest{Agent: agent, Env: []string{"PATH=/opt/it's/bin:/bin", "bad name=x", "LANG=C"}}); err != nil {
		t.Fatal(err)
	}
	return tree
}

func TestPreparedRootHasItsUserAndNoTraceOfTheHost(t *testing.T) {
	tree := preparedTree(t)
	for name, want := range map[string]string{
		"etc/passwd":                      "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:agent,,,:/home/user:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh\n",
		"etc/group":                       "root:x:0:\nuser:x:1000:\n",
		"etc/shadow":                      "root:*:1::::::\nuser:*:19700:0:99999:7:::\n",
		"etc/sudoers.d/agentzip":          "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
		"etc/profile.d/agentzip-image.sh": "export PATH='/opt/it'\\''s/bin:/bin'\nexport LANG='C'\n",
		"etc/machine-id":                  "",
		"etc/resolv.conf":                 "nameserver 10.0.2.3\n",
		"home/user/.bashrc":               "# rc\n",
		GuestAgent:                        "agent",
	} {
		got, err := tree.ReadFile(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if tree.Exists("etc/gshadow") {
		t.Error("a shadow file was made that the image did not have")
	}
}

func TestPreparingTwiceChangesNothing(t *testing.T) {
	tree := preparedTree(t)
	before := listing(t, tree.Dir())
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("agent"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(tree, Guest{Agent: agent}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, listing(t, tree.Dir())); diff != "" {
		t.Errorf("second Prepare (-before +after):\n%s", diff)
	}
}

func TestAnImageWithoutAShellIsRefused(t *testing.T) {
	tree, _ := newTestTree(t)
	if err := Prepare(tree, Guest{}); err == nil || !strings.Contains(err.Error(), "/bin/sh") {
		t.Errorf("got %v, want an error about /bin/sh", err)
	}
}

func TestTheRootImageKeepsOwnersModesAndLinks(t *testing.T) {
	needTool(t, "mke2fs")
	needTool(t, "debugfs")
	tree := preparedTree(t)
	data := makeTar(t, entry{name: "usr/bin/su", kind: '0', data: "su", mode: 0o4755}, hardlink("usr/bin/su2", "usr/bin/su"), file("big", strings.Repeat("x", 3<<20)))
	if err := newUnpacker(tree, DefaultLimits, false).apply(t.Context(), bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "root.ext4")
	size, err := WriteExt4(t.Context(), tree, image, nil)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(image); err != nil || st.Size() != int64(size) || size%pmemAlign != 0 || size > 16*units.MiB {
		t.Errorf("image of %v (%v): want a multiple of 2 MiB, not much over the content's 3 MiB", size, err)
	}
	fsck(t, image)
	for name, want := range map[string][]string{
		"/usr/bin/su":    {"Mode:  04755", "Links: 2"},
		"/home/user":     {"Mode:  0755", "User:  1000   Group:  1000"},
		"/tmp":           {"Mode:  01777"},
		"/etc/sudoers":   {"User:     0"},
		"/" + GuestAgent: {"Mode:  0755"},
	} {
		got := debugfs(t, image, "stat "+name)
		for _, w := range want {
			if !strings.Contains(strings.Join(strings.Fields(got), " "), strings.Join(strings.Fields(w), " ")) {
				t.Errorf("%s: no %q in:\n%s", name, w, got)
			}
		}
	}
	if features := debugfs(t, image, "features"); strings.Contains(features, "has_journal") || !strings.Contains(features, "extent") {
		t.Errorf("features: %s; want extents and no journal", features)
	}
}

func TestTheWritableDiskIsAlmostAllHoles(t *testing.T) {
	needTool(t, "mke2fs")
	needTool(t, "debugfs")
	sums := map[string]bool{}
	for range 2 {
		image := filepath.Join(t.TempDir(), "disk.img")
		if err := WriteDisk(t.Context(), image, t.TempDir(), 4*units.GiB); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(image, &st); err != nil {
			t.Fatal(err)
		}
		if used := units.Bytes(st.Blocks) * 512; st.Size != int64(4*units.GiB) || used > units.MiB {
			t.Errorf("disk of %v occupies %v, want 4 GiB and less than 1 MiB", units.Bytes(st.Size), used)
		}
		fsck(t, image)
		ls := debugfs(t, image, "ls -p /")
		for _, dir := range []string{"upper", "work"} {
			if !strings.Contains(ls, "/"+dir+"/") {
				t.Errorf("no folder %s on the disk: %s", dir, ls)
			}
		}
		super, err := firstBytes(image, 64<<10)
		if err != nil {
			t.Fatal(err)
		}
		sums[string(super)] = true
	}
	if len(sums) != 1 {
		t.Error("two disks of one size differ in their first blocks")
	}
	if err := WriteDisk(t.Context(), filepath.Join(t.TempDir(), "x"), t.TempDir(), 1000); err == nil {
		t.Error("a disk of 1000 bytes was made")
	}
}

func firstBytes(path string, n int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	buf := make([]byte, n)
	_, err = f.ReadAt(buf, 0)
	return buf, errors.Join(err, f.Close())
}

func TestADirectoryIsCopiedWithItsHardLinksAndWithoutSockets(t *testing.T) {
	tree, outside := newTestTree(t)
	src := t.TempDir()
	for name, data := range map[string]string{"a": "1", "sub/b": "2"} {
		path := filepath.Join(src, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(data), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		err = errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(src, "socket")}), unix.Close(fd))
	}
	err = errors.Join(err, os.Link(filepath.Join(src, "a"), filepath.Join(src, "sub/linked")), os.Symlink("/etc/passwd", filepath.Join(src, "sym")))
	if err != nil {
		t.Fatal(err)
	}
	d := Directory{Path: src}
	before, err := d.Digest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Unpack(t.Context(), tree, DefaultLimits, nil); err != nil {
		t.Fatal(err)
	}
	want := []string{"tree/", "tree/a=1", "tree/sub/", "tree/sub/b=2", "tree/sub/linked=1", "tree/sym -> /etc/passwd"}
	if diff := cmp.Diff(want, listing(t, outside)); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
	a, err := tree.Lstat("a")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := tree.Lstat("sub/linked"); err != nil || !os.SameFile(a, b) {
		t.Errorf("the hard link became a copy (%v)", err)
	}
	if err := os.WriteFile(filepath.Join(src, "a"), []byte("longer"), 0o600); err != nil {
		t.Fatal(err)
	}
	if after, err := d.Digest(t.Context()); err != nil || after == before {
		t.Errorf("the digest of a changed folder is the same (%v)", err)
	}
	if err := (Directory{Path: outside}).Unpack(t.Context(), tree, DefaultLimits, nil); err == nil {
		t.Error("a folder was copied into itself")
	}
}

func TestMirrorsOfTheSuiteAreTakenFromTheHost(t *testing.T) {
	const targets = `http://mirror.example/debian/ bookworm main Debian
http://mirror.example/debian/ bookworm main Debian
http://mirror.example/debian/ bookworm contrib Debian
http://mirror.example/debian/ bookworm-updates main Debian
http://security.example/ bookworm-security main Debian
http://mirror.example/debian/ trixie main Debian
https://other.example/ bookworm main Somebody
`
	want := []string{
		"deb http://mirror.example/debian/ bookworm main", "deb http://mirror.example/debian/ bookworm-updates main",
		"deb http://security.example/ bookworm-security main",
	}
	if diff := cmp.Diff(want, mirrorsFrom(targets, "bookworm")); diff != "" {
		t.Errorf("mirrors (-want +got):\n%s", diff)
	}
	if got := mirrorsFrom(targets, "sid"); got != nil {
		t.Errorf("mirrors of a suite the host does not have: %q, want none", got)
	}
}

func TestFailuresOfAptSayWhatToDo(t *testing.T) {
	for tail, want := range map[string]string{
		"E: Could not connect to deb.debian.org:80":    "mirror does not answer",
		"cannot write: No space left on device":        "no space left on disk",
		"E: Unable to locate package python3-tornadoo": "does not exist in this suite",
	} {
		log := &bootstrapLog{}
		log.line("E: mmdebstrap failed to run")
		log.line(tail)
		err := explainApt(log.explain(&tool.Error{Name: "mmdebstrap", Code: 25, Tail: tail + "\nE: mmdebstrap failed"}))
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %q, want %q in it", tail, err, want)
		}
	}
	if err := explainApt(fmt.Errorf("x: %w", tool.ErrMissing)); !strings.Contains(err.Error(), "agentzip setup") {
		t.Errorf("got %v, want how to install what is missing", err)
	}
}

func TestADamagedPackageCacheIsNotUsed(t *testing.T) {
	tree, _ := newTestTree(t)
	cache := t.TempDir()
	d := Debian{Suite: "bookworm"}
	archive := makeTar(t, file("a", "1"))
	err := errors.Join(os.WriteFile(d.cachePath(cache), archive, 0o600), os.WriteFile(d.cachePath(cache)+".sha256", []byte(strings.Repeat("0", 64)+"\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.unpackCached(t.Context(), tree, d.cachePath(cache), nil); err == nil || !strings.Contains(err.Error(), "changed on disk") {
		t.Errorf("got %v, want that the cache has changed", err)
	}
	if err := tree.reset(); err != nil {
		t.Fatal(err)
	}
	if got := listing(t, tree.Dir()); len(got) != 0 {
		t.Errorf("left in the tree after reset: %q", got)
	}
}
