//go:build !race

package library

import (
	"testing"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/units"
)

// Not under the race detector: its hook in unix.Pread moves the caller's page to the heap.
func TestFindAndReadAllocateNothing(t *testing.T) {
	f := small(t)
	l := f.build(t)
	absent, ofMemory, ofRoot := pageOf(99), pageOf(1), pageOf(4)
	idOfMemory, _ := f.first(ofMemory)
	idOfRoot, _ := f.first(ofRoot)
	var dst units.Page
	for name, do := range map[string]func(){
		"a miss":          func() { l.Find(absent, codec.Checksum(absent)) },
		"a hit in memory": func() { l.Find(ofMemory, codec.Checksum(ofMemory)) },
		"a hit in root":   func() { l.Find(ofRoot, codec.Checksum(ofRoot)) },
		"Read of memory":  func() { _ = l.Read(&dst, idOfMemory) },
		"Read of root":    func() { _ = l.Read(&dst, idOfRoot) },
	} {
		if n := testing.AllocsPerRun(100, do); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
