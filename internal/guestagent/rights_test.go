package guestagent

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// nobody is an account without rights.
func nobody(t *testing.T) Account {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	return Account{Name: "nobody", UID: 65534, GID: 65534, Groups: []uint32{65534}, Home: "/nonexistent"}
}

// openTree makes folders: "mine" belongs to nobody, "roots" to root.
func openTree(t *testing.T, a Account) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"mine", "roots"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(dir, "mine"), int(a.UID), int(a.GID)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func put(t *testing.T, a Account, path string) error {
	t.Helper()
	f, err := a.openForWriting(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString("written")
	return err
}

func owner(t *testing.T, path string) uint32 {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st.Sys().(*syscall.Stat_t).Uid //nolint:forcetypeassert // of the os package on Linux
}

func TestFilesOfARequestBelongToItsUserWhereverTheyAre(t *testing.T) {
	t.Parallel()
	a := nobody(t)
	dir := openTree(t, a)
	for _, path := range []string{"mine/x", "mine/a/b/c", "roots/x", "roots/a/b/c"} {
		path = filepath.Join(dir, path)
		if err := put(t, a, path); err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		for p := path; filepath.Base(p) != "mine" && filepath.Base(p) != "roots"; p = filepath.Dir(p) {
			if owner(t, p) != a.UID {
				t.Errorf("%s belongs to %d", p, owner(t, p))
			}
		}
	}
}

func TestALinkOfTheUserDoesNotLeadRootAnywhere(t *testing.T) {
	t.Parallel()
	a := nobody(t)
	dir := openTree(t, a)
	secret := filepath.Join(dir, "roots/secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := func(target, name string, uid int) string {
		path := filepath.Join(dir, name)
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
		if err := os.Lchown(path, uid, uid); err != nil {
			t.Fatal(err)
		}
		return path
	}
	planted := link(secret, "mine/planted", int(a.UID))
	folder := link(filepath.Join(dir, "roots"), "mine/folder", int(a.UID))
	chain := link(planted, "roots/chain", 0) // root's link to the user's
	for _, path := range []string{planted, folder + "/secret", folder + "/new", chain} {
		if err := put(t, a, path); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("write to %s: %v", path, err)
		}
		if f, err := a.openForReading(path); err == nil {
			f.Close()
			t.Errorf("%s was read", path)
		}
	}
	for what, err := range map[string]error{
		"mkdir": a.perform(folder+"/sub", goalMake, func(p place) error { return os.Mkdir(p.path, 0o755) }),
		"rm":    a.perform(folder+"/secret", goalEntry, func(p place) error { return os.RemoveAll(p.path) }),
	} {
		if !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s through a link: %v", what, err)
		}
	}
	if content, err := os.ReadFile(secret); err != nil || string(content) != "secret" {
		t.Errorf("the file now holds %q, %v", content, err)
	}
	// Links of root, as /bin and /var/run are, are followed.
	trusted := link(filepath.Join(dir, "roots"), "roots-link", 0)
	if err := put(t, a, trusted+"/through"); err != nil || owner(t, filepath.Join(dir, "roots/through")) != a.UID {
		t.Errorf("a link of root: %v", err)
	}
	// Whatever removes a link removes the link.
	if err := a.perform(planted, goalEntry, func(p place) error { return os.RemoveAll(p.path) }); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(secret); err != nil {
		t.Error(err)
	}
}

func TestLoopsAndFilesOnTheWayAreErrors(t *testing.T) {
	t.Parallel()
	a := nobody(t)
	dir := openTree(t, a)
	for name, target := range map[string]string{"roots/loop": "loop", "roots/up": "../roots/../roots", "roots/gone": "nowhere"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "roots/file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{
		"roots/loop": unix.ELOOP, "roots/loop/x": fs.ErrExist, "roots/file/x": unix.ENOTDIR, "roots/up/../roots/up/ok": nil, "roots/gone": nil, "roots": unix.EISDIR,
	} {
		if err := put(t, a, filepath.Join(dir, filepath.Clean(path))); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	if owner(t, filepath.Join(dir, "roots/nowhere")) != a.UID {
		t.Error("the target of root's dangling link was not made")
	}
}

func TestRightsAreGivenBackOnEveryThread(t *testing.T) {
	t.Parallel()
	a := nobody(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 200 {
				err := a.as(func() error {
					if uid, _ := unix.SetfsuidRetUid(-1); uid != int(a.UID) {
						t.Errorf("acting as %d", uid)
					}
					runtime.Gosched()
					return errors.New("an error of the operation")
				})
				if err == nil || !strings.Contains(err.Error(), "of the operation") {
					t.Error(err)
				}
				if uid, _ := unix.SetfsuidRetUid(-1); uid != 0 {
					t.Errorf("left as %d", uid)
				}
				if f, err := os.Open("/etc/shadow"); err == nil {
					f.Close()
				} else if errors.Is(err, fs.ErrPermission) {
					t.Error("root's rights are not back")
				}
			}
		})
	}
	all.Wait()
}

func TestAPanicGivesRightsBack(t *testing.T) {
	t.Parallel()
	a := nobody(t)
	func() {
		defer func() { _ = recover() }()
		_ = a.as(func() error { panic("x") })
	}()
	if uid, _ := unix.SetfsuidRetUid(-1); uid != 0 {
		t.Errorf("left as %d", uid)
	}
}

func FuzzUploads(f *testing.F) {
	const form = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a/b\"\r\n\r\ncontent\r\n--b--\r\n"
	for _, kind := range []string{"multipart/form-data; boundary=b", "application/octet-stream", "text/plain", "", "multipart/form-data; boundary=\"\""} {
		for _, body := range []string{form, form[:60], strings.Replace(form, "a/b", "../\xff\\", 1), "", "--b--"} {
			f.Add(kind, "", "", []byte(body))
			f.Add(kind, "gzip", "x", []byte(body))
		}
	}
	f.Fuzz(func(t *testing.T, kind, coding, query string, body []byte) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/files", bytes.NewReader(body))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Content-Encoding", coding)
		total := int64(0)
		err := readUpload(r, query, func(path string, content io.Reader) error {
			if path == "" {
				t.Error("a file without a path")
			}
			if _, err := (Account{Home: "/h"}).resolve(path, ""); err != nil {
				return badRequest("%v", err)
			}
			n, err := io.Copy(io.Discard, io.LimitReader(content, 1<<20))
			total += n
			if err != nil {
				return bodyError(err)
			}
			return nil
		})
		if re := (*requestError)(nil); err != nil && (!errors.As(err, &re) || re.status != http.StatusBadRequest || re.message == "") {
			t.Errorf("%v is not the fault of the request", err)
		}
		if coding == "" && total > int64(len(body)) {
			t.Errorf("%d bytes came out of %d", total, len(body))
		}
	})
}

func FuzzAPathNeverLeavesWhatTheUserMayTouch(f *testing.F) {
	for _, s := range []string{"a", "../x", "mine/../roots/x", "link/secret", "mine/planted", "a\x00b", strings.Repeat("n/", 3000), "\xff\xfe", "~", "~/x", "~root/x", "/proc/self/root/etc", "."} {
		f.Add(s)
	}
	if os.Getuid() != 0 {
		f.Skip("needs root")
	}
	f.Fuzz(func(t *testing.T, name string) {
		a := nobody(t)
		dir := openTree(t, a)
		secret := filepath.Join(dir, "roots/secret")
		if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, l := range []string{"mine/planted", "mine/link"} {
			if err := os.Symlink(map[string]string{"mine/planted": secret, "mine/link": filepath.Dir(secret)}[l], filepath.Join(dir, l)); err != nil {
				t.Fatal(err)
			}
			if err := os.Lchown(filepath.Join(dir, l), int(a.UID), int(a.GID)); err != nil {
				t.Fatal(err)
			}
		}
		a.Home = filepath.Join(dir, "mine")
		path, err := a.resolve(name, "")
		if err != nil {
			return
		}
		if !filepath.IsAbs(path) || strings.Contains(path, "/../") || strings.ContainsRune(path, 0) {
			t.Fatalf("resolve(%q) = %q", name, path)
		}
		if !strings.HasPrefix(path, a.Home) {
			return // the user named it, so it is meant
		}
		_ = put(t, a, path)
		if content, err := os.ReadFile(secret); err != nil || string(content) != "secret" {
			t.Errorf("%q reached the file of root: %q, %v", name, content, err)
		}
	})
}
