package template

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func TestLastWordsAreTheCauseAndNotTheCallTrace(t *testing.T) {
	const trace = "[    2.113000] CPU: 0 PID: 1 Comm: init Not tainted 6.1.0-57-cloud-amd64\r\n" +
		"[    2.113400] Call Trace:\r\n[    2.113500]  <TASK>\r\n[    2.113600]  dump_stack_lvl+0x44/0x5c\r\n" +
		"[    2.114000] ---[ end Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100 ]---\r\n"
	for _, tt := range []struct{ name, console, want string }{
		{
			"an agent that gives up makes the kernel panic",
			"agentzip-guest: mount /proc\r\nagentzip-guest: init failed: no root device\r\n" +
				"[    2.112000] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\r\n" + trace,
			"agentzip-guest: init failed: no root device; Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100",
		},
		{
			"a kernel that panics by itself",
			"Linux version 6.1\r\n[    0.500000] Kernel panic - not syncing: VFS: Unable to mount root fs\r\n" + trace,
			"Kernel panic - not syncing: VFS: Unable to mount root fs",
		},
		{"an agent that hangs", "agentzip-guest: waiting for the port\r\n\r\n", "agentzip-guest: waiting for the port"},
		{"a guest that says something else", "SeaBIOS\r\nNo bootable device.\r\n", "No bootable device."},
		{"a guest that says nothing", "\r\n", ""},
		{"bytes that are no text", "\xff\xfe broken\r\n", "? broken"},
	} {
		if got := lastWords([]byte(tt.console)); got != tt.want {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, tt.want)
		}
	}
}

func TestAFailedBootNamesTheFileWithTheWholeConsole(t *testing.T) {
	b := &build{store: testStore(t), spec: BuildSpec{Name: "small"}}
	console := "agentzip-guest: init failed: no disk\nline two\n"
	path := filepath.Join(b.store.cache("console"), "small.log")
	want := "agentzip-guest: init failed: no disk (console: " + path + ")"
	if got := b.explainConsole([]byte(console)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != console {
		t.Errorf("in the file: %q, %v", got, err)
	}
	b.spec.Hardware.Memory = 64 * units.MiB
	if got, want := b.explainConsole([]byte("\r\n")), "it said nothing; it had 64.0 MiB of memory"; got != want {
		t.Errorf("of a silent guest: got %q, want %q", got, want)
	}
	if err := os.RemoveAll(b.store.cache("console")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.store.cache("console"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := b.explainConsole([]byte(console)); got != "agentzip-guest: init failed: no disk" {
		t.Errorf("without a place for the file: got %q, want the cause alone", got)
	}
}
