// Package layers holds the order of the packages and checks it: bytes flow up
// the list, decisions flow down, and a package imports only from lower rows.
//
// The table is the one of docs/architecture.md. A sub-package takes the row of
// its parent and may import it, and its parent may import it. The check reads
// imports with go/parser, so that code behind build tags is checked too.
package layers

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
)

// Module is the import path that everything here starts with.
const Module = "github.com/agentzip/agentzip"

// top is the row of the binaries: they may import everything, nothing imports
// them.
const top = 100

// rows gives each folder below the module its row. Packages that are not here
// fail the test: decide where a new package belongs before it is imported.
var rows = map[string]int{
	"internal/units":      0,
	"internal/invariant":  0,
	"internal/fault":      0,
	"internal/uffd":       1,
	"internal/hostmem":    1,
	"internal/guestmem":   2,
	"internal/codec":      3,
	"internal/sketch":     3,
	"internal/pool":       4,
	"internal/dictionary": 4,
	"internal/library":    4,
	"internal/cohort":     5,
	"internal/pager":      6,
	"internal/prefetch":   7,
	"internal/policy":     8,
	"internal/vmm":        9,
	"internal/guestagent": 9,
	"internal/guestlink":  9,
	"internal/template":   10,
	"internal/sandbox":    10,
	"internal/gateway":    11,
	"internal/llmproxy":   11,
	"internal/traj":       12,
	"internal/report":     12,
	"internal/capture":    12,
	"internal/bench":      13,
	"internal/doctor":     14,
	"internal/daemon":     14,
	"internal/layers":     14,
	"api":                 0, // generated messages: data without behaviour
	"cmd/agentzip":        top,
	"cmd/agentzip-guest":  top,
	"scripts":             top,
}

// An Import is one import statement of a Go file of the module.
type Import struct {
	File string // path below the module's root
	From string // folder of the importing package, below the root
	To   string // folder of the imported package, below the root
	Test bool   // in a _test.go file
}

// owner returns the entry of the table that pkg belongs to: itself or its
// nearest listed parent.
func owner(pkg string) (name string, row int, known bool) {
	for p := pkg; p != "." && p != "/"; p = filepath.ToSlash(filepath.Dir(p)) {
		if r, ok := rows[p]; ok {
			return p, r, true
		}
	}
	return "", 0, false
}

// Check returns a sentence saying what is wrong with an import, or "".
// Test files may import sideways (a fake, a neighbour to compare with), never
// upward.
func Check(im Import) string {
	from, fromRow, ok := owner(im.From)
	if !ok {
		return fmt.Sprintf("%s: package %s has no row: add it to the table of internal/layers and of docs/architecture.md", im.File, im.From)
	}
	if im.To == "" {
		return ""
	}
	to, toRow, ok := owner(im.To)
	switch {
	case !ok:
		return fmt.Sprintf("%s: imports %s, which has no row", im.File, im.To)
	case from == to:
		return ""
	case toRow > fromRow:
		return fmt.Sprintf("%s: %s (row %d) imports upward: %s (row %d)", im.File, from, fromRow, to, toRow)
	case toRow == fromRow && !im.Test && !levelZero(fromRow):
		return fmt.Sprintf("%s: %s imports sideways: %s (both row %d)", im.File, from, to, fromRow)
	}
	return ""
}

// levelZero lets the value types and checks of row 0 use each other: they are
// leaves and have no state that could make a cycle of control.
func levelZero(row int) bool { return row == 0 }

// Imports reads every Go file below root and returns the imports within the
// module, and one Import with an empty To for each package (so that a package
// without any is checked for a row too).
func Imports(root string) ([]Import, error) {
	var all []Import
	seen := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if skipDir(d.Name()) && rel != "." {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") {
			return nil
		}
		from := filepath.ToSlash(filepath.Dir(rel))
		if !seen[from] {
			seen[from] = true
			all = append(all, Import{File: rel, From: from})
		}
		found, err := fileImports(path, rel, from)
		all = append(all, found...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read imports below %s: %w", root, err)
	}
	return all, nil
}

// skipDir names the folders that hold no packages of this module.
func skipDir(name string) bool {
	return name == "testdata" || name == "build" || name == "bin" || name == "tools" ||
		strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")
}

func fileImports(path, rel, from string) ([]Import, error) {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", rel, err)
	}
	var found []Import
	for _, spec := range f.Imports {
		to, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, fmt.Errorf("parse %s: %w", rel, err)
		}
		below, ok := strings.CutPrefix(to, Module+"/")
		if !ok {
			continue
		}
		found = append(found, Import{File: rel, From: from, To: below, Test: strings.HasSuffix(rel, "_test.go")})
	}
	return found, nil
}
