package gateway_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentzip/agentzip/internal/gateway"
)

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "serve.toml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestTheEnvironmentIsStrongerThanTheFileAndTheFileThanTheDefaults(t *testing.T) {
	c := gateway.Default()
	env := map[string]string{"AGENTZIP_PORT": "2", "AGENTZIP_MAX_TIMEOUT": "3h"}
	file := writeConfig(t, "port = 1\nwarm = 7\nmax_timeout = \"2h\"\n[aliases]\nbase = \"x\"\n[teams.ci]\nmax_sandboxes = 9\n")
	if err := c.Load(file, func(k string) string { return env[k] }); err != nil {
		t.Fatal(err)
	}
	want := gateway.Default()
	want.Port, want.Warm, want.MaxTimeout = 2, 7, 3*time.Hour
	want.Aliases = map[string]string{"base": "x"}
	want.Teams = map[string]gateway.Team{"ci": {MaxSandboxes: 9}}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

func TestWhatIsPrintedIsReadBackAndHoldsNoKey(t *testing.T) {
	c := gateway.Default()
	c.Warm, c.CreateRate, c.APIKey, c.Domain = 5, 1.5, testKey, "a\"b"
	c.Aliases = map[string]string{"base": "tornado", "odd name": "x"}
	c.Teams = map[string]gateway.Team{"ci": {MaxSandboxes: 3, CreatesPerSecond: 0.5}}
	var text bytes.Buffer
	if err := c.Print(&text); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text.String(), testKey) {
		t.Error("the printed configuration holds the API key")
	}
	got := gateway.Default()
	if err := got.Load(writeConfig(t, text.String()), func(string) string { return "" }); err != nil {
		t.Fatalf("%v in\n%s", err, text.String())
	}
	c.APIKey = ""
	if diff := cmp.Diff(c, got); diff != "" {
		t.Error(diff)
	}
	for _, s := range c.Settings() {
		if !strings.Contains(text.String(), "# "+s.Help+"\n"+s.Name+" = ") {
			t.Errorf("%s has no comment", s.Name)
		}
	}
}

func TestSettingsThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ file, key, value, says string }{
		"an unknown key":             {"prot = 1", "", "", "unknown key \"prot\""},
		"an unknown key of a team":   {"[teams.x]\nmax = 1", "", "", "unknown key"},
		"a value of another type":    {"port = \"x\"", "", "", "port"},
		"a variable that is no int":  {"", "AGENTZIP_PORT", "x", "AGENTZIP_PORT"},
		"a port that is none":        {"port = 70000", "", "", "port 70000"},
		"an end that is none":        {"on_exit = \"sleep\"", "", "", "on_exit"},
		"a negative limit":           {"warm = -1", "", "", "negative"},
		"a key that clients refuse":  {"api_key = \"abc\"", "", "", "e2b_"},
		"a team that cannot have it": {"[teams.\"a/b\"]", "", "", "teams"},
	} {
		config := gateway.Default()
		err := config.Load(writeConfig(t, c.file), func(k string) string {
			if k == c.key {
				return c.value
			}
			return ""
		})
		if err == nil {
			err = config.Check()
		}
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want an error that says %q", name, err, c.says)
		}
	}
}
