// Package store keeps the gateway's records in one bbolt file: sandboxes,
// snapshots, API keys, cached steps of builds.
//
// A record is JSON under its id, one bucket a kind. There are two ways to write:
//
//	Put, Delete            durable when they return
//	PutLater, DeleteLater  soon, in the background, the last one for a key wins
//
// The records of running sandboxes are written later: their VMs end with the
// daemon anyway, and a client that waits for its sandbox shall not wait for a
// disk. What was put away (paused sandboxes, snapshots, keys) is written durably.
// A durable write of a key takes the place of one that is still to come.
//
// Lock order: Store.mu, then nothing; not held across a transaction. Writes of
// one key must not race: the caller orders them (lifecycle.Box does).
package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// ErrLocked: another process has the file open. Nothing was done.
var ErrLocked = errors.New("the gateway's store is in use by another process")

// lockPatience is how long Open waits for another process. A command that
// opens the store for a moment takes some ms.
const lockPatience = 300 * time.Millisecond

// A Kind is a bucket.
type Kind string

// Kinds of records.
const (
	Sandboxes Kind = "sandboxes"
	Snapshots Kind = "snapshots"
	Keys      Kind = "keys"
	Steps     Kind = "steps" // cached steps of builds
	Meta      Kind = "meta"
)

var kinds = []Kind{Sandboxes, Snapshots, Keys, Steps, Meta}

// format is written into Meta; a newer one is refused.
const format = "1"

type key struct {
	kind Kind
	id   string
}

// A Store is an open file. Safe for concurrent use.
type Store struct {
	db  *bbolt.DB    // immutable
	log *slog.Logger // immutable

	wake   chan struct{} // tells the writer; capacity 1
	closed chan struct{}
	writer sync.WaitGroup

	mu    sync.Mutex
	later map[key][]byte // guarded by mu; nil value: delete
}

// Open opens or creates gateway.db in dir, which is made if missing.
func Open(dir string, log *slog.Logger) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open gateway store: %w", err)
	}
	path := filepath.Join(dir, "gateway.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockPatience, FreelistType: bbolt.FreelistMapType})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open %s: %w", path, ErrLocked)
	}
	if err != nil {
		return nil, fmt.Errorf("open gateway store %s: %w", path, err)
	}
	s := &Store{db: db, log: log, wake: make(chan struct{}, 1), closed: make(chan struct{}), later: map[key][]byte{}}
	if err := s.prepare(); err != nil {
		return nil, errors.Join(fmt.Errorf("open gateway store %s: %w", path, err), db.Close())
	}
	s.writer.Go(s.write)
	return s, nil
}

// prepare makes the buckets and checks the format.
func (s *Store) prepare() error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		for _, k := range kinds {
			if _, err := tx.CreateBucketIfNotExists([]byte(k)); err != nil {
				return err
			}
		}
		meta := tx.Bucket([]byte(Meta))
		switch got := string(meta.Get([]byte("format"))); got {
		case "":
			return meta.Put([]byte("format"), []byte(format))
		case format:
			return nil
		default:
			return fmt.Errorf("it has format %q, this version reads %q", got, format)
		}
	})
}

// Put writes v durably.
func (s *Store) Put(kind Kind, id string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode record %s/%s: %w", kind, id, err)
	}
	return s.now(key{kind, id}, raw)
}

// Delete removes a record durably. A missing one is no error.
func (s *Store) Delete(kind Kind, id string) error { return s.now(key{kind, id}, nil) }

// PutLater writes v soon.
func (s *Store) PutLater(kind Kind, id string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode record %s/%s: %w", kind, id, err)
	}
	s.soon(key{kind, id}, raw)
	return nil
}

// DeleteLater removes a record soon.
func (s *Store) DeleteLater(kind Kind, id string) { s.soon(key{kind, id}, nil) }

func (s *Store) soon(k key, raw []byte) {
	s.mu.Lock()
	s.later[k] = raw
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// now writes k durably, in one transaction with all that waits. Those that
// come together share a sync: the first that gets the writer's lock takes all.
func (s *Store) now(k key, raw []byte) error {
	s.mu.Lock()
	s.later[k] = raw
	s.mu.Unlock()
	return s.Flush()
}

// errNothing rolls an empty transaction back.
var errNothing = errors.New("nothing to write")

// Flush writes what waits, durably.
func (s *Store) Flush() error {
	var taken map[key][]byte
	err := s.db.Update(func(tx *bbolt.Tx) error {
		// Inside the transaction: whoever takes the map writes it before anybody
		// who takes a later one.
		s.mu.Lock()
		taken, s.later = s.later, map[key][]byte{}
		s.mu.Unlock()
		if len(taken) == 0 {
			return errNothing // somebody else has written it: no need to sync again
		}
		for k, raw := range taken {
			if err := apply(tx, k, raw); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, errNothing) {
		return nil
	}
	if err != nil {
		s.giveBack(taken)
		return fmt.Errorf("write gateway store: %w", err)
	}
	return nil
}

func apply(tx *bbolt.Tx, k key, raw []byte) error {
	b := tx.Bucket([]byte(k.kind))
	if raw == nil {
		return b.Delete([]byte(k.id))
	}
	return b.Put([]byte(k.id), raw)
}

// giveBack keeps what could not be written, where nothing newer waits.
func (s *Store) giveBack(taken map[key][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, raw := range taken {
		if _, newer := s.later[k]; !newer {
			s.later[k] = raw
		}
	}
}

// laterDelay lets writes gather: a fork of ten is one transaction.
const laterDelay = 20 * time.Millisecond

func (s *Store) write() {
	for {
		select {
		case <-s.closed:
			return
		case <-s.wake:
		}
		select {
		case <-s.closed:
			return
		case <-time.After(laterDelay):
		}
		if err := s.Flush(); err != nil {
			s.log.Error("write records", "err", err)
		}
	}
}

// Get reads one record into v; false if there is none.
func (s *Store) Get(kind Kind, id string, v any) (bool, error) {
	s.mu.Lock()
	raw, waiting := s.later[key{kind, id}]
	s.mu.Unlock()
	if !waiting {
		err := s.db.View(func(tx *bbolt.Tx) error {
			raw = append([]byte(nil), tx.Bucket([]byte(kind)).Get([]byte(id))...)
			return nil
		})
		if err != nil {
			return false, fmt.Errorf("read record %s/%s: %w", kind, id, err)
		}
	}
	if len(raw) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("read record %s/%s: %w", kind, id, err)
	}
	return true, nil
}

// Each reads all records of a kind in order of their ids. A record that does
// not decode is logged and left out: one bad record must not take the others down.
func Each[T any](s *Store, kind Kind, visit func(id string, v T)) error {
	if err := s.Flush(); err != nil {
		return err
	}
	err := s.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte(kind)).ForEach(func(id, raw []byte) error {
			var v T
			if err := json.Unmarshal(raw, &v); err != nil {
				s.log.Error("read record", "kind", kind, "id", string(id), "err", err)
				return nil
			}
			visit(string(id), v)
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("read records %s: %w", kind, err)
	}
	return nil
}

// Close writes what waits and closes the file.
func (s *Store) Close() error {
	close(s.closed)
	s.writer.Wait()
	return errors.Join(s.Flush(), s.db.Close())
}
