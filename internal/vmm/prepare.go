package vmm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/agentzip/agentzip/internal/vmm/qmp"
)

// A prepared machine is a clone that was started without device state. Its VMM has done
// what takes most of the time of a start (100 to 250 ms) and has touched no page of the guest
// that matters: devices look into guest memory only while their state is loaded. So there are
// three things to do, in this order:
//
//	prepared --SetWire, SetDisk (if others than in the Spec), attach a pager--> prepared
//	prepared --Load--> paused
//
// A pager whose pages are not the template's must be attached before Load: a virtio device
// reads its rings while it is loaded.

// errNotPrepared refuses what only a prepared machine can do. Nothing was done.
var errNotPrepared = errors.New("the machine is not prepared: it has its device state")

// Load brings device state into a prepared machine and leaves it paused.
func (m *machine) Load(ctx context.Context, state *os.File) error {
	if err := m.takePrepared(); err != nil {
		return fmt.Errorf("machine %s: load device state: %w", m.id, err)
	}
	began := time.Now()
	if err := m.load(ctx, state); err != nil {
		return m.dead(err)
	}
	m.mu.Lock()
	m.timing.Load = time.Since(began)
	m.mu.Unlock()
	return nil
}

// takePrepared ends the state "prepared".
func (m *machine) takePrepared() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.prepared {
		return errNotPrepared
	}
	m.prepared = false
	return nil
}

func (m *machine) needPrepared(what string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.prepared {
		return fmt.Errorf("machine %s: %s: %w", m.id, what, errNotPrepared)
	}
	return nil
}

// SetWire makes w the link of a prepared machine. Its guest will not notice: it knows
// nothing yet.
func (m *machine) SetWire(ctx context.Context, w *Wire) error {
	if err := m.needPrepared("set wire"); err != nil {
		return err
	}
	theirs, err := w.copyOfGuestEnd()
	if err != nil {
		return fmt.Errorf("machine %s: set wire: %w", m.id, err)
	}
	defer theirs.Close()
	if err := m.swapLink(ctx, theirs); err != nil {
		return m.dead(err)
	}
	m.mu.Lock()
	old, had := m.link, m.wire
	m.link, m.wire = w.Conn(), w
	m.mu.Unlock()
	if had == nil {
		_ = old.Close()
	}
	return nil
}

// SetDisk gives a prepared machine another disk of the same size, in place of the one of
// its Spec. disk stays the caller's.
func (m *machine) SetDisk(ctx context.Context, disk *os.File) error {
	if err := m.needPrepared("set disk"); err != nil {
		return err
	}
	size, _, err := sizeMode(disk)
	if err != nil {
		return fmt.Errorf("machine %s: set disk: %w", m.id, err)
	}
	if m.disk == 0 || size != m.disk {
		return fmt.Errorf("machine %s: set disk: it has %s, the machine's own %s", m.id, size, m.disk)
	}
	own, err := dup(disk)
	if err != nil {
		return fmt.Errorf("machine %s: set disk: %w", m.id, err)
	}
	defer own.Close()
	if err := m.swapDisk(ctx, own); err != nil {
		return m.dead(fmt.Errorf("set disk: %w", err))
	}
	return nil
}

// swapDisk puts another file below the disk's node and forgets the former.
func (m *machine) swapDisk(ctx context.Context, disk *os.File) error {
	if err := m.qmp.ExecuteFile(ctx, "add-fd", dict{"fdset-id": swapSet}, nil, disk); err != nil {
		return err
	}
	if err := m.qmp.Execute(ctx, "blockdev-add", fileNode("swapped", swapSet), nil); err != nil {
		return err
	}
	if err := m.qmp.Execute(ctx, "blockdev-reopen", dict{"options": []any{rawNode("swapped")}}, nil); err != nil {
		return err
	}
	// The former file goes with its node and its descriptor.
	if err := m.qmp.Execute(ctx, "blockdev-del", dict{"node-name": "diskfile"}, nil); err != nil {
		return err
	}
	return m.qmp.Execute(ctx, "remove-fd", dict{"fdset-id": diskSet}, nil)
}

// fileNode and rawNode are the two layers of a disk, as args says them.
func fileNode(name string, set int) map[string]any {
	return map[string]any{
		"driver": "file", "node-name": name, "filename": fmt.Sprintf("/dev/fdset/%d", set), "aio": "threads",
		"cache": map[string]any{"direct": false, "no-flush": true}, "discard": "unmap", "locking": "off", "auto-read-only": false,
	}
}

func rawNode(file string) map[string]any {
	return map[string]any{
		"driver": "raw", "node-name": "disk", "file": file,
		"cache": map[string]any{"direct": false, "no-flush": true}, "discard": "unmap", "detect-zeroes": "off",
	}
}

// errUnsettled: a stopped VMM goes on moving bytes of its link.
var errUnsettled = errors.New("the link does not come to rest")

// settleTries bounds Settle. A VMM takes at most what the guest has made room for, 4 KiB
// at a time: a handful of rounds of 0.1 ms each. Doubled, a broken one is noticed later.
const settleTries = 256

// settleRest is for how many rounds in a row the wire must not change.
const settleRest = 3

// Settle returns when a stopped machine has come to rest: what it took from its held wire it
// has given to the guest's memory. It returns what is left in the wire.
//
// Preconditions: Stop has returned; the wire is held.
func (m *machine) Settle(ctx context.Context) (Level, error) {
	m.mu.Lock()
	w := m.wire
	m.mu.Unlock()
	if w == nil {
		return Level{}, fmt.Errorf("machine %s: settle: it has no wire", m.id)
	}
	last, rest := Level{ToGuest: -1}, 0
	for range settleTries {
		// The same loop of QEMU answers this and moves the link's bytes.
		if err := m.command(ctx, "query-status", nil); err != nil {
			return Level{}, err
		}
		now, err := w.Level()
		if err != nil {
			return Level{}, fmt.Errorf("machine %s: settle: %w", m.id, err)
		}
		if now != last {
			last, rest = now, 0
			continue
		}
		if rest++; rest == settleRest {
			return now, nil
		}
	}
	return Level{}, fmt.Errorf("machine %s: settle: %w", m.id, errUnsettled)
}

// stateOf is a description of our own of a file that others read at the same time.
func stateOf(f *os.File) (*os.File, error) {
	own, err := os.Open(procFD(int(f.Fd())))
	if err != nil {
		return nil, fmt.Errorf("open device state: %w", err)
	}
	return own, nil
}

// load brings saved device state in.
func (m *machine) load(ctx context.Context, state *os.File) error {
	f, err := stateOf(state)
	if err != nil {
		return err
	}
	defer f.Close()
	type capability struct {
		Capability string `json:"capability"`
		State      bool   `json:"state"`
	}
	caps := map[string]any{"capabilities": []capability{{"x-ignore-shared", true}, {"events", true}}}
	if err := m.qmp.Execute(ctx, "migrate-set-capabilities", caps, nil); err != nil {
		return err
	}
	if err := m.qmp.ExecuteFile(ctx, "getfd", map[string]string{"fdname": "state"}, nil, f); err != nil {
		return err
	}
	if err := m.qmp.Execute(ctx, "migrate-incoming", map[string]string{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	for {
		select {
		case state := <-m.migration:
			switch state {
			case "completed":
				return nil
			case "failed":
				return errors.New("load device state: QEMU refuses it (built by another QEMU or for other hardware?)")
			}
		case <-m.qmp.Done():
			return fmt.Errorf("load device state: %w (built by another QEMU or for other hardware?)", qmp.ErrClosed)
		case <-ctx.Done():
			return fmt.Errorf("load device state: %w", ctx.Err())
		}
	}
}

// wireOf returns what Link returns for a machine that was given a wire.
func wireOf(s Spec) net.Conn {
	if s.Wire == nil {
		return nil
	}
	return s.Wire.Conn()
}
