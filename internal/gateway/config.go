package gateway

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/agentzip/agentzip/internal/gateway/keys"
)

// A Config is what a user may choose. Each setting can be given, from the
// strongest to the weakest, as a flag, as an environment variable, or in a TOML
// file; Settings is the list. Teams and aliases stand in the file only.
type Config struct {
	Port      int    `toml:"port"`
	Addresses string `toml:"addresses"`
	Domain    string `toml:"domain"`
	Dir       string `toml:"dir"`
	OnExit    string `toml:"on_exit"`
	APIKey    string `toml:"api_key"`

	Template    string        `toml:"template"`
	Warm        int           `toml:"warm"`
	Isolation   string        `toml:"isolation"`
	Compression bool          `toml:"compression"`
	PoolMiB     int           `toml:"pool_mib"`
	MaxTotal    int           `toml:"max_sandboxes"`
	MaxPerTeam  int           `toml:"team_max_sandboxes"`
	CreateRate  float64       `toml:"team_creates_per_second"`
	MaxTimeout  time.Duration `toml:"max_timeout"`
	MinWake     time.Duration `toml:"min_wake"`
	MaxActive   int           `toml:"max_requests_per_sandbox"`
	MaxConns    int           `toml:"max_connections"`

	Aliases map[string]string `toml:"aliases"`
	Teams   map[string]Team   `toml:"teams"`
}

// A Team is the limits of one team; 0 is the default's.
type Team struct {
	MaxSandboxes     int     `toml:"max_sandboxes"`
	CreatesPerSecond float64 `toml:"creates_per_second"`
}

// What becomes of running sandboxes when the server ends.
const (
	OnExitPause = "pause"
	OnExitKill  = "kill"
)

// Default returns the configuration of a server that was told nothing.
func Default() *Config {
	return &Config{
		Port: 7070, Addresses: "127.0.0.1,::1", OnExit: OnExitPause,
		Warm: 2, Isolation: "cohort", Compression: true,
		MaxTotal: 1000, MaxPerTeam: 500, MaxTimeout: 24 * time.Hour, MinWake: 5 * time.Minute,
		MaxActive: 4096, MaxConns: 20000,
	}
}

// A Setting is one choice of a Config.
type Setting struct {
	Name  string // as in the file, with underscores
	Help  string
	Value any // pointer into the Config: *string, *int, *bool, *float64 or *time.Duration
}

// Flag returns the setting's name as a flag.
func (s Setting) Flag() string { return strings.ReplaceAll(s.Name, "_", "-") }

// Env returns the setting's name as an environment variable.
func (s Setting) Env() string { return "AGENTZIP_" + strings.ToUpper(s.Name) }

// Settings lists the choices, pointing into c.
func (c *Config) Settings() []Setting {
	return []Setting{
		{"port", "the one port of control plane and data plane; 0 takes any that is free", &c.Port},
		{"addresses", "comma list of addresses to listen on", &c.Addresses},
		{"domain", "what getHost() builds names with; empty: localhost:PORT, which browsers and curl resolve", &c.Domain},
		{"dir", "folder of the gateway's records and paused sandboxes; empty: gateway below the state folder", &c.Dir},
		{"on_exit", "what becomes of running sandboxes at the end: pause or kill", &c.OnExit},
		{"api_key", "accept this key too, for the team \"default\"; it is not stored", &c.APIKey},
		{"template", "template behind the alias \"base\"; empty: a template of that name, else the only one there is", &c.Template},
		{"warm", "VMMs kept ready for the next create", &c.Warm},
		{"isolation", "what siblings of one cohort share: none, cohort or strict as for agentzip run", &c.Isolation},
		{"compression", "compress sandboxes while they wait", &c.Compression},
		{"pool_mib", "limit of each cohort's pool in MiB; 0: what a pool can address (4 GiB)", &c.PoolMiB},
		{"max_sandboxes", "sandboxes that run at once, of all teams; more are answered 429", &c.MaxTotal},
		{"team_max_sandboxes", "sandboxes of one team that run at once; 0: any number", &c.MaxPerTeam},
		{"team_creates_per_second", "creations of one team a second, over a burst of 64; 0: any number", &c.CreateRate},
		{"max_timeout", "longest time to live", &c.MaxTimeout},
		{"min_wake", "least time to live of a sandbox that traffic resumed", &c.MinWake},
		{"max_requests_per_sandbox", "requests to one sandbox at once", &c.MaxActive},
		{"max_connections", "connections at once; more wait to be accepted", &c.MaxConns},
	}
}

// Load puts what the file at path and the environment say over c. path "" is no
// file. Keys that mean nothing are refused.
func (c *Config) Load(path string, getenv func(string) string) error {
	if path != "" {
		meta, err := toml.DecodeFile(path, c)
		if err != nil {
			return fmt.Errorf("read config %s: %w", path, err)
		}
		if unknown := meta.Undecoded(); len(unknown) > 0 {
			return fmt.Errorf("read config %s: unknown key %q (see: agentzip serve --print-config)", path, unknown[0].String())
		}
	}
	for _, s := range c.Settings() {
		if v := getenv(s.Env()); v != "" {
			if err := s.Set(v); err != nil {
				return fmt.Errorf("%s: %w", s.Env(), err)
			}
		}
	}
	return nil
}

// Set reads the setting from text.
func (s Setting) Set(text string) error {
	var err error
	switch p := s.Value.(type) {
	case *string:
		*p = text
	case *int:
		*p, err = strconv.Atoi(text)
	case *bool:
		*p, err = strconv.ParseBool(text)
	case *float64:
		*p, err = strconv.ParseFloat(text, 64)
	case *time.Duration:
		*p, err = time.ParseDuration(text)
	default:
		panic(fmt.Sprintf("setting %s has type %T", s.Name, s.Value))
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", s.Name, text, errors.Unwrap(err))
	}
	return nil
}

// Check refuses what cannot be.
func (c *Config) Check() error {
	switch {
	case c.Port < 0 || c.Port > 65535:
		return fmt.Errorf("port %d: use 0 to 65535", c.Port)
	case c.Addresses == "":
		return errors.New("addresses: at least one")
	case c.OnExit != OnExitPause && c.OnExit != OnExitKill:
		return fmt.Errorf("on_exit %q: use pause or kill", c.OnExit)
	case c.Warm < 0 || c.PoolMiB < 0 || c.MaxTotal < 0 || c.MaxPerTeam < 0 || c.CreateRate < 0 || c.MaxActive < 0 || c.MaxConns < 0:
		return errors.New("a limit is negative")
	case c.MaxTimeout < time.Second:
		return fmt.Errorf("max_timeout %s: at least a second", c.MaxTimeout)
	case c.APIKey != "" && !strings.HasPrefix(c.APIKey, keys.Prefix):
		return fmt.Errorf("api_key must start with %s and go on in lower-case hex digits: clients check it", keys.Prefix)
	}
	for name := range c.Teams {
		if err := keys.ValidName(name); err != nil {
			return fmt.Errorf("teams: %w", err)
		}
	}
	return nil
}

// Print writes c as a commented TOML file, without the API key.
func (c *Config) Print(w io.Writer) error {
	var b strings.Builder
	b.WriteString("# Configuration of `agentzip serve`. Each setting may also be given as a flag\n" +
		"# (--max-timeout) or in the environment (AGENTZIP_MAX_TIMEOUT). A flag is\n" +
		"# stronger than the environment, the environment stronger than this file.\n")
	for _, s := range c.Settings() {
		fmt.Fprintf(&b, "\n# %s\n", s.Help)
		switch p := s.Value.(type) {
		case *string:
			text := *p
			if s.Name == "api_key" {
				text = ""
			}
			fmt.Fprintf(&b, "%s = %q\n", s.Name, text)
		case *int:
			fmt.Fprintf(&b, "%s = %d\n", s.Name, *p)
		case *bool:
			fmt.Fprintf(&b, "%s = %t\n", s.Name, *p)
		case *float64:
			fmt.Fprintf(&b, "%s = %.3f\n", s.Name, *p)
		case *time.Duration:
			fmt.Fprintf(&b, "%s = %q\n", s.Name, p.String())
		}
	}
	b.WriteString("\n# Further names of templates.\n[aliases]\n")
	for _, k := range sortedKeys(c.Aliases) {
		fmt.Fprintf(&b, "%q = %q\n", k, c.Aliases[k])
	}
	b.WriteString("\n# Limits of single teams, instead of the general ones:\n# [teams.NAME]\n# max_sandboxes = 10\n# creates_per_second = 2.0\n")
	for _, k := range sortedKeys(c.Teams) {
		fmt.Fprintf(&b, "[teams.%q]\nmax_sandboxes = %d\ncreates_per_second = %.3f\n", k, c.Teams[k].MaxSandboxes, c.Teams[k].CreatesPerSecond)
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string {
	names := make([]string, 0, len(m))
	for k := range m {
		names = append(names, k)
	}
	slices.Sort(names)
	return names
}

// teamLimit is how many sandboxes of a team may run at once.
func (c *Config) teamLimit(team string) int {
	if n := c.Teams[team].MaxSandboxes; n > 0 {
		return n
	}
	return c.MaxPerTeam
}

func (c *Config) teamRate(team string) float64 {
	if r := c.Teams[team].CreatesPerSecond; r > 0 {
		return r
	}
	return c.CreateRate
}

// DefaultConfigFile is read if it exists and no other is named.
const DefaultConfigFile = "/etc/agentzip/serve.toml"

// ConfigFile returns the file to read: the one named, else the default one if it exists.
func ConfigFile(named string) string {
	if named != "" {
		return named
	}
	if _, err := os.Stat(DefaultConfigFile); err == nil {
		return DefaultConfigFile
	}
	return ""
}
