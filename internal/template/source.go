package template

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/template/step"
	"github.com/agentzip/agentzip/internal/units"
)

// Source says what a template's root image is made of: exactly one of Debian, OCI
// and Directory is set.
type Source struct {
	Debian *rootfs.Debian `json:"debian,omitempty"`
	// OCI is an image reference, layout folder or archive; see [rootfs.OCI].
	OCI string `json:"oci,omitempty"`
	// Directory is a folder with an unpacked root.
	Directory string `json:"directory,omitempty"`
	// Digest names the state of the source the build saw. Set by Build.
	Digest string `json:"digest"`
}

// Kind returns "debian", "oci", "directory" or "".
func (s Source) Kind() string {
	switch {
	case s.Debian != nil:
		return "debian"
	case s.OCI != "":
		return "oci"
	case s.Directory != "":
		return "directory"
	}
	return ""
}

func (s Source) check() error {
	n := 0
	for _, set := range []bool{s.Debian != nil, s.OCI != "", s.Directory != ""} {
		if set {
			n++
		}
	}
	if n != 1 {
		return fmt.Errorf("%d sources given, want one of packages, image or directory", n)
	}
	if s.Debian != nil && s.Debian.Suite == "" {
		return errors.New("no Debian suite given")
	}
	return nil
}

// An opened source knows its digest and can fill a tree.
type opened struct {
	digest string
	env    []string
	disk   units.Bytes // what unpacking it needs on disk, a generous guess
	unpack func(ctx context.Context, tree *rootfs.Tree, cache, scratch string, report step.Func) error
}

// open finds the source and its state; of an image in a registry it reads the manifest only.
func (s Source) open(ctx context.Context, scratch string) (*opened, error) {
	switch s.Kind() {
	case "debian":
		d := *s.Debian
		return &opened{digest: "debian:" + d.Digest(), disk: 2 * units.GiB, unpack: d.Unpack}, nil
	case "oci":
		im, err := rootfs.OCI{Ref: s.OCI}.Open(ctx, scratch)
		if err != nil {
			return nil, err
		}
		return &opened{
			digest: im.Digest(), env: im.Env(), disk: units.GiB + 8*im.Size(),
			unpack: func(ctx context.Context, tree *rootfs.Tree, cache, _ string, report step.Func) error {
				return im.Unpack(ctx, tree, cache, rootfs.DefaultLimits, report)
			},
		}, nil
	}
	d := rootfs.Directory{Path: s.Directory}
	digest, err := d.Digest(ctx)
	if err != nil {
		return nil, err
	}
	return &opened{
		digest: "directory:" + digest, disk: 2 * units.GiB,
		unpack: func(ctx context.Context, tree *rootfs.Tree, _, _ string, report step.Func) error {
			return d.Unpack(ctx, tree, rootfs.DefaultLimits, report)
		},
	}, nil
}
