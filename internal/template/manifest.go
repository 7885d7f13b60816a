package template

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/template/rootfs"
	"github.com/agentzip/agentzip/internal/units"
	"github.com/agentzip/agentzip/internal/vmm"
)

// Format is the version of manifest and folder this code writes. A change that an
// older reader would misunderstand raises it.
const Format = 1

// A Manifest says what a template is and what its files must be.
type Manifest struct {
	Format  int       `json:"format"`
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	// Input is the digest of everything the build depended on. An equal
	// one means that building again would give the same template.
	Input  string `json:"input"`
	Source Source `json:"source"`

	Hardware vmm.Hardware `json:"hardware"`
	// DeadPages: "" in templates from before it was recorded, which means DeadZero.
	DeadPages DeadPages `json:"dead_pages,omitempty"`

	Host   HostFacts   `json:"host"` // the host it was built on and, where it matters, runs on
	Kernel KernelFacts `json:"kernel"`
	Agent  AgentFacts  `json:"agent"`

	Packages []rootfs.Package  `json:"packages,omitempty"`
	Env      []string          `json:"env,omitempty"` // of the container image
	WarmUp   []string          `json:"warm_up,omitempty"`
	Start    string            `json:"start,omitempty"`    // left running in the template; a boot from the disk alone runs it again
	Ready    string            `json:"ready,omitempty"`    // ends with 0 once Start answers
	WorkDir  string            `json:"work_dir,omitempty"` // where warm-up commands ran and tool calls may start
	Tools    map[string]string `json:"tools,omitempty"`    // versions of what built it
	Seconds  map[string]int    `json:"seconds,omitempty"`  // how long each step of the build took

	Resident units.Bytes         `json:"resident"` // memory all clones share: pages of memory.img that are not zero
	Files    map[string]FileSums `json:"files"`
}

// A FileSums is what a file must be.
type FileSums struct {
	Size int64 `json:"size"`
	// Blocks is the SHA-256, in hex, over each 4 KiB block that is not all
	// zeros, preceded by its number (see digest.go): holes cost no time.
	Blocks string `json:"blocks_sha256"`
}

// KernelFacts names the guest's kernel.
type KernelFacts struct {
	Package string `json:"package"`
	Version string `json:"version"`
	Release string `json:"release"`
	Cmdline string `json:"cmdline"`
}

// AgentFacts names the guest agent.
type AgentFacts struct {
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
}

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// ValidName refuses names that are not 1 to 63 of a-z, 0-9, ".", "_" and "-", the first a letter or digit.
func ValidName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("template name %q: 1 to 63 characters of a-z, 0-9, '.', '_', '-', starting with a letter or digit: %w", name, ErrBadName)
	}
	return nil
}

// write stores the manifest and its digest in dir.
func (m *Manifest) write(dir string) error {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	data = append(data, '\n')
	if err := os.WriteFile(filepath.Join(dir, manifestFile), data, 0o600); err != nil {
		return fmt.Errorf("write manifest: %w", err)
	}
	sum := sha256.Sum256(data)
	line := hex.EncodeToString(sum[:]) + "  " + manifestFile + "\n" // `sha256sum -c` reads it
	if err := os.WriteFile(filepath.Join(dir, sumFile), []byte(line), 0o600); err != nil {
		return fmt.Errorf("write digest of manifest: %w", err)
	}
	return nil
}

// readManifest reads and checks the manifest of the template in dir. Errors wrap
// ErrDamaged or ErrFormat.
func readManifest(dir, name string) (*Manifest, error) {
	data, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if err != nil {
		return nil, unreadable(name, manifestFile, err)
	}
	var version struct{ Format int }
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, damaged(name, manifestFile, "is no JSON: "+err.Error())
	}
	if version.Format != Format {
		return nil, fmt.Errorf("template %s has format %d, this AgentZip reads %d: rebuild it (agentzip template build %s) or use the AgentZip that built it: %w",
			name, version.Format, Format, name, ErrFormat)
	}
	want, err := os.ReadFile(filepath.Join(dir, sumFile))
	if err != nil {
		return nil, unreadable(name, sumFile, err)
	}
	sum := sha256.Sum256(data)
	if string(want) != hex.EncodeToString(sum[:])+"  "+manifestFile+"\n" {
		return nil, damaged(name, manifestFile, "does not match "+sumFile)
	}
	m := &Manifest{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(m); err != nil {
		return nil, damaged(name, manifestFile, err.Error())
	}
	if err := m.DeadPages.Mode().check(); err != nil {
		return nil, fmt.Errorf("template %s has the dead pages of a newer AgentZip: %w: %w", name, err, ErrFormat)
	}
	if m.Name != name {
		return nil, damaged(name, manifestFile, fmt.Sprintf("is that of template %q", m.Name))
	}
	for _, f := range contentFiles {
		if _, ok := m.Files[f]; !ok {
			return nil, damaged(name, manifestFile, "does not describe "+f)
		}
	}
	return m, nil
}

// unreadable says why a file of a template cannot be read: it is the template that is
// damaged if the file is not there or its disk fails, but not if this process lacks
// descriptors, memory or permission.
func unreadable(name, file string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return damaged(name, file, "is missing")
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO):
		return damaged(name, file, err.Error())
	}
	return fmt.Errorf("read template %s: %w", name, err)
}

// damaged says what is wrong with a template and what to do.
func damaged(name, file, what string) error {
	return fmt.Errorf("template %s: %s %s: build it again (agentzip template rm %s, then agentzip template build %s): %w",
		name, file, strings.TrimSpace(what), name, name, ErrDamaged)
}
