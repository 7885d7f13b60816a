// Package units holds the value types that every other package counts in.
//
// It imports nothing and has no state; any goroutine may use it.
package units

import "fmt"

// PageSize is the size of a guest page and of a host page, in bytes. AgentZip
// runs on x86-64 hosts with 4 KiB base pages only; `agentzip doctor` checks it.
const PageSize = 4096

// A Page is the content of one guest page.
type Page [PageSize]byte

// A Frame is the number of a guest page: its offset in guest memory divided by
// PageSize. It says nothing about where the page is mapped in a VMM.
type Frame uint32

// Offset returns the frame's offset in guest memory, in bytes.
func (f Frame) Offset() int64 { return int64(f) * PageSize }

// Bytes is an amount of memory or disk, in bytes.
type Bytes int64

// Common amounts.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
)

// Pages returns how many whole pages b holds.
func (b Bytes) Pages() int { return int(b / PageSize) }

// String formats b with a binary unit and at most one decimal: "1.5 GiB".
func (b Bytes) String() string {
	switch {
	case b >= GiB || b <= -GiB:
		return fmt.Sprintf("%.1f GiB", float64(b)/float64(GiB))
	case b >= MiB || b <= -MiB:
		return fmt.Sprintf("%.1f MiB", float64(b)/float64(MiB))
	case b >= KiB || b <= -KiB:
		return fmt.Sprintf("%.1f KiB", float64(b)/float64(KiB))
	}
	return fmt.Sprintf("%d B", int64(b))
}
