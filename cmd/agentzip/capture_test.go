package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/capture"
	"github.com/agentzip/agentzip/internal/units"
)

func TestCaptureChecksItsFlagsBeforeAnythingStarts(t *testing.T) {
	for args, want := range map[string]string{
		"dir -n 0":             "--sandboxes 0",
		"dir --gap-scale=-1":   "--gap-scale -1",
		"dir --match tornado":  "need --trajectories",
		"":                     "accepts 1 arg",
		"one two":              "accepts 1 arg",
		"dir --max-calls=-100": "negative",
	} {
		cmd := newRootCmd()
		cmd.SetArgs(append([]string{"capture"}, strings.Fields(args)...))
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		err := cmd.ExecuteContext(t.Context())
		if err != nil && strings.Contains(err.Error(), errNotRoot.Error()) {
			t.Skip(err)
		}
		if err == nil || !strings.Contains(err.Error(), want) || exitCode(t.Context(), err) != 2 {
			t.Errorf("%q: %v, want %q and exit code 2", args, err, want)
		}
	}
}

func TestCaptureSaysWhatItCaptured(t *testing.T) {
	info := &capture.Info{
		Wall: 61 * time.Second, Template: capture.Template{Name: "tornado"},
		Memory: capture.Content{Size: 512 * units.MiB, Pages: 16384, Length: 1 << 20}, Root: capture.Content{Size: 268 * units.MiB, Length: 2 << 20},
		Siblings: make([]capture.Sibling, 2),
		Gaps:     []capture.GapInfo{{Private: 100, Changed: 100, Length: 1 << 19}, {Private: 300, Changed: 50, Gone: 1, Length: 1 << 19}},
	}
	var out bytes.Buffer
	if err := writeCapture(&out, "pages", info); err != nil {
		t.Fatal(err)
	}
	want := `template   tornado, 512.0 MiB of memory, of it 64.0 MiB that is not zero; root image 268.0 MiB
siblings   2, 2 gaps
pages      400 private over all gaps, 150 of them (37.5 %) new or changed, 1 gone
folder     pages: 4.0 MiB (memory 1.0 MiB, root image 2.0 MiB, pages 1.0 MiB)

capture dir=pages siblings=2 gaps=2 private=400 changed=150 bytes=4194304 seconds=61
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("summary (-want +got):\n%s", d)
	}
	out.Reset()
	if err := writeCapture(&out, "pages", &capture.Info{}); err != nil || !strings.Contains(out.String(), "(0.0 %)") {
		t.Errorf("nothing captured: %v\n%s", err, out.String())
	}
}
