package rootfs

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentzip/agentzip/internal/template/step"
	"github.com/agentzip/agentzip/internal/units"
)

// ErrNoImage says that a reference, layout or archive holds no image for Linux on x86-64.
var ErrNoImage = errors.New("no linux/amd64 image")

// OCI describes a root file system made of a container image.
type OCI struct {
	// Ref is a folder with an OCI layout, a file made by `docker save` or holding an
	// OCI layout, or else a reference of a registry ("debian:12",
	// "ghcr.io/owner/name@sha256:..."). What exists on disk wins.
	Ref string
}

// Image is an image that was found but not yet unpacked.
type Image struct {
	ref     string
	scratch string // folder for temporary files, as long as the Image is used
	img     v1.Image
	digest  string
	remote  bool
	config  v1.Config
	// diffIDs are the digests of the uncompressed layers, lowest first.
	diffIDs []v1.Hash
}

// platform is what a guest runs.
var platform = v1.Platform{OS: "linux", Architecture: "amd64"}

// Open finds the image. Of a registry it reads the manifest only. scratch is a
// folder for temporary files, needed as long as the Image, which the caller removes.
func (o OCI) Open(ctx context.Context, scratch string) (*Image, error) {
	im := &Image{ref: o.Ref, scratch: scratch}
	var err error
	switch st, serr := os.Stat(o.Ref); {
	case serr == nil && st.IsDir():
		im.img, err = fromLayout(o.Ref)
	case serr == nil:
		im.img, err = fromArchive(ctx, o.Ref, scratch)
	case strings.HasPrefix(o.Ref, "/") || strings.HasPrefix(o.Ref, "."):
		err = serr
	default:
		im.remote = true
		im.img, err = fromRegistry(ctx, o.Ref)
	}
	if err != nil {
		return nil, fmt.Errorf("open image %s: %w", o.Ref, err)
	}
	digest, err := im.img.Digest()
	if err != nil {
		return nil, fmt.Errorf("read manifest of %s: %w", o.Ref, err)
	}
	im.digest = digest.String()
	cfg, err := im.img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read configuration of %s: %w", o.Ref, err)
	}
	if cfg.OS != "" && cfg.OS != platform.OS || cfg.Architecture != "" && cfg.Architecture != platform.Architecture {
		return nil, fmt.Errorf("open image %s: it is for %s/%s: %w", o.Ref, cfg.OS, cfg.Architecture, ErrNoImage)
	}
	im.config, im.diffIDs = cfg.Config, cfg.RootFS.DiffIDs
	return im, nil
}

// Digest is the digest of the image's manifest, "sha256:...".
func (im *Image) Digest() string { return im.digest }

// Env returns the image's environment, "NAME=value" each.
func (im *Image) Env() []string { return im.config.Env }

// Size returns the size of the image's layers as stored, usually compressed.
func (im *Image) Size() units.Bytes {
	m, err := im.img.Manifest()
	if err != nil {
		return 0
	}
	var n int64
	for _, l := range m.Layers {
		n += l.Size
	}
	return units.Bytes(n)
}

func fromRegistry(ctx context.Context, ref string) (v1.Image, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return nil, fmt.Errorf("neither a file nor a folder nor a valid image reference: %w", err)
	}
	img, err := remote.Image(r, remote.WithContext(ctx), remote.WithPlatform(platform), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err == nil {
		return img, nil
	}
	if te, ok := errors.AsType[*transport.Error](err); ok {
		return nil, fmt.Errorf("registry %s refuses (does the image exist, are you logged in?): %w", r.Context().RegistryStr(), te)
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return nil, fmt.Errorf("registry %s does not answer (check the network): %w", r.Context().RegistryStr(), err)
	}
	return nil, err
}

func fromLayout(dir string) (v1.Image, error) {
	p, err := layout.FromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read OCI layout: %w", err)
	}
	index, err := p.ImageIndex()
	if err != nil {
		return nil, fmt.Errorf("read OCI layout: %w", err)
	}
	return pick(index, 0)
}

// pick returns the first image of the index that fits the platform; an index may hold indexes.
func pick(index v1.ImageIndex, depth int) (v1.Image, error) {
	if depth > 4 {
		return nil, fmt.Errorf("indexes nested deeper than 4: %w", ErrNoImage)
	}
	m, err := index.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read index: %w", err)
	}
	for _, d := range m.Manifests {
		if d.Platform != nil && !d.Platform.Satisfies(platform) {
			continue
		}
		if d.MediaType.IsImage() {
			return index.Image(d.Digest)
		}
		if d.MediaType.IsIndex() {
			inner, err := index.ImageIndex(d.Digest)
			if err != nil {
				return nil, fmt.Errorf("read index: %w", err)
			}
			if img, err := pick(inner, depth+1); err == nil || !errors.Is(err, ErrNoImage) {
				return img, err
			}
		}
	}
	return nil, ErrNoImage
}

// fromArchive opens a docker archive in place; an OCI archive is unpacked into scratch first.
func fromArchive(ctx context.Context, file, scratch string) (v1.Image, error) {
	oci, err := holdsLayout(ctx, file)
	if err != nil {
		return nil, err
	}
	if !oci {
		img, err := tarball.ImageFromPath(file, nil)
		if err != nil {
			return nil, fmt.Errorf("read archive (neither `docker save` nor an OCI layout): %w", err)
		}
		return img, nil
	}
	dir := filepath.Join(scratch, "layout")
	tree, err := NewTree(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tree.Close() }()
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("open archive: %w", err)
	}
	defer func() { _ = f.Close() }()
	if err := newUnpacker(tree, DefaultLimits, false).apply(ctx, f); err != nil {
		return nil, err
	}
	return fromLayout(dir)
}

func holdsLayout(ctx context.Context, file string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, fmt.Errorf("open archive: %w", err)
	}
	defer func() { _ = f.Close() }()
	tr := tar.NewReader(f)
	for ctx.Err() == nil {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("read archive: %w", err)
		}
		switch filepath.Clean(hdr.Name) {
		case "oci-layout":
			return true, nil
		case "manifest.json": // newer docker writes both; either way will do
			return false, nil
		}
	}
	return false, ctx.Err()
}

// Unpack applies the image's layers to the tree, lowest first. Each layer's content is
// checked against the image's configuration. Layers of a registry are kept in cache.
func (im *Image) Unpack(ctx context.Context, tree *Tree, cache string, limits Limits, report step.Func) error {
	layers, err := im.img.Layers()
	if err != nil {
		return fmt.Errorf("read layers of %s: %w", im.ref, err)
	}
	// The digests of the configuration, which the image's own digest covers. A layer's DiffID
	// method may compute it from the very bytes it is to vouch for.
	if len(im.diffIDs) != len(layers) {
		return fmt.Errorf("image %s has %d layers and digests for %d: %w", im.ref, len(layers), len(im.diffIDs), ErrUnsafe)
	}
	u := newUnpacker(tree, limits, true)
	for i, l := range layers {
		pulse := report.Heartbeat(ctx, "root image", "")
		pulse.Set(int64(i), int64(len(layers)), "unpacking layers of %s", im.ref)
		err := im.layer(ctx, u, l, im.diffIDs[i], cache)
		pulse.Stop()
		if err != nil {
			return fmt.Errorf("layer %d of image %s: %w", i+1, im.ref, err)
		}
	}
	return nil
}

func (im *Image) layer(ctx context.Context, u *unpacker, l v1.Layer, want v1.Hash, cache string) error {
	if mt, err := l.MediaType(); err == nil && mt == types.DockerForeignLayer {
		return errors.New("its content is not in the image (a foreign layer)")
	}
	if im.remote {
		path, err := fetchLayer(ctx, l, cache, im.scratch)
		if err != nil {
			return err
		}
		if l, err = tarball.LayerFromFile(path, tarball.WithMediaType(types.OCILayer)); err != nil {
			return fmt.Errorf("read cached layer: %w", err)
		}
	}
	r, err := l.Uncompressed()
	if err != nil {
		return fmt.Errorf("open content: %w", err)
	}
	defer func() { _ = r.Close() }()
	sum := sha256.New()
	if err := u.apply(ctx, io.TeeReader(r, sum)); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want.Hex {
		return fmt.Errorf("content is %s, the image says %s: %w", got, want.Hex, ErrUnsafe)
	}
	return nil
}

// fetchLayer downloads a layer into cache, under its digest, and returns its path. The two
// folders are on one file system.
func fetchLayer(ctx context.Context, l v1.Layer, cache, scratch string) (string, error) {
	digest, err := l.Digest()
	if err != nil {
		return "", fmt.Errorf("read digest: %w", err)
	}
	path := filepath.Join(cache, "layer-"+digest.Hex)
	if got, err := hashFile(ctx, path); err == nil && got == digest.Hex {
		return path, nil
	}
	r, err := l.Compressed() // the library checks size and digest as it is read
	if err != nil {
		return "", fmt.Errorf("download: %w", err)
	}
	defer func() { _ = r.Close() }()
	tmp, err := os.CreateTemp(scratch, "layer-*")
	if err != nil {
		return "", fmt.Errorf("cache layer: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = io.Copy(tmp, ctxReader{ctx, r})
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", fmt.Errorf("download: %w", err)
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return "", fmt.Errorf("cache layer: %w", err)
	}
	return path, nil
}
