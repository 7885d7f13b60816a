package codec

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/agentzip/agentzip/internal/units"
)

// dictMagic starts a dictionary of the ZDICT format (RFC 8878 section 5). Raw
// content dictionaries are refused: one format, one way to read a page.
const (
	dictMagic  = 0xEC30A437
	minDict    = 256     // ZDICT never makes less
	maxDictLen = 1 << 20 // 16x the default; bounds what a damaged length can cost
)

// Dictionary is a trained Zstandard dictionary, ready for use by any number of
// encoders and decoders at once.
//
// Its native memory is freed when it was closed and no call is using it:
//
//	open (users >= 1, the owner is one) --Close--> closing --last call returns--> freed
type Dictionary struct {
	id     DictID      // immutable
	size   units.Bytes // immutable
	tables *dictTables // immutable while users > 0

	users  atomic.Int64 // calls inside, + 1 until Close
	closed atomic.Bool
}

// live counts dictionaries whose native memory is not freed. Atomic; read by tests.
var live atomic.Int64

// NewDictionary prepares raw (the ZDICT format) for use. It copies raw.
// Preconditions: id is not 0.
func NewDictionary(id DictID, raw []byte) (*Dictionary, error) {
	if id == 0 {
		return nil, fmt.Errorf("prepare dictionary: id 0 is reserved: %w", ErrDictionary)
	}
	if len(raw) < minDict || len(raw) > maxDictLen || binary.LittleEndian.Uint32(raw) != dictMagic || binary.LittleEndian.Uint32(raw[4:]) == 0 {
		return nil, fmt.Errorf("prepare dictionary %d: %d bytes that are not a trained dictionary: %w", id, len(raw), ErrDictionary)
	}
	t, err := newDictTables(raw, levelDict)
	if err != nil {
		return nil, fmt.Errorf("prepare dictionary %d: %w: %w", id, err, ErrDictionary)
	}
	d := &Dictionary{id: id, tables: t, size: units.Bytes(t.size())}
	d.users.Store(1)
	live.Add(1)
	return d, nil
}

// ID returns the name given at construction.
func (d *Dictionary) ID() DictID { return d.id }

// Size returns all native memory held because of d, tables included.
func (d *Dictionary) Size() units.Bytes { return d.size }

// Close frees the native memory once the calls that are using it have
// returned. Later calls treat d as missing. Any goroutine; again is a no-op.
func (d *Dictionary) Close() {
	if d.closed.CompareAndSwap(false, true) {
		d.exit()
	}
}

// enter reports whether d's tables may be used until the exit that follows.
func (d *Dictionary) enter() bool {
	for {
		n := d.users.Load()
		if n == 0 || d.closed.Load() {
			return false
		}
		if d.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (d *Dictionary) exit() {
	if d.users.Add(-1) == 0 {
		d.tables.free()
		live.Add(-1)
	}
}
