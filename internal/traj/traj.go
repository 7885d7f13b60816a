// Package traj reads what agents did and turns it into shell commands that a
// sandbox can replay.
//
// There are two sources: the built-in scenario (scenario.go), and recorded
// trajectories as JSON lines, plain or gzip'd (load.go). Both end in the same
// form: a Trajectory is a list of steps, each one shell command and the time
// that the model thought before it.
//
// Recorded tools that are not a shell (Read, Edit, Grep, file_editor, ...)
// become equivalent commands (tools.go). Tools that touch no sandbox (to-do
// lists, web searches, sub-agents) become think time. What cannot be mapped is
// dropped and counted, never guessed silently: see Tally.
//
// Recorded files are untrusted input: sizes are bounded, errors name file and
// line, and nothing here runs a command. All functions are pure but for reading
// files; a Trajectory is not changed after it was made.
package traj

import "time"

// A Kind is the class of a step, for statistics.
type Kind string

// The kinds of steps.
const (
	List   Kind = "list"   // ls, find, tree, Glob
	Search Kind = "search" // grep and the like
	Read   Kind = "read"   // cat, sed -n, nl, head, Read, view
	Edit   Kind = "edit"   // sed -i, a script that rewrites a file, Edit, str_replace
	Write  Kind = "write"  // a new file
	Python Kind = "python" // python -c, python script
	Test   Kind = "test"   // a test runner
	Git    Kind = "git"
	Net    Kind = "net" // needs the network: pip, curl, git clone
	Other  Kind = "other"
)

// A Step is one tool call.
type Step struct {
	Tool    string        // as recorded: "Bash", "Edit", "file_editor view"; the kind in the scenario
	Kind    Kind          // what it does
	Shell   string        // the command, for /bin/bash -l -c in the work tree; never empty
	Timeout time.Duration // asked for by the agent; 0 = the replay's own limit
	Think   time.Duration // from the end of the call before to the start of this one
	Lead    time.Duration // of Think at its end: the model was writing this call, so its tool was known; 0 = not recorded
	Drawn   bool          // Think was not recorded and is drawn from a distribution
	StandIn bool          // the recording lacks the content of a written file; ours stands in
	Exec    time.Duration // as recorded, on the recorder's machine; 0 = not recorded
}

// A Trajectory is what one agent did, in order.
type Trajectory struct {
	ID    string // unique within a set
	Task  string // what the agent was to do, one line
	Repo  string // the repository it worked on, as the source names it
	Steps []Step
	Tally Tally
}

// A Tally counts what became of a trajectory's recorded calls.
type Tally struct {
	Mapped     int // became a step
	NoSandbox  int // touched no sandbox: their time became think time
	Unmappable int // dropped: unknown tool, missing or oversized arguments
	StandIns   int // of Mapped: written files whose content was not recorded
	Drawn      int // of Mapped: think time drawn
}

// Add adds o to t.
func (t *Tally) Add(o Tally) {
	t.Mapped += o.Mapped
	t.NoSandbox += o.NoSandbox
	t.Unmappable += o.Unmappable
	t.StandIns += o.StandIns
	t.Drawn += o.Drawn
}

// Environment is what every replayed command gets in addition to the account's
// own environment. It removes what would make two runs of a command differ, and
// what would wait for an answer or a network that is not there.
func Environment() map[string]string {
	return map[string]string{
		"PYTHONHASHSEED":                "0", // the order of sets of strings
		"LC_ALL":                        "C.UTF-8",
		"TZ":                            "UTC",
		"TERM":                          "dumb",
		"COLUMNS":                       "120",
		"PAGER":                         "cat",
		"GIT_PAGER":                     "cat",
		"GIT_TERMINAL_PROMPT":           "0",
		"PIP_RETRIES":                   "0",
		"PIP_DEFAULT_TIMEOUT":           "5",
		"PIP_DISABLE_PIP_VERSION_CHECK": "1",
		"DEBIAN_FRONTEND":               "noninteractive",
		"ASYNC_TEST_TIMEOUT":            "60", // tornado's tests give up after 5 s, which an emulated CPU can need
	}
}

// WorkTree is where every command starts and where recorded paths point.
const WorkTree = "/testbed"
