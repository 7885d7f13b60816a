package capture

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/agentzip/agentzip/internal/units"
)

// Format is the version this code writes, and the only one it reads.
const Format = 1

// What callers branch on.
var (
	// ErrExists: there is something of that name already. It was not touched.
	ErrExists = errors.New("exists already")
	// ErrNotFound: there is no capture in that folder.
	ErrNotFound = errors.New("no capture")
	// ErrFormat: made by another version of AgentZip.
	ErrFormat = errors.New("capture has an unknown format")
	// ErrDamaged: a file is missing, cut short, or does not say what a Writer writes.
	ErrDamaged = errors.New("capture is damaged")
)

// Bounds of what a capture may claim. All are far above what a Writer is ever given.
const (
	maxMemory   = 64 * units.GiB
	maxSiblings = 256
	maxGaps     = 1 << 20
	maxInfo     = 256 * units.MiB // of capture.json: maxGaps of about 250 bytes
	maxText     = 4096            // bytes of a name or command; a Writer cuts longer commands
)

// Info describes a capture. Create wants Tool, Template, Machine, Source and Siblings; the
// Writer fills in the rest.
type Info struct {
	Format   int           `json:"format"`
	Tool     string        `json:"tool"` // the AgentZip that made it
	Created  time.Time     `json:"created"`
	Wall     time.Duration `json:"wall_ns"` // from Create to Commit
	Template Template      `json:"template"`
	Machine  Machine       `json:"machine"`
	Source   string        `json:"source"` // of the trajectories
	Memory   Content       `json:"memory"`
	Root     Content       `json:"root"`
	Siblings []Sibling     `json:"siblings"`
	Gaps     []GapInfo     `json:"gaps"` // in order of At
}

// Template says what the siblings were cloned from.
type Template struct {
	Name   string `json:"name"`
	Digest string `json:"digest"` // of everything its build depended on
}

// Machine says where the capture was made.
type Machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	OS     string `json:"os"`
	Kernel string `json:"kernel"`
	QEMU   string `json:"qemu"`
	Accel  string `json:"accel"`
}

// A Content is the memory or the root image of the template.
type Content struct {
	Size   units.Bytes `json:"size"`
	Pages  int64       `json:"pages"`         // that are not all zeros
	Length int64       `json:"length"`        // of its file in the capture
	Blocks string      `json:"blocks_sha256"` // over each of these pages, preceded by its number: as in a template's manifest
}

// A Sibling is one sandbox of the cohort; Gaps name it by its index.
type Sibling struct {
	Name       string `json:"name"`
	Trajectory string `json:"trajectory"`
}

// A GapInfo is one gap of one sibling. Times are offsets from the start of the run.
type GapInfo struct {
	Sibling int           `json:"sibling"`
	Call    int           `json:"call"` // the call that has ended, from 1
	Command string        `json:"command"`
	Start   time.Duration `json:"start_ns"` // of the call
	End     time.Duration `json:"end_ns"`   // of the call
	At      time.Duration `json:"at_ns"`    // its pages were asked for; they are read when a packer is free

	Private int64 `json:"private"` // private pages
	Changed int64 `json:"changed"` // of them with content: new or changed since the sibling's gap before
	Gone    int64 `json:"gone"`    // private in the gap before, no longer

	Offset int64 `json:"offset"` // of its zstd frame in the sibling's file
	Length int64 `json:"length"`
}

// Frames returns the number of pages of guest memory.
func (i *Info) Frames() int { return i.Memory.Size.Pages() }

// Bytes returns what the capture occupies, without capture.json.
func (i *Info) Bytes() units.Bytes {
	n := i.Memory.Length + i.Root.Length
	for _, g := range i.Gaps {
		n += g.Length
	}
	return units.Bytes(n)
}

// Totals adds up the counts of all gaps.
func (i *Info) Totals() (private, changed, gone int64) {
	for _, g := range i.Gaps {
		private += g.Private
		changed += g.Changed
		gone += g.Gone
	}
	return private, changed, gone
}

// parseInfo reads and checks capture.json. Errors wrap ErrFormat or ErrDamaged.
func parseInfo(data []byte) (*Info, error) {
	var version struct{ Format int }
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, fmt.Errorf("%w: %s is no JSON: %w", ErrDamaged, infoFile, err)
	}
	if version.Format != Format {
		return nil, fmt.Errorf("%w %d, this AgentZip reads %d: capture again, or use the AgentZip that made it", ErrFormat, version.Format, Format)
	}
	info := &Info{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(info); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, infoFile, err)
	}
	if err := info.check(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, infoFile, err)
	}
	return info, nil
}

// check holds every number against its bounds, so that readers need not.
func (i *Info) check() error {
	switch {
	case i.Memory.Size <= 0 || i.Memory.Size > maxMemory || i.Memory.Size%units.PageSize != 0:
		return fmt.Errorf("guest memory of %d bytes", i.Memory.Size)
	case i.Root.Size < 0 || i.Root.Size > maxMemory:
		return fmt.Errorf("root image of %d bytes", i.Root.Size)
	case len(i.Siblings) == 0 || len(i.Siblings) > maxSiblings:
		return fmt.Errorf("%d siblings", len(i.Siblings))
	case len(i.Gaps) > maxGaps:
		return fmt.Errorf("%d gaps", len(i.Gaps))
	}
	for name, c := range map[string]Content{"memory": i.Memory, "root": i.Root} {
		if c.Pages < 0 || c.Pages > blocks(c.Size) || c.Length <= 0 || c.Length > math.MaxInt64/2 {
			return fmt.Errorf("%s: %d pages of %d in %d bytes", name, c.Pages, blocks(c.Size), c.Length)
		}
	}
	for _, s := range i.Siblings {
		if len(s.Name) > maxText || len(s.Trajectory) > maxText {
			return errors.New("the name of a sibling is too long")
		}
	}
	return i.checkGaps()
}

// checkGaps wants the gaps in order of time, those of a sibling one after the other in its
// file without holes.
func (i *Info) checkGaps() error {
	frames := int64(i.Frames())
	last := make([]GapInfo, len(i.Siblings))
	for n, g := range i.Gaps {
		if g.Sibling < 0 || g.Sibling >= len(i.Siblings) {
			return fmt.Errorf("gap %d is of sibling %d of %d", n, g.Sibling, len(i.Siblings))
		}
		p := last[g.Sibling]
		switch {
		case n > 0 && g.At < i.Gaps[n-1].At:
			return fmt.Errorf("gap %d is before the one before it", n)
		case g.Call <= p.Call:
			return fmt.Errorf("gap %d of sibling %d is after call %d, the one before after %d", n, g.Sibling, g.Call, p.Call)
		case len(g.Command) > maxText:
			return fmt.Errorf("the command of gap %d is too long", n)
		case g.Private < 0 || g.Private > frames || g.Changed < 0 || g.Changed > g.Private || g.Gone < 0 || g.Gone > p.Private:
			return fmt.Errorf("gap %d has %d private pages, %d changed, %d gone, of %d", n, g.Private, g.Changed, g.Gone, frames)
		case g.Offset != p.Offset+p.Length || g.Length <= 0 || g.Length > math.MaxInt64/2-g.Offset:
			return fmt.Errorf("gap %d is said to be at %d+%d in the file of its sibling", n, g.Offset, g.Length)
		}
		last[g.Sibling] = g
	}
	return nil
}

// sortGaps puts gaps into the order of Info.Gaps.
func sortGaps(gaps []GapInfo) {
	slices.SortStableFunc(gaps, func(a, b GapInfo) int {
		switch {
		case a.At != b.At:
			return int(min(max(a.At-b.At, -1), 1))
		case a.Sibling != b.Sibling:
			return a.Sibling - b.Sibling
		}
		return a.Call - b.Call
	})
}

// blocks returns how many pages size bytes need.
func blocks(size units.Bytes) int64 { return int64((size + units.PageSize - 1) / units.PageSize) }

const (
	infoFile   = "capture.json"
	memoryFile = "memory.zst"
	rootFile   = "root.zst"
)

func siblingFile(i int) string { return fmt.Sprintf("sibling-%03d.pages.zst", i) }
