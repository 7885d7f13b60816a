// Package doctor finds out whether this host can run sandboxes, by trying.
//
// A kernel that has userfaultfd may refuse it, a /dev/kvm that opens may only
// emulate, a QEMU that starts may lack a device. So each check does the thing in
// small instead of reading a version number, and says what it saw, why it matters
// and what to do.
//
// The checks are pure functions of a Host, the only part that touches the
// machine; tests give them a fake one. Run calls them one after the other (some
// measure time and would disturb each other) from the caller's goroutine.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// A Level is the verdict of one check.
type Level uint8

// The levels, from good to bad.
const (
	OK       Level = iota // works
	Degraded              // sandboxes run, but slower, bigger or with a figure less trustworthy
	Missing               // sandboxes cannot run until it is fixed
)

var levelNames = [...]string{"ok", "degraded", "missing"}

func (l Level) String() string { return levelNames[l] }

// MarshalJSON writes the level as its word.
func (l Level) MarshalJSON() ([]byte, error) { return json.Marshal(l.String()) }

// A Finding is what one check saw.
type Finding struct {
	Level  Level  `json:"level"`
	Detail string `json:"detail"`        // what was tried and seen
	Why    string `json:"why,omitempty"` // what it means for sandboxes; empty when ok
	Fix    string `json:"fix,omitempty"` // what to do about it; empty when ok
}

// A Result is a finding with the name of its check and the time it took.
type Result struct {
	Name string `json:"name"`
	Finding
	Millis float64 `json:"millis"`
}

// A Report is the outcome of all checks.
type Report struct {
	Overall Level    `json:"overall"` // the worst of the results
	Results []Result `json:"results"`
}

// checkTimeout bounds one check. Twice as much would only make a hung QEMU
// binary be reported later; the longest check, KVM's, needs 3 s at most.
const checkTimeout = 15 * time.Second

// A check looks at one thing.
type check struct {
	name string
	run  func(ctx context.Context, h *Host) Finding
}

// checks is every check in the order of the report: what stops everything first.
func checks() []check {
	return []check{
		{"platform", checkPlatform},
		{"root", checkRoot},
		{"userfaultfd", checkUserfault},
		{"/dev/userfaultfd", checkUserfaultDevice},
		{"PAGEMAP_SCAN", checkPagemapScan},
		{"QEMU", checkQEMU},
		{"KVM", checkKVM},
		{"agent and shim", checkLibFiles},
		{"template tools", checkTemplateTools},
		{"C compiler", checkCompiler},
		{"memory", checkMemory},
		{"memory pressure", checkPressure},
		{"disk", checkDisk},
		{"cgroups", checkCgroups},
		{"swap", checkSwap},
		{"huge pages", checkTHP},
		{"KSM", checkKSM},
		{"loop mount", checkLoopMount},
	}
}

// Run carries out every check on h. It stops early only when ctx ends; the
// report then holds the checks that were finished.
func Run(ctx context.Context, h *Host) (Report, error) {
	var rep Report
	for _, c := range checks() {
		if err := ctx.Err(); err != nil {
			return rep, fmt.Errorf("check %s: %w", c.name, context.Cause(ctx))
		}
		start := time.Now()
		limited, cancel := context.WithTimeout(ctx, checkTimeout)
		f := c.run(limited, h)
		cancel()
		rep.Results = append(rep.Results, Result{
			Name:    c.name,
			Finding: f,
			Millis:  float64(time.Since(start).Microseconds()) / 1000,
		})
		rep.Overall = max(rep.Overall, f.Level)
	}
	return rep, nil
}

// WriteText prints a report for people: a line per check, and below it, where
// something is wrong, why it matters and the fix.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	for _, res := range r.Results {
		fmt.Fprintf(&b, "%-8s  %-16s  %s\n", res.Level, res.Name, res.Detail)
		if res.Why != "" {
			fmt.Fprintf(&b, "%-8s  %-16s  why: %s\n", "", "", res.Why)
		}
		if res.Fix != "" {
			fmt.Fprintf(&b, "%-8s  %-16s  fix: %s\n", "", "", res.Fix)
		}
	}
	switch r.Overall {
	case OK:
		b.WriteString("\nThis host runs sandboxes at full speed.\n")
	case Degraded:
		b.WriteString("\nThis host runs sandboxes; see the degraded lines for what it costs.\n")
	default:
		b.WriteString("\nThis host cannot run sandboxes yet; see the missing lines.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func ok(format string, args ...any) Finding {
	return Finding{Level: OK, Detail: fmt.Sprintf(format, args...)}
}

func degraded(detail, why, fix string) Finding {
	return Finding{Level: Degraded, Detail: detail, Why: why, Fix: fix}
}

func missing(detail, why, fix string) Finding {
	return Finding{Level: Missing, Detail: detail, Why: why, Fix: fix}
}
