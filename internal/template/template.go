// Package template builds the immutable images sandboxes are cloned from, and keeps them.
//
// A template is a folder of a [Store]. It goes through these states, and what
// is on disk always says which one it is in:
//
//	absent --Build--> half-written --rename--> whole --Remove--> absent
//	                  .tmp-NAME-*              NAME
//
// A half-written folder is never looked at; the next build removes it. A whole one
// never changes: its files are read-only, and Load refuses it when any of them is not
// byte for byte what the build wrote (manifest.json has their digests,
// manifest.sha256 has the manifest's).
//
// Layout of the state directory:
//
//	templates/NAME/{manifest.json,manifest.sha256,root.ext4,disk.img,memory.img,device.state,vmlinuz,initrd,content.index}
//	cache/base      archives of Debian packages, layers of OCI images
//	cache/kernel    unpacked kernels
//	cache/verified  what Load need not hash again
//	locks/          one file per template name, held by its builder
//
// Locks are advisory file locks, so they end with the process that holds them:
//
//	locks/build-NAME   exclusive while NAME is built or removed
//	templates/NAME     (the folder) shared by every loaded Template, exclusive to replace or remove it
//
// They are taken in this order. No goroutine waits for the second: who cannot
// have it says that the template is in use.
//
// A Store may be used from any goroutine, and several processes may share one.
package template

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/template/step"
)

// Event is what long work reports.
type Event = step.Event

// Progress receives events; see [step.Func].
type Progress = step.Func

// What callers branch on. Nothing was changed when one of these is returned.
var (
	// ErrNotFound: no template of that name. The message lists those that exist.
	ErrNotFound = errors.New("no such template")
	// ErrBadName: the name does not follow the rule of [ValidName].
	ErrBadName = errors.New("bad template name")
	// ErrDamaged: a file is missing, too much, or has changed since the build.
	ErrDamaged = errors.New("template is damaged")
	// ErrFormat: written by a newer AgentZip.
	ErrFormat = errors.New("template has an unknown format")
	// ErrOtherHost: built with another QEMU, accelerator or CPU than this host has.
	ErrOtherHost = errors.New("template was built for another host")
	// ErrInUse: sandboxes or another command hold it.
	ErrInUse = errors.New("template is in use")
	// ErrWarmUp: a warm-up command failed; the message has its output.
	ErrWarmUp = errors.New("warm-up command failed")
)

// Names of the files of a template.
const (
	manifestFile = "manifest.json"
	sumFile      = "manifest.sha256"
	rootFile     = "root.ext4"
	diskFile     = "disk.img"
	memoryFile   = "memory.img"
	stateFile    = "device.state"
	kernelFile   = "vmlinuz"
	initrdFile   = "initrd"
)

// contentFiles are the files that the manifest of every template describes. A folder with
// a file its manifest does not describe, or without one it does, is damaged.
var contentFiles = []string{rootFile, diskFile, memoryFile, stateFile, kernelFile, initrdFile}

// indexFile is derived from root image and memory. Templates built before there was a
// library of public pages do not have it.
const indexFile = "content.index"

// Template is a verified template. It keeps the store from removing or
// replacing the files until Close. Safe for concurrent use, Close excepted.
type Template struct {
	Manifest

	dir  string   // immutable
	lock *os.File // the folder, locked shared; owned by Close
}

// RootFile returns the path of the root image, to be attached read-only.
func (t *Template) RootFile() string { return filepath.Join(t.dir, rootFile) }

// DiskFile returns the path of the writable disk's first state; each clone gets a sparse copy.
func (t *Template) DiskFile() string { return filepath.Join(t.dir, diskFile) }

// StateFile returns the path of the device state.
func (t *Template) StateFile() string { return filepath.Join(t.dir, stateFile) }

// MemoryFile returns the path of the guest's memory, sparse.
func (t *Template) MemoryFile() string { return filepath.Join(t.dir, memoryFile) }

// KernelFile returns the path of the kernel image.
func (t *Template) KernelFile() string { return filepath.Join(t.dir, kernelFile) }

// InitrdFile returns the path of the initial ramdisk.
func (t *Template) InitrdFile() string { return filepath.Join(t.dir, initrdFile) }

// IndexFile returns the path of the index of public pages, which may not exist: see OpenLibrary.
func (t *Template) IndexFile() string { return filepath.Join(t.dir, indexFile) }

// OpenMemory loads the guest's memory into a sealed memory file. All clones of
// one process should share one: it costs Manifest.Resident of memory.
func (t *Template) OpenMemory() (*guestmem.Image, error) {
	im, err := guestmem.LoadImage(t.MemoryFile(), t.Hardware.Memory)
	if err != nil {
		return nil, fmt.Errorf("open memory of template %s: %w", t.Name, err)
	}
	return im, nil
}

// Close lets the store remove or replace the template. Clones that run keep
// their open files; no new one may be made.
func (t *Template) Close() error { return t.lock.Close() }
