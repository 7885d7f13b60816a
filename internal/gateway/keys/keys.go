// Package keys knows who may do what: API keys of teams, access tokens of
// sandboxes, signatures of file URLs.
//
// Of an API key only its SHA-256 is kept: a key is 160 random bits, so there is
// nothing to guess and no need of a slow hash. A sandbox's tokens are a keyed
// hash of its id: they survive restarts and resumes without being stored.
//
// All compares of secrets take the same time whatever differs.
//
// Lock order: Ring.mu, then nothing.
package keys

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/store"
)

// Prefix of every API key; clients check it.
const Prefix = "e2b_"

// keyBytes of entropy in a key.
const keyBytes = 20

// DefaultTeam owns what is made with a key that names no other.
const DefaultTeam = "default"

// ErrNoKey: no key of that id.
var ErrNoKey = errors.New("no such key")

var namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// ValidName refuses names of keys and teams that are not 1 to 63 of a-z, 0-9, ".", "_" and "-".
func ValidName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("name %q: 1 to 63 characters of a-z, 0-9, '.', '_', '-', starting with a letter or digit", name)
	}
	return nil
}

// A Ring is the API keys of one host. Safe for concurrent use.
type Ring struct {
	store *store.Store // immutable

	mu     sync.RWMutex
	byHash map[[sha256.Size]byte]store.Key // guarded by mu; those that are valid
	all    map[string]store.Key            // guarded by mu; by id, revoked ones too
}

// Load reads the keys of the store.
func Load(s *store.Store) (*Ring, error) {
	r := &Ring{store: s, byHash: map[[sha256.Size]byte]store.Key{}, all: map[string]store.Key{}}
	err := store.Each(s, store.Keys, func(id string, k store.Key) {
		r.all[id] = k
		if k.Revoked.IsZero() && len(k.Hash) == sha256.Size {
			r.byHash[[sha256.Size]byte(k.Hash)] = k
		}
	})
	if err != nil {
		return nil, fmt.Errorf("load keys: %w", err)
	}
	return r, nil
}

// Create makes a key. The secret is returned once and kept nowhere.
func (r *Ring) Create(name, team string) (secret string, k store.Key, err error) {
	for _, n := range []string{name, team} {
		if err := ValidName(n); err != nil {
			return "", k, err
		}
	}
	raw := make([]byte, keyBytes)
	rand.Read(raw) // never fails (crypto/rand, Go 1.24)
	secret = Prefix + hex.EncodeToString(raw)
	k = record(name, team, secret)
	if err := r.store.Put(store.Keys, k.ID, k); err != nil {
		return "", k, fmt.Errorf("create key: %w", err)
	}
	r.add(k)
	return secret, k, nil
}

// Lend accepts a secret until this process ends and stores nothing of it.
func (r *Ring) Lend(secret, team string) { r.add(record("lent", team, secret)) }

func record(name, team, secret string) store.Key {
	hash := sha256.Sum256([]byte(secret))
	id := make([]byte, 6)
	rand.Read(id)
	return store.Key{
		ID: hex.EncodeToString(id), Name: name, Team: team, Hash: hash[:],
		Hint: secret[max(0, len(secret)-4):], Created: time.Now().UTC(),
	}
}

func (r *Ring) add(k store.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[k.ID] = k
	r.byHash[[sha256.Size]byte(k.Hash)] = k
}

// Revoke ends a key, durably and at once.
func (r *Ring) Revoke(id string) error {
	r.mu.Lock()
	k, ok := r.all[id]
	if !ok {
		r.mu.Unlock()
		return fmt.Errorf("%w: %s", ErrNoKey, id)
	}
	if k.Revoked.IsZero() {
		k.Revoked = time.Now().UTC()
	}
	r.all[id] = k
	delete(r.byHash, [sha256.Size]byte(k.Hash))
	r.mu.Unlock()
	if err := r.store.Put(store.Keys, id, k); err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	return nil
}

// List returns the keys, oldest first.
func (r *Ring) List() []store.Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := make([]store.Key, 0, len(r.all))
	for _, k := range r.all {
		list = append(list, k)
	}
	slices.SortFunc(list, func(a, b store.Key) int {
		if c := a.Created.Compare(b.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Valid counts the keys that can be used.
func (r *Ring) Valid() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.byHash)
}

// Team returns whose key secret is. The look-up is by hash: what time it takes
// says nothing about any key.
func (r *Ring) Team(secret string) (string, bool) {
	if secret == "" {
		return "", false
	}
	hash := sha256.Sum256([]byte(secret))
	r.mu.RLock()
	k, ok := r.byHash[hash]
	r.mu.RUnlock()
	if !ok || subtle.ConstantTimeCompare(k.Hash, hash[:]) != 1 {
		return "", false
	}
	return k.Team, true
}
