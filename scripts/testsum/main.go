// Command testsum reads the events of `go test -json` on stdin, prints a line
// for each package and the output of what failed, and closes with the one line
// that people and CI read:
//
//	412 passed, 0 failed, 3 skipped
//
// Several runs may follow each other on stdin; a line that is not JSON is passed
// on, and "stage NAME failed" marks a run whose exit code was not zero, which
// counts as a failure if none of its tests explains it.
//
// Exit code: 0 if nothing failed and something passed, 1 otherwise.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	s := newSummary(os.Stdout)
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
		os.Exit(1)
	}
	if !s.finish() {
		os.Exit(1)
	}
}

// event is what `go doc test2json` describes.
type event struct {
	Action      string
	Package     string
	ImportPath  string // instead of Package in events of the build
	Test        string
	Output      string
	Elapsed     float64
	FailedBuild string
}

// test names one test of one package.
type test struct{ pkg, name string }

// slow is how long a test must take, in seconds, for a line of its own: in a
// silence much longer than this people ask whether anything happens.
const slow = 5

// summary counts, and keeps the output of what has not passed yet.
type summary struct {
	out                     io.Writer
	passed, failed, skipped int
	output                  map[test]*strings.Builder // name "" is the package's own
	failedIn                map[string]int            // package -> failed tests
	passedIn                map[string]int
	failedBefore            int // s.failed when the present stage began
	failures                []string
}

func newSummary(out io.Writer) *summary {
	return &summary{
		out:      out,
		output:   map[test]*strings.Builder{},
		failedIn: map[string]int{},
		passedIn: map[string]int{},
	}
}

func (s *summary) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 64<<20) // a test may print a very long line
	for lines.Scan() {
		line := lines.Text()
		var e event
		if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
			s.plain(line)
			continue
		}
		s.event(e)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read test events: %w", err)
	}
	return nil
}

// plain handles a line that is no event.
func (s *summary) plain(line string) {
	var stage string
	switch {
	case strings.HasPrefix(line, "stage "):
		if n, _ := fmt.Sscanf(line, "stage %s failed", &stage); n == 1 && strings.HasSuffix(line, " failed") && s.failed == s.failedBefore {
			s.fail(line)
		}
		s.failedBefore = s.failed
	default:
		fmt.Fprintln(s.out, line)
	}
}

func (s *summary) event(e event) {
	if e.Package == "" {
		e.Package = e.ImportPath
	}
	id := test{e.Package, e.Test}
	switch e.Action {
	case "output", "build-output":
		b := s.output[id]
		if b == nil {
			b = &strings.Builder{}
			s.output[id] = b
		}
		b.WriteString(e.Output)
	case "pass", "skip", "fail":
		if e.Test != "" {
			s.testDone(id, e)
		} else {
			s.packageDone(e)
		}
		delete(s.output, id)
	}
}

func (s *summary) testDone(id test, e event) {
	switch e.Action {
	case "pass":
		s.passed++
		s.passedIn[e.Package]++
	case "skip":
		s.skipped++
	case "fail":
		s.failedIn[e.Package]++
		fmt.Fprintf(s.out, "\n--- %s %s\n%s\n", e.Package, e.Test, s.text(id))
		s.fail(e.Package + " " + e.Test)
	}
	if e.Elapsed >= slow && !strings.Contains(e.Test, "/") {
		fmt.Fprintf(s.out, "      %s %s (%.1f s)\n", e.Action, e.Test, e.Elapsed)
	}
}

func (s *summary) packageDone(e event) {
	defer func() {
		delete(s.failedIn, e.Package)
		delete(s.passedIn, e.Package)
	}()
	switch {
	case e.Action == "fail":
		// A build error, a panic outside a test, a timeout: the package itself failed.
		if s.failedIn[e.Package] == 0 {
			fmt.Fprintf(s.out, "\n--- %s\n%s%s\n", e.Package, s.text(test{e.FailedBuild, ""}), s.text(test{e.Package, ""}))
			for id := range s.output {
				if id.pkg == e.Package && id.name != "" {
					fmt.Fprintf(s.out, "%s was running:\n%s\n", id.name, s.text(id))
				}
			}
			s.fail(e.Package)
		}
		fmt.Fprintf(s.out, "FAIL  %s (%.1f s)\n", e.Package, e.Elapsed)
	case s.passedIn[e.Package] > 0:
		fmt.Fprintf(s.out, "ok    %s: %d tests (%.1f s)\n", e.Package, s.passedIn[e.Package], e.Elapsed)
	}
}

func (s *summary) text(id test) string {
	if b := s.output[id]; b != nil {
		return b.String()
	}
	return ""
}

func (s *summary) fail(what string) {
	s.failed++
	s.failures = append(s.failures, what)
}

// finish prints the closing lines and reports whether all is well.
func (s *summary) finish() bool {
	if len(s.failures) > 0 {
		fmt.Fprintln(s.out, "\nfailed:")
		for _, f := range s.failures {
			fmt.Fprintf(s.out, "  %s\n", f)
		}
	}
	if s.passed+s.failed == 0 {
		fmt.Fprintln(s.out, "no test ran")
	}
	fmt.Fprintf(s.out, "\n%d passed, %d failed", s.passed, s.failed)
	if s.skipped > 0 {
		fmt.Fprintf(s.out, ", %d skipped", s.skipped)
	}
	fmt.Fprintln(s.out)
	return s.failed == 0 && s.passed > 0
}
