package vmm

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// CopySparse makes dst equal to src, holes included: a clone's disk is made from
// its template's. Blocks are shared where the file system can (FICLONE). dst must
// be empty; both offsets are left anywhere. It is safe for several copies of one
// src at a time, as it moves no offset that they share.
func CopySparse(src, dst *os.File) error {
	// Another description of the same file: SEEK_DATA moves its offset.
	in, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", src.Fd()))
	if err != nil {
		return fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	if unix.IoctlFileClone(int(dst.Fd()), int(in.Fd())) == nil {
		return nil
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	for pos := int64(0); pos < st.Size(); {
		data, err := in.Seek(pos, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		if err != nil {
			return fmt.Errorf("copy %s: find data: %w", src.Name(), err)
		}
		end, err := in.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("copy %s: find hole: %w", src.Name(), err)
		}
		if err := copyRange(in, dst, data, end-data); err != nil {
			return fmt.Errorf("copy %s to %s: %w", src.Name(), dst.Name(), err)
		}
		pos = end
	}
	return nil
}

// copyRange copies within the kernel where the file systems allow.
func copyRange(in, out *os.File, off, n int64) error {
	if _, err := in.Seek(off, io.SeekStart); err != nil {
		return err
	}
	if _, err := out.Seek(off, io.SeekStart); err != nil {
		return err
	}
	_, err := io.CopyN(out, in, n)
	return err
}
