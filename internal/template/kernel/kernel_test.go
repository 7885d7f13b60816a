package kernel

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCpioIsTheNewcFormatByteForByte(t *testing.T) {
	var b bytes.Buffer
	c := &cpio{w: &b}
	c.dir("dev")
	c.console()
	c.file("init", 0o755, []byte("hello"))
	if err := c.close(); err != nil {
		t.Fatal(err)
	}
	const zero = "00000000"
	want := "070701" + "00000001" + "000041ED" + zero + zero + "00000002" + zero + zero + zero + zero + zero + zero + "00000004" + zero + "dev\x00" +
		"\x00\x00" +
		"070701" + "00000002" + "00002180" + zero + zero + "00000001" + zero + zero + zero + zero + "00000005" + "00000001" + "0000000C" + zero + "dev/console\x00" +
		"\x00\x00" +
		"070701" + "00000003" + "000081ED" + zero + zero + "00000001" + zero + "00000005" + zero + zero + zero + zero + "00000005" + zero + "init\x00" +
		"\x00" + "hello\x00\x00\x00" +
		"070701" + zero + zero + zero + zero + "00000001" + zero + zero + zero + zero + zero + zero + "0000000B" + zero + "TRAILER!!!\x00" +
		"\x00\x00\x00"
	want += strings.Repeat("\x00", 512-len(want)%512)
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("archive (-want +got):\n%s", diff)
	}
}

// moduleTree makes a lib/modules folder from name -> what it depends on.
func moduleTree(t *testing.T, deps map[string]string, builtin ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, d := range deps {
		path := filepath.Join(dir, "kernel", name+".ko")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, fakeModule(d), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list := ""
	for _, b := range builtin {
		list += "kernel/" + b + ".ko\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte(list), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func names(paths []string) []string {
	var n []string
	for _, p := range paths {
		n = append(n, filepath.Base(p))
	}
	return n
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	dir := moduleTree(t, map[string]string{
		"drivers/virtio_pci": "virtio,virtio_ring", "virtio": "virtio_ring", "virtio_ring": "", "virtio-rng": "rng_core,virtio", "unused": "",
	}, "char/rng-core")
	order, err := loadOrder(dir, []string{"virtio_pci", "virtio_rng"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"virtio_ring.ko", "virtio.ko", "virtio_pci.ko", "virtio-rng.ko"}, names(order)); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestModulesThatAreMissingOrCircularAreNamed(t *testing.T) {
	for name, tt := range map[string]struct {
		deps map[string]string
		want string
	}{
		"missing":  {map[string]string{"a": "b"}, "module b is neither in the package nor built in"},
		"circular": {map[string]string{"a": "b", "b": "a"}, "module a needs itself"},
	} {
		_, err := loadOrder(moduleTree(t, tt.deps), []string{"a"})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q in it", name, err, tt.want)
		}
	}
}

func TestADamagedCacheIsNoticed(t *testing.T) {
	dir := t.TempDir()
	sum := sha256.Sum256([]byte("kernel"))
	write := func(file, data string) {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	describe := func(modules []string) string {
		list, err := json.Marshal(modules)
		if err != nil {
			t.Fatal(err)
		}
		return `{"format":1,"package":"p","version":"1","release":"r","wanted":` + string(list) +
			`,"modules":[],"sums":{"vmlinuz":"` + hex.EncodeToString(sum[:]) + `"}}`
	}
	write("vmlinuz", "kernel")
	write("kernel.json", describe(append([]string{"another"}, wanted...)))
	if _, err := load(t.Context(), dir); !errors.Is(err, ErrDamaged) {
		t.Errorf("with the modules of another version: got %v, want %v", err, ErrDamaged)
	}
	write("kernel.json", describe(wanted))
	if _, err := load(t.Context(), dir); err != nil {
		t.Fatalf("intact: %v", err)
	}
	write("vmlinuz", "kernal")
	if _, err := load(t.Context(), dir); err == nil {
		t.Error("a changed kernel image was loaded")
	}
}

func TestTheKernelPackageIsFoundAmongTheDependencies(t *testing.T) {
	const record = "Package: linux-image-cloud-amd64\nVersion: 6.1.1\nDepends: linux-base (>= 4.3~), linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)\nSection: kernel\n"
	pkg, version := dependency(record)
	if pkg != "linux-image-6.1.0-57-cloud-amd64" || version != "6.1.192-3" {
		t.Errorf("got %q %q, want the package and its exact version", pkg, version)
	}
	if pkg, _ := dependency("Package: x\nDepends: linux-image-amd64\n"); pkg != "" {
		t.Errorf("got %q from a record without an exact kernel", pkg)
	}
}
