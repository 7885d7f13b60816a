package pager

import (
	"context"

	"github.com/agentzip/agentzip/internal/units"
)

// A Selection says which pages a pass leaves alone. The zero value takes all.
type Selection struct {
	KeepExpected bool // those that Expect named
	KeepDirty    bool // of those that Expect named, the ones that had to be encoded
}

// EvictSome is Evict over some of the pages: in a short gap, bringing a page back for the next
// call costs more than its memory is worth.
func (p *Pager) EvictSome(ctx context.Context, s Selection) (EvictResult, error) {
	return p.passInTurn(ctx, passMode{keep: s})
}

// leaves reports whether the pass leaves a page alone.
func (p *Pager) leaves(s Selection, f units.Frame) bool {
	switch {
	case s == Selection{}, !p.expected(f):
		return false
	case s.KeepExpected:
		return true
	}
	return int(f) < p.table.frames && p.table.load(f).tag() != tagClean
}
