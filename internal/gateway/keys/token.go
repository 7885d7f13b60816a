package keys

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

// A Minter derives the tokens of sandboxes from a secret of this host.
type Minter struct {
	secret []byte // immutable
}

// secretID is the record of the host's secret.
const secretID = "token-secret"

// LoadMinter reads the host's secret, and makes one the first time.
func LoadMinter(s *store.Store) (*Minter, error) {
	var secret []byte
	ok, err := s.Get(store.Meta, secretID, &secret)
	if err != nil {
		return nil, fmt.Errorf("load token secret: %w", err)
	}
	if !ok {
		secret = make([]byte, sha256.Size)
		rand.Read(secret) // never fails (crypto/rand, Go 1.24)
		if err := s.Put(store.Meta, secretID, secret); err != nil {
			return nil, fmt.Errorf("make token secret: %w", err)
		}
	}
	if len(secret) != sha256.Size {
		return nil, errors.New("load token secret: it has the wrong length")
	}
	return &Minter{secret: secret}, nil
}

func (m *Minter) mint(use, id string) string {
	h := hmac.New(sha256.New, m.secret)
	fmt.Fprintf(h, "%s:%s", use, id)
	return hex.EncodeToString(h.Sum(nil)[:20])
}

// Access is the token of a sandbox's agent (envdAccessToken).
func (m *Minter) Access(id string) string { return m.mint("agent", id) }

// Traffic is the token of a sandbox's other ports, where it wants one.
func (m *Minter) Traffic(id string) string { return m.mint("traffic", id) }

// Upload lets its bearer upload the files of a hash for a team's builds.
func (m *Minter) Upload(team, hash string) string { return m.mint("upload", team+"/"+hash) }

// Equal compares two secrets in constant time.
func Equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// ErrSignature: a signature is missing, wrong or no longer valid.
var ErrSignature = errors.New("invalid signature")

// Sign returns the signature of a file URL: the path as given, op "read" or
// "write", user "" if none is named, expiry 0 for none.
func Sign(path, op, user, token string, expiry int64) string {
	text := path + ":" + op + ":" + user + ":" + token
	if expiry != 0 {
		text += ":" + strconv.FormatInt(expiry, 10)
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// A Signature is what a file URL says.
type Signature struct {
	path, op, user, given string
	expiry                int64
}

// ParseSignature reads the query of a request to /files. present is false
// without a signature.
func ParseSignature(method string, q url.Values, now time.Time) (s Signature, present bool, err error) {
	s = Signature{path: q.Get("path"), op: "read", user: q.Get("username"), given: q.Get("signature")}
	if s.given == "" {
		return s, false, nil
	}
	if method == "POST" {
		s.op = "write"
	}
	// Where a "+" was not escaped it has become a space; base64 has no spaces.
	s.given = strings.ReplaceAll(s.given, " ", "+")
	if text := q.Get("signature_expiration"); text != "" {
		if s.expiry, err = strconv.ParseInt(text, 10, 64); err != nil || s.expiry <= 0 {
			return s, true, fmt.Errorf("%w: signature_expiration is not a time", ErrSignature)
		}
		if now.Unix() > s.expiry {
			return s, true, fmt.Errorf("%w: it has expired", ErrSignature)
		}
	}
	return s, true, nil
}

// Matches says whether the signature was made with token.
func (s Signature) Matches(token string) bool {
	return Equal(s.given, Sign(s.path, s.op, s.user, token, s.expiry))
}
