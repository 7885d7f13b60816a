package rootfs

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// testImage has two layers: the second removes a file of the first.
func testImage(t *testing.T, arch string) v1.Image {
	t.Helper()
	img := empty.Image
	for _, entries := range [][]entry{
		{dir("bin"), file("bin/sh", "#!"), file("old", "1")},
		{file(".wh.old", ""), file("new", "2")},
	} {
		data := makeTar(t, entries...)
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Config.Env = "linux", arch, []string{"PATH=/opt/bin:/bin"}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// imageRefs stores an image in each form OCI.Open understands.
func imageRefs(t *testing.T, img v1.Image) map[string]string {
	t.Helper()
	top := t.TempDir()
	folder := filepath.Join(top, "layout")
	p, err := layout.Write(folder, empty.Index)
	if err == nil {
		err = p.AppendImage(img)
	}
	if err != nil {
		t.Fatal(err)
	}
	docker := filepath.Join(top, "docker.tar")
	tag, err := name.NewTag("test:1")
	if err == nil {
		err = tarball.WriteToFile(docker, tag, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(top, "oci.tar")
	f, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	tw := tar.NewWriter(f)
	if err := tw.AddFS(os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(tw.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	inRegistry := strings.TrimPrefix(srv.URL, "http://") + "/test:1"
	ref, err := name.ParseReference(inRegistry)
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{"a layout folder": folder, "a docker archive": docker, "an OCI archive": archive, "a registry": inRegistry}
}

func TestAnImageUnpacksTheSameFromEveryPlace(t *testing.T) {
	want := []string{"tree/", "tree/bin/", "tree/bin/sh=#!", "tree/new=2"}
	for place, ref := range imageRefs(t, testImage(t, "amd64")) {
		t.Run(place, func(t *testing.T) {
			tree, outside := newTestTree(t)
			im, err := OCI{Ref: ref}.Open(t.Context(), t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			cache := t.TempDir()
			if err := im.Unpack(t.Context(), tree, cache, DefaultLimits, nil); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, listing(t, outside)); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"PATH=/opt/bin:/bin"}, im.Env()); diff != "" {
				t.Errorf("environment (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAnImageForAnotherProcessorIsRefused(t *testing.T) {
	for place, ref := range imageRefs(t, testImage(t, "arm64")) {
		if _, err := (OCI{Ref: ref}).Open(t.Context(), t.TempDir()); !errors.Is(err, ErrNoImage) {
			t.Errorf("%s: got %v, want ErrNoImage", place, err)
		}
	}
}

func TestALayerThatDiffersFromTheImagesDigestIsRefused(t *testing.T) {
	ref := imageRefs(t, testImage(t, "amd64"))["a layout folder"]
	blobs, err := filepath.Glob(filepath.Join(ref, "blobs/sha256/*"))
	if err != nil {
		t.Fatal(err)
	}
	im, err := OCI{Ref: ref}.Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	layers, err := im.img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	first, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	second, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	// The second layer's bytes in the place of the first.
	other, err := os.ReadFile(filepath.Join(ref, "blobs/sha256", second.Hex))
	if err != nil {
		t.Fatalf("%v; there are %v", err, blobs)
	}
	if err := os.WriteFile(filepath.Join(ref, "blobs/sha256", first.Hex), other, 0o600); err != nil {
		t.Fatal(err)
	}
	tree, _ := newTestTree(t)
	if err := im.Unpack(t.Context(), tree, t.TempDir(), DefaultLimits, nil); err == nil {
		t.Error("a layer with other content was unpacked")
	}
}

func TestWhatIsNoImageIsSaidInOneSentence(t *testing.T) {
	junk := filepath.Join(t.TempDir(), "junk.tar")
	if err := os.WriteFile(junk, makeTar(t, file("hello", "x")), 0o600); err != nil {
		t.Fatal(err)
	}
	for ref, want := range map[string]string{
		"/nowhere/image.tar":    "no such file",
		junk:                    "neither `docker save` nor an OCI layout",
		"UPPER CASE":            "nor a valid image reference",
		"127.0.0.1:1/nothing:1": "does not answer",
		t.TempDir():             "read OCI layout",
	} {
		_, err := OCI{Ref: ref}.Open(t.Context(), t.TempDir())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q in it", ref, err, want)
		}
	}
}
