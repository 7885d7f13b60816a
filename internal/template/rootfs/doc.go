// Package rootfs turns a source of files into the two disks of a template: the
// read-only root image and the writable disk every sandbox starts from.
//
// Three kinds of source exist, and all go through one door, the [Tree]:
//
//	Debian packages --mmdebstrap--> tar, cached --\
//	OCI image --layers, cached------------ tar ----+--> Tree --Prepare--> Tree --WriteExt4--> root.ext4
//	directory --walked-------------------- tar ---/
//
// The door trusts nobody: a tar entry can only create something inside the tree,
// whatever its name, its link target or an earlier entry says (see layer.go).
// Nothing is mounted and nothing of the tree is run on the host, except
// mmdebstrap's own package scripts and the Setup scripts of a Debian source,
// both in a chroot.
//
// A Tree is used by one goroutine at a time; the functions keep no state
// between calls. All of it runs as root, or uids could not be kept.
package rootfs
