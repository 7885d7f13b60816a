package main

import (
	"strings"
	"testing"
)

func TestTheClosingLineAndVerdictFollowFromTheEvents(t *testing.T) {
	tests := []struct {
		name  string
		in    string
		last  string // the closing line
		shown string // must appear somewhere above it
		good  bool
	}{
		{
			"passes and skips are counted, subtests too",
			`{"Action":"pass","Package":"p","Test":"TestA/one"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p","Elapsed":1}`,
			"2 passed, 0 failed, 1 skipped", "ok    p: 2 tests", true,
		},
		{
			"a failed test shows its output",
			`{"Action":"output","Package":"p","Test":"TestA","Output":"got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
			"0 passed, 1 failed", "got 1, want 2", false,
		},
		{
			"a package that does not build is one failure and shows the compiler's words",
			`{"ImportPath":"p [p.test]","Action":"build-output","Output":"x.go:1: undefined: y\n"}
{"ImportPath":"p [p.test]","Action":"build-fail"}
{"Action":"fail","Package":"p","FailedBuild":"p [p.test]"}
{"Action":"pass","Package":"q","Test":"TestA"}`,
			"1 passed, 1 failed", "undefined: y", false,
		},
		{
			"a test that was running when its package panicked is shown",
			`{"Action":"output","Package":"p","Test":"TestHang","Output":"still waiting\n"}
{"Action":"output","Package":"p","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"p"}`,
			"0 passed, 1 failed", "TestHang was running:\nstill waiting", false,
		},
		{
			"a run that failed without an event is a failure",
			"{\"Action\":\"pass\",\"Package\":\"p\",\"Test\":\"TestA\"}\ngo: cannot find main module\nstage vm failed",
			"1 passed, 1 failed", "cannot find main module", false,
		},
		{
			"a run whose failure is already counted is not counted again",
			"{\"Action\":\"fail\",\"Package\":\"p\",\"Test\":\"TestA\"}\nstage unit failed\n{\"Action\":\"pass\",\"Package\":\"p\",\"Test\":\"TestB\"}\nstage race passed",
			"1 passed, 1 failed", "p TestA", false,
		},
		{"no test at all is not success", "", "0 passed, 0 failed", "no test ran", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out)
			if err := s.read(strings.NewReader(tt.in)); err != nil {
				t.Fatal(err)
			}
			if good := s.finish(); good != tt.good {
				t.Errorf("verdict %t, want %t", good, tt.good)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if last := lines[len(lines)-1]; last != tt.last {
				t.Errorf("closing line %q, want %q", last, tt.last)
			}
			if !strings.Contains(out.String(), tt.shown) {
				t.Errorf("%q is not in:\n%s", tt.shown, out.String())
			}
		})
	}
}
