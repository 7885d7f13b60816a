package keys

import (
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

func open(t *testing.T, dir string) (*store.Store, *Ring) {
	t.Helper()
	s, err := store.Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	r, err := Load(s)
	if err != nil {
		t.Fatal(err)
	}
	return s, r
}

func TestAKeyOpensItsTeamAlsoAfterARestartAndIsNowhereOnTheDisk(t *testing.T) {
	dir := t.TempDir()
	s, r := open(t, dir)
	secret, k, err := r.Create("ci", "red")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(secret, "e2b_") || strings.ToLower(secret) != secret || len(secret) != 44 {
		t.Errorf("key %q: want e2b_ and 40 lower-case hex digits", secret)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "gateway.db"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw), secret[4:]) {
		t.Error("the file holds the key")
	}
	s, r = open(t, dir)
	if team, ok := r.Team(secret); !ok || team != "red" {
		t.Errorf("team of the key = %q, %v, want red", team, ok)
	}
	for _, wrong := range []string{"", "e2b_", secret[:43], secret + "0", strings.ToUpper(secret)} {
		if _, ok := r.Team(wrong); ok {
			t.Errorf("key %q is accepted", wrong)
		}
	}
	if err := r.Revoke(k.ID); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.Team(secret); ok {
		t.Error("a revoked key is accepted")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, r = open(t, dir)
	defer s.Close()
	if _, ok := r.Team(secret); ok {
		t.Error("a revoked key is accepted after a restart")
	}
	if n := len(r.List()); n != 1 {
		t.Errorf("%d keys listed, want the revoked one", n)
	}
}

func TestTokensAreStableAndDifferByIDAndUse(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, dir)
	m, err := LoadMinter(s)
	if err != nil {
		t.Fatal(err)
	}
	first := m.Access("i1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, _ = open(t, dir)
	defer s.Close()
	if m, err = LoadMinter(s); err != nil {
		t.Fatal(err)
	}
	if got := m.Access("i1"); got != first {
		t.Errorf("token after a restart = %s, want %s", got, first)
	}
	if m.Access("i2") == first || m.Traffic("i1") == first {
		t.Error("two tokens are equal")
	}
}

func TestTheCheckVectorOfTheClients(t *testing.T) {
	const token, want = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := Sign("hello.txt", "read", "user", token, 0); got != want {
		t.Errorf("signature = %s, want %s", got, want)
	}
}

func TestSignatures(t *testing.T) {
	const token = "secret"
	now := time.Unix(1000, 0)
	query := func(path, user, sig, expiry string) url.Values {
		q := url.Values{"path": {path}, "signature": {sig}}
		if user != "" {
			q.Set("username", user)
		}
		if expiry != "" {
			q.Set("signature_expiration", expiry)
		}
		return q
	}
	good := Sign("a b", "write", "", token, 1001)
	for name, c := range map[string]struct {
		method string
		query  url.Values
		want   bool
	}{
		"a good one":                       {"POST", query("a b", "", good, "1001"), true},
		"plus signs that became spaces":    {"POST", query("a b", "", strings.ReplaceAll(good, "+", " "), "1001"), true},
		"the other operation":              {"GET", query("a b", "", good, "1001"), false},
		"another path":                     {"POST", query("a  b", "", good, "1001"), false},
		"another user":                     {"POST", query("a b", "root", good, "1001"), false},
		"without its expiry":               {"POST", query("a b", "", good, ""), false},
		"a later expiry than the signed":   {"POST", query("a b", "", good, "2000"), false},
		"an expiry that is over":           {"POST", query("a b", "", Sign("a b", "write", "", token, 999), "999"), false},
		"an expiry that is no number":      {"POST", query("a b", "", good, "soon"), false},
		"an expiry of zero, which is none": {"POST", query("a b", "", Sign("a b", "write", "", token, 0), "0"), false},
		"cut":                              {"POST", query("a b", "", good[:20], "1001"), false},
	} {
		s, present, err := ParseSignature(c.method, c.query, now)
		if !present {
			t.Errorf("%s: not seen", name)
		}
		if got := err == nil && s.Matches(token); got != c.want {
			t.Errorf("%s: accepted = %v, want %v", name, got, c.want)
		}
	}
	if _, present, _ := ParseSignature("GET", url.Values{"path": {"x"}}, now); present {
		t.Error("a signature was seen where there is none")
	}
}
