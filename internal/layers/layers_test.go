package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

func TestEveryPackageOfTheTreeImportsOnlyFromLowerRows(t *testing.T) {
	imports, err := Imports(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(imports) < 10 {
		t.Fatalf("only %d imports found below %s: is this the module's root?", len(imports), root)
	}
	for _, im := range imports {
		if what := Check(im); what != "" {
			t.Error(what)
		}
	}
}

func TestTheCheckRefusesWhatTheTableForbids(t *testing.T) {
	tests := []struct {
		name string
		im   Import
		want string // part of the complaint; "" means allowed
	}{
		{"downward is what imports are for", Import{From: "internal/pager", To: "internal/codec"}, ""},
		{"upward is refused", Import{From: "internal/codec", To: "internal/pager"}, "imports upward"},
		{"sideways is refused", Import{From: "internal/dictionary", To: "internal/pool"}, "imports sideways"},
		{"a measurement fills reports", Import{From: "internal/bench", To: "internal/report"}, ""},
		{"a report knows no measurement", Import{From: "internal/report", To: "internal/bench"}, "imports upward"},
		{"a test may look sideways", Import{From: "internal/dictionary", To: "internal/pool", Test: true}, ""},
		{"a test may not look upward", Import{From: "internal/pool", To: "internal/pager", Test: true}, "imports upward"},
		{"a sub-package may import its parent", Import{From: "internal/vmm/vmmtest", To: "internal/vmm"}, ""},
		{"a parent may import its sub-package", Import{From: "internal/vmm", To: "internal/vmm/qmp"}, ""},
		{"a sub-package has its parent's row", Import{From: "internal/vmm/qmp", To: "internal/sandbox"}, "imports upward"},
		{"an unknown package must be given a row", Import{From: "internal/util"}, "has no row"},
		{"an unknown import must be given a row", Import{From: "internal/vmm", To: "internal/util"}, "has no row"},
		{"nobody imports a binary", Import{From: "internal/daemon", To: "cmd/agentzip"}, "imports upward"},
		{"value types may use each other", Import{From: "internal/fault", To: "internal/units"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := Check(tt.im)
			if tt.want == "" && got != "" {
				t.Errorf("refused: %s", got)
			}
			if !strings.Contains(got, tt.want) {
				t.Errorf("got %q, want something with %q", got, tt.want)
			}
		})
	}
}

func TestImportsAreReadFromFilesBehindBuildTagsToo(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "internal/codec/zstd_cgo.go", "//go:build cgo\n\npackage codec\n\nimport _ \""+Module+"/internal/pager\"\n")
	write(t, dir, "internal/codec/testdata/ignored.go", "package broken(")
	got, err := Imports(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []Import{
		{File: "internal/codec/zstd_cgo.go", From: "internal/codec"},
		{File: "internal/codec/zstd_cgo.go", From: "internal/codec", To: "internal/pager"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("imports (-want +got):\n%s", d)
	}
}

// The table of docs/architecture.md is for people, ours for the check. They
// must say the same.
func TestTheDocumentedTableIsTheCheckedOne(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile("(?m)^\\| (\\d+) \\| ((?:`[a-z]+` ?)+)\\|")
	name := regexp.MustCompile("`([a-z]+)`")
	documented := 0
	for _, m := range line.FindAllStringSubmatch(string(text), -1) {
		row, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range name.FindAllStringSubmatch(m[2], -1) {
			documented++
			got, known := rows["internal/"+n[1]]
			if !known || got != row {
				t.Errorf("%s: documented in row %d, checked in row %d (known: %t)", n[1], row, got, known)
			}
		}
	}
	if documented < 15 {
		t.Errorf("only %d packages found in the documented table: has its form changed?", documented)
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
