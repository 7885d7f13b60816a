package traj

import (
	"bufio"
	"embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The built-in scenario: four agents at work on tornado 6.2, the package of
// Debian 12, in a git repository at /testbed: what the built-in template
// "tornado" holds. It is our own writing. Each of the four has a task of its
// own, makes a mistake that a test or a check shows, and mends it. No command
// prints anything that differs between two runs once times, dates and addresses
// are normalised; tornado's tests that time themselves and fail on a slow
// machine (*linear_performance, test_unquote_large) are deselected for that.
//
// What it was made to resemble, and what it is (scenario_test.go holds it to
// the bounds; recorded are 16,846 calls of mini-swe-agent on SWE-bench Verified,
// 1,241 of Claude Code with Haiku 4.5 on SWE-rebench, 504 of R2E-Gym's agent):
//
//	                         recorded                              scenario
//	think before a call      p50 4.2-4.8, p90 11.7-11.8 s          p50 4.4, p90 11.3, max 19 s (tail capped at 20)
//	list and search          21 % mini, 22 % Claude Code           22 %
//	read                     24 % mini, 19 % Claude Code           16 %
//	edit and write           21 % mini, 12 % Claude Code, 46 % R2E 24 %
//	tests and python         21 % mini, 24 % Claude Code           31 %
//	git                      1 % mini, 8 % Claude Code             8 %
//	same command as another  15-24 % of calls                      6 %
//	exec, running something  p50 0.61 s (Bash, Haiku 4.5)          p50 0.4-0.6 s on one core of the build machine
//	calls per trajectory     p50 28-44                             12-13 (cut, to fit a demo)
//
//go:embed scenario
var scenarioFiles embed.FS

// scenarioNames is the order in which sandboxes get the trajectories.
var scenarioNames = []string{"escape", "headers", "locale", "options"}

// Scenario returns the built-in trajectories. They are parsed from embedded
// text; an error is a mistake in the program, found by its tests.
func Scenario() ([]Trajectory, error) {
	var out []Trajectory
	for _, name := range scenarioNames {
		data, err := scenarioFiles.ReadFile("scenario/" + name + ".txt")
		if err != nil {
			return nil, fmt.Errorf("read scenario %s: %w", name, err)
		}
		t, err := parseScenario("scenario/"+name, string(data))
		if err != nil {
			return nil, fmt.Errorf("parse scenario %s: %w", name, err)
		}
		out = append(out, t)
	}
	return out, nil
}

// parseScenario reads "task: ..." and then steps, each a line
// "-- KIND SECONDS --" followed by the command.
func parseScenario(id, text string) (Trajectory, error) {
	t := Trajectory{ID: id, Repo: "tornado"}
	var body strings.Builder
	flush := func() error {
		if len(t.Steps) == 0 {
			if strings.TrimSpace(body.String()) != "" {
				return errors.New("text before the first step")
			}
			return nil
		}
		s := &t.Steps[len(t.Steps)-1]
		s.Shell = strings.TrimRight(body.String(), "\n")
		body.Reset()
		if s.Shell == "" {
			return fmt.Errorf("step %d has no command", len(t.Steps))
		}
		return nil
	}
	scanner := bufio.NewScanner(strings.NewReader(text))
	for line := 1; scanner.Scan(); line++ {
		s := scanner.Text()
		if task, ok := strings.CutPrefix(s, "task: "); ok && line == 1 {
			t.Task = task
			continue
		}
		f := strings.Fields(s)
		if len(f) != 4 || f[0] != "--" || f[3] != "--" {
			body.WriteString(s + "\n")
			continue
		}
		if err := flush(); err != nil {
			return t, err
		}
		think, err := strconv.ParseFloat(f[2], 64)
		if err != nil {
			return t, fmt.Errorf("line %d: think time: %w", line, err)
		}
		t.Steps = append(t.Steps, Step{Tool: f[1], Kind: Kind(f[1]), Think: seconds(think)})
	}
	if err := scanner.Err(); err != nil {
		return t, err
	}
	if err := flush(); err != nil {
		return t, err
	}
	t.Tally.Mapped = len(t.Steps)
	return t, nil
}
