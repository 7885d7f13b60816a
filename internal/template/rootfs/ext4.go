package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/template/step"
	"github.com/agentzip/agentzip/internal/template/tool"
	"github.com/agentzip/agentzip/internal/units"
)

const blockSize = units.PageSize // DAX wants file-system blocks of one page

// pmemAlign is what the guest's libnvdimm wants a device to be a multiple of.
const pmemAlign = 2 * units.MiB

// Named in full and mke2fs.conf kept away, so that the host's defaults change nothing.
const (
	rootFeatures = "none,ext_attr,filetype,extent,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize"
	diskFeatures = rootFeatures + ",has_journal,dir_index,uninit_bg"
)

// Fixed, so that one tree gives one super block. The guest knows its disks by
// device, never by these.
const (
	rootUUID = "6167656e-747a-6970-726f-6f7400000001"
	diskUUID = "6167656e-747a-6970-6469-736b00000001"
)

// WriteExt4 makes the read-only root image from the tree and returns its size.
//
// No journal, no reserved blocks, no room for growth: nothing ever writes to it.
// No checksums inside: the manifest's digest covers the whole file, and under
// TCG each crc32c of a metadata block costs the guest.
func WriteExt4(ctx context.Context, t *Tree, out string, report step.Func) (units.Bytes, error) {
	need, err := measure(ctx, t.Dir())
	if err != nil {
		return 0, err
	}
	pulse := report.Heartbeat(ctx, "root image", "writing the ext4 image")
	defer pulse.Stop()
	// The estimate leaves out extent blocks of fragmented files and directory
	// indexes; a second try with more slack is cheaper than estimating those.
	for slack := int64(2); ; slack *= 5 {
		size := need.size(slack)
		err := mkfs(ctx, out, size,
			"-O", rootFeatures, "-m", "0", "-U", rootUUID,
			"-N", strconv.FormatInt(need.inodes+16, 10),
			"-E", "root_owner=0:0,hash_seed="+rootUUID, "-d", t.Dir())
		if err == nil {
			return size, punchZeros(out)
		}
		te, ok := errors.AsType[*tool.Error](err)
		full := ok && (strings.Contains(te.Tail, "Could not allocate") || strings.Contains(te.Tail, "No free space"))
		if !full || slack > 50 {
			return 0, fmt.Errorf("write root image: %w", err)
		}
	}
}

// WriteDisk makes the empty writable disk of a template: sparse, size bytes,
// with the folders an overlay wants. Only the parts with content are copied for
// each clone, so everything is chosen to keep them few: a small journal, inode
// tables that are holes and marked as zeroed (else the guest's kernel
// would write them all in the background).
func WriteDisk(ctx context.Context, out, scratch string, size units.Bytes) error {
	if size < 64*units.MiB || size%units.PageSize != 0 {
		return fmt.Errorf("make disk: size %v is not a multiple of 4 KiB of at least 64 MiB", size)
	}
	dir := filepath.Join(scratch, "disk")
	for _, d := range []string{dir, filepath.Join(dir, "upper"), filepath.Join(dir, "work")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("make disk: %w", err)
		}
		if err := os.Chmod(d, 0o755); err != nil { //nolint:gosec // G302: upper's mode becomes that of the guest's /
			return fmt.Errorf("make disk: %w", err)
		}
	}
	err := mkfs(ctx, out, size, "-O", diskFeatures, "-J", "size=8", "-m", "0", "-i", "32768", "-U", diskUUID,
		"-E", "root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0,nodiscard,hash_seed="+diskUUID, "-d", dir)
	if err != nil {
		return fmt.Errorf("make disk: %w", err)
	}
	return punchZeros(out)
}

func mkfs(ctx context.Context, out string, size units.Bytes, args ...string) error {
	if err := os.Remove(out); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace image: %w", err)
	}
	all := append([]string{"-q", "-F", "-t", "ext4", "-I", "256", "-b", strconv.Itoa(blockSize)}, args...)
	all = append(all, out, strconv.Itoa(size.Pages()))
	return tool.Run(ctx, tool.Command{
		Name: "mke2fs", Args: all,
		Env: []string{"MKE2FS_CONFIG=/dev/null", "E2FSPROGS_FAKE_TIME=1"},
	})
}

type demand struct{ blocks, inodes int64 }

// size turns the demand into an image size with percent of slack.
func (d demand) size(percent int64) units.Bytes {
	n := units.Bytes(d.blocks)*blockSize + units.Bytes(d.inodes)*256
	n += n*units.Bytes(percent)/100 + 4*units.MiB
	return (n + pmemAlign - 1) / pmemAlign * pmemAlign
}

// measure adds up what a tree needs on disk.
func measure(ctx context.Context, dir string) (demand, error) {
	var d demand
	seen := map[uint64]bool{}
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		sys, ok := st.Sys().(*syscall.Stat_t)
		if !ok || sys.Nlink > 1 && !e.IsDir() && seen[sys.Ino] {
			return nil
		}
		seen[sys.Ino] = sys.Nlink > 1
		d.inodes++
		switch {
		case e.IsDir():
			d.blocks += 1 + st.Size()/blockSize
		case st.Mode().IsRegular():
			d.blocks += (st.Size() + blockSize - 1) / blockSize
		case st.Mode()&fs.ModeSymlink != 0 && st.Size() >= 60:
			d.blocks++
		}
		return nil
	})
	if err != nil {
		return d, fmt.Errorf("measure tree: %w", err)
	}
	return d, nil
}

// punchZeros turns blocks of zeros into holes. mke2fs leaves inode tables and journal
// as zeros, or as allocated ranges that read as zeros; as holes they cost neither
// disk here nor time in each copy.
func punchZeros(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open image: %w", err)
	}
	defer func() { _ = f.Close() }()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("size image: %w", err)
	}
	fd := int(f.Fd())
	buf := make([]byte, 1<<20)
	for at := int64(0); at < size; {
		data, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return punch(fd, at, size-at)
		}
		if err != nil {
			return fmt.Errorf("find data: %w", err)
		}
		end, err := unix.Seek(fd, data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find hole: %w", err)
		}
		if err := punch(fd, at, data-at); err != nil {
			return err
		}
		for at = data; at < end; {
			n := min(int64(len(buf)), end-at)
			if _, err := f.ReadAt(buf[:n], at); err != nil {
				return fmt.Errorf("read image: %w", err)
			}
			if err := punchBlocks(fd, buf[:n], at); err != nil {
				return err
			}
			at += n
		}
	}
	return nil
}

// punchBlocks punches the runs of zero blocks in data, which lies at offset base.
func punchBlocks(fd int, data []byte, base int64) error {
	start := -1
	for i := 0; i <= len(data); i += blockSize {
		zero := i+blockSize <= len(data) && allZero(data[i:i+blockSize])
		switch {
		case zero && start < 0:
			start = i
		case !zero && start >= 0:
			if err := punch(fd, base+int64(start), int64(i-start)); err != nil {
				return err
			}
			start = -1
		}
	}
	return nil
}

func punch(fd int, at, n int64) error {
	if n <= 0 {
		return nil
	}
	err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, n)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // a file system without holes: larger, not wrong
		return fmt.Errorf("punch hole: %w", err)
	}
	return nil
}

var zeroBlock [blockSize]byte

func allZero(b []byte) bool { return string(b) == string(zeroBlock[:len(b)]) }
