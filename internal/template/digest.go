package template

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/units"
)

// digestFile returns size and block digest of a file.
//
// The digest is the SHA-256 over, for each 4 KiB block that is not all zeros,
// its number (8 bytes, little-endian) and its bytes; the last block may be short.
// So a 4 GiB disk with 100 KiB of content takes a millisecond, and
// the digest does not depend on where the file system keeps holes.
func digestFile(ctx context.Context, path string) (FileSums, error) {
	f, err := os.Open(path)
	if err != nil {
		return FileSums{}, fmt.Errorf("digest file: %w", err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return FileSums{}, fmt.Errorf("digest file: %w", err)
	}
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for at := int64(0); at < st.Size(); {
		if err := ctx.Err(); err != nil {
			return FileSums{}, err
		}
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return FileSums{}, fmt.Errorf("digest %s: find data: %w", path, err)
		}
		// Back to the start of the chunk: a block is hashed whole, wherever a hole ends.
		at = max(at, data/int64(len(buf))*int64(len(buf)))
		n, err := f.ReadAt(buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return FileSums{}, fmt.Errorf("digest %s: %w", path, err)
		}
		digestBlocks(h, buf[:n], at/units.PageSize)
		at += int64(n)
	}
	return FileSums{Size: st.Size(), Blocks: hex.EncodeToString(h.Sum(nil))}, nil
}

var zeroPage units.Page

func digestBlocks(h io.Writer, data []byte, block int64) {
	var number [8]byte
	for ; len(data) > 0; block++ {
		b := data[:min(units.PageSize, len(data))]
		data = data[len(b):]
		if string(b) == string(zeroPage[:len(b)]) {
			continue
		}
		binary.LittleEndian.PutUint64(number[:], uint64(block)) //nolint:gosec // G115: block numbers are not negative
		_, _ = h.Write(number[:])                               // a hash never fails
		_, _ = h.Write(b)
	}
}
