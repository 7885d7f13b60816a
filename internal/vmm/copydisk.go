package vmm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"
)

// copyPoll is how often the end of a copy is asked for. Its event would need a register of
// jobs; doubled, a fork's children wait a little longer for their disks.
const copyPoll = 2 * time.Millisecond

// A DiskCopy is a copy of a machine's disk under way.
//
//	CopyDisk: from now on changes are noted; the file is copied --> copied
//	copied --Pin: what changed is copied too, as it is now--> pinned --Wait--> whole
//	copied, pinned --Wait with an ended context--> given up
//
// The moment the copy is of is that of Pin, which takes a few milliseconds however much is on
// the disk: a backup job of QEMU sees to it that what the guest overwrites after it is copied
// first. Copying the whole file while the guest stands still takes 0.5 ms a MiB; the job
// alone, without the copy before it, would allocate the holes of a disk of 4 GiB.
//
// One goroutine at a time. Wait must be called.
type DiskCopy struct {
	m      *machine
	set    int    // QEMU's descriptor set of the target
	name   string // of the target's node, the bitmap and the job
	pinned bool
	undo   []command // what takes back what was done in QEMU so far; the last one first
}

// A command of QMP.
type command struct {
	name string
	args any
}

type dict = map[string]any

// A jobInfo is what query-jobs says of a job.
type jobInfo struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	Error  string `json:"error"`
}

// CopyDisk copies the disk, which is src, to dst, an empty file. The machine may run
// and write.
func (m *machine) CopyDisk(ctx context.Context, src, dst *os.File) (*DiskCopy, error) {
	own, err := dup(dst)
	if err != nil {
		return nil, fmt.Errorf("machine %s: copy disk: %w", m.id, err)
	}
	defer own.Close()
	n := m.copies.Add(1)
	c := &DiskCopy{m: m, set: backupSet + int(n), name: "copy" + strconv.FormatInt(n, 10)}
	if err := c.begin(ctx, src, own); err != nil {
		return nil, m.dead(fmt.Errorf("copy disk: %w", errors.Join(err, c.forget(context.WithoutCancel(ctx)))))
	}
	return c, nil
}

// do executes a command and notes how to undo it.
func (c *DiskCopy) do(ctx context.Context, do, undo command) error {
	if err := c.m.qmp.Execute(ctx, do.name, do.args, nil); err != nil {
		return err
	}
	c.undo = append(c.undo, undo)
	return nil
}

func (c *DiskCopy) begin(ctx context.Context, src, dst *os.File) error {
	bitmap := dict{"node": "disk", "name": c.name}
	err := c.do(ctx, command{"block-dirty-bitmap-add", bitmap}, command{"block-dirty-bitmap-remove", bitmap})
	if err != nil {
		return err
	}
	// Only now: what changes while it is copied is noted.
	if err := CopySparse(src, dst); err != nil {
		return err
	}
	if err := c.m.qmp.ExecuteFile(ctx, "add-fd", dict{"fdset-id": c.set}, nil, dst); err != nil {
		return err
	}
	c.undo = append(c.undo, command{"remove-fd", dict{"fdset-id": c.set}})
	return c.do(ctx, command{"blockdev-add", fileNode(c.name, c.set)}, command{"blockdev-del", dict{"node-name": c.name}})
}

// Pin makes now the moment that the copy is of. The machine may be stopped.
func (c *DiskCopy) Pin(ctx context.Context) error {
	err := c.do(ctx, command{"blockdev-backup", dict{
		"job-id": c.name, "device": "disk", "target": c.name, "sync": "bitmap", "bitmap": c.name, "bitmap-mode": "never",
		"auto-dismiss": false,
	}}, command{"job-dismiss", dict{"id": c.name}})
	if err != nil {
		return c.m.dead(fmt.Errorf("copy disk: %w", err))
	}
	c.pinned = true
	return nil
}

// Wait returns when the copy is whole. If ctx ends, or Pin was not called, the copy
// is given up and dst holds nothing that is of use.
func (c *DiskCopy) Wait(ctx context.Context) error {
	clear := context.WithoutCancel(ctx)
	err := ctx.Err()
	switch {
	case c.pinned:
		if err = c.await(ctx); ctx.Err() != nil {
			_ = c.m.qmp.Execute(clear, "job-cancel", dict{"id": c.name}, nil)
			_ = c.await(clear)
		}
	case err == nil:
		err = errors.New("it was not pinned")
	}
	if err = errors.Join(err, c.forget(clear)); err != nil {
		return c.m.dead(fmt.Errorf("copy disk: %w", err))
	}
	return nil
}

// await returns when the job has concluded.
func (c *DiskCopy) await(ctx context.Context) error {
	for {
		var jobs []jobInfo
		if err := c.m.qmp.Execute(ctx, "query-jobs", nil, &jobs); err != nil {
			return err
		}
		job := jobInfo{Status: "concluded", Error: "the job is gone"}
		for _, j := range jobs {
			if j.ID == c.name {
				job = j
			}
		}
		if job.Status == "concluded" {
			if job.Error != "" {
				return errors.New(job.Error)
			}
			return nil
		}
		select {
		case <-time.After(copyPoll):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// forget takes everything back in QEMU: the target is closed there.
func (c *DiskCopy) forget(ctx context.Context) error {
	var errs []error
	for _, u := range slices.Backward(c.undo) {
		errs = append(errs, c.m.qmp.Execute(ctx, u.name, u.args, nil))
	}
	c.undo = nil
	return errors.Join(errs...)
}
