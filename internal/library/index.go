package library

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/units"
)

// The index file, all numbers little-endian:
//
//	header   magic "AZPUBIDX", version (4), number of sections (4), size of the file (8),
//	         frames of the memory image (4), blocks of the root image (4),
//	         digest of the memory image (32, see scanMemory)
//	sections type (4 letters), zeros (4), length of the payload (8), payload
//	trailer  SHA-256 of everything before it (32)
//
// A section whose type begins with a lower-case letter may be skipped by a reader that
// does not know it; any other unknown one makes it refuse the file with ErrFormat (the
// rule of PNG). No type appears twice.
//
//	SUMS     checksum (4) and ID (4) of each distinct page, ascending, first by checksum
//
// The file holds records and not the table of table.go: that one may change without
// a new version, and a plain list is easy to check. It is a third larger so.
const (
	magic         = "AZPUBIDX"
	formatVersion = 1
	headerBytes   = 64
	sectionBytes  = 16
	recordBytes   = 8
	trailerBytes  = sha256.Size
	sumsType      = "SUMS"
	// maxSections bounds what a damaged count can make the reader do.
	maxSections = 64
)

// rootSamples is how many blocks of the root image Open compares with the index: of a
// root image that differs in 10 % of its blocks, one in 850 would pass. That one
// would do no harm: Find compares bytes and Read checks sums.
const rootSamples = 64

// WriteIndex stores the library in a new file at path and syncs it. It refuses to overwrite.
func (l *Library) WriteIndex(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write index of public pages: %w", err)
	}
	err = l.writeTo(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("write index of public pages %s: %w", path, err), os.Remove(path))
	}
	return nil
}

func (l *Library) writeTo(f io.Writer) error {
	sum := sha256.New()
	buffered := bufio.NewWriter(f)
	w := io.MultiWriter(buffered, sum)
	payload := uint64(l.Pages()) * recordBytes //nolint:gosec // G115: at most 2^28
	h := append(make([]byte, 0, headerBytes+sectionBytes), magic...)
	h = binary.LittleEndian.AppendUint32(h, formatVersion)
	h = binary.LittleEndian.AppendUint32(h, 1)
	h = binary.LittleEndian.AppendUint64(h, headerBytes+sectionBytes+payload+trailerBytes)
	h = binary.LittleEndian.AppendUint32(h, l.frames)
	h = binary.LittleEndian.AppendUint32(h, l.blocks)
	h = append(h, l.digest[:]...)
	h = append(h, sumsType...)
	h = binary.LittleEndian.AppendUint32(h, 0)
	h = binary.LittleEndian.AppendUint64(h, payload)
	_, err := w.Write(h)
	var r [recordBytes]byte
	for id, s := range l.All {
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint32(r[:4], s)
		binary.LittleEndian.PutUint32(r[4:], uint32(id))
		_, err = w.Write(r[:])
	}
	if err == nil {
		_, err = buffered.Write(sum.Sum(nil))
	}
	if err == nil {
		err = buffered.Flush()
	}
	return err
}

// Open reads the index that WriteIndex stored and checks it against image and root: the
// image in full, the root by its size and 64 of its blocks (45 ms for 68 MiB of memory).
//
// Errors wrap ErrDamaged, ErrMismatch or ErrFormat, unless it is the file that cannot be
// opened or read. However the file was damaged, an error is all that comes of it.
func Open(ctx context.Context, path string, image *guestmem.Image, root *os.File) (*Library, error) {
	s, err := newSource(image, root)
	if err != nil {
		return nil, fmt.Errorf("open index of public pages: %w", err)
	}
	l, err := s.open(ctx, path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open index of public pages %s: %w", path, err), s.root.Close())
	}
	return l, nil
}

func (s *source) open(ctx context.Context, path string) (*Library, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // read only
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	digest, records, err := s.readIndex(f, info.Size())
	if err != nil {
		return nil, err
	}
	if err := s.checkMemory(ctx, digest); err != nil {
		return nil, err
	}
	if err := s.checkRoot(records); err != nil {
		return nil, err
	}
	return s.library(records, digest)
}

// checkMemory compares all of the image with the digest in an index.
func (s *source) checkMemory(ctx context.Context, want [32]byte) error {
	got, err := s.scanMemory(ctx, func(uint32, uint32) {})
	if err != nil {
		return err
	}
	if got != want {
		return mismatch("the memory image is another one")
	}
	return nil
}

// checkRoot compares a few blocks, spread over the records, with their checksums.
func (s *source) checkRoot(records []record) error {
	var page units.Page
	step := max(1, len(records)/rootSamples)
	for at := 0; at < len(records); at += step {
		for _, r := range records[at:min(at+step, len(records))] {
			if uint32(r.id) < s.frames {
				continue
			}
			if err := s.load(&page, r.id); err != nil {
				return err
			}
			if codec.Checksum(&page) != r.sum {
				return mismatch(s.describe(r.id) + " is not the one it describes")
			}
			break
		}
	}
	return nil
}

const rebuild = "build the template again (agentzip template build)"

func mismatch(why string) error { return fmt.Errorf("%s: %s: %w", why, rebuild, ErrMismatch) }

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", fmt.Sprintf(format, args...), rebuild, ErrDamaged)
}

// A reader counts and hashes what it reads.
type reader struct {
	in   io.Reader
	sum  hash.Hash
	left int64 // of the file, trailer excluded
}

// read fills p, or says what was to be read.
func (r *reader) read(p []byte, what string) error {
	if int64(len(p)) > r.left {
		return corrupt("the file ends within %s", what)
	}
	if _, err := io.ReadFull(r.in, p); err != nil {
		return readError(err, what)
	}
	r.left -= int64(len(p))
	_, _ = r.sum.Write(p) // a hash never fails
	return nil
}

func readError(err error, what string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return corrupt("the file ends within %s", what)
	}
	return fmt.Errorf("read %s: %w", what, err)
}

// readIndex reads a whole index of size bytes and checks everything about it that can be
// checked without the content of image and root.
func (s *source) readIndex(in io.Reader, size int64) (digest [32]byte, records []record, err error) {
	buffered := bufio.NewReader(in)
	r := &reader{in: buffered, sum: sha256.New(), left: size - trailerBytes}
	digest, sections, err := s.readHeader(r, size)
	if err != nil {
		return digest, nil, err
	}
	seen := map[string]bool{}
	for range sections {
		name, length, err := readSectionHead(r)
		if err != nil {
			return digest, nil, err
		}
		if seen[name] {
			return digest, nil, corrupt("section %q is there twice", name)
		}
		seen[name] = true
		if name == sumsType {
			records, err = s.readRecords(r, length)
		} else {
			err = skipSection(r, name, length)
		}
		if err != nil {
			return digest, nil, err
		}
	}
	if r.left != 0 {
		return digest, nil, corrupt("%d bytes follow the last section", r.left)
	}
	var trailer [trailerBytes]byte
	if _, err := io.ReadFull(buffered, trailer[:]); err != nil {
		return digest, nil, readError(err, "the checksum")
	}
	if [trailerBytes]byte(r.sum.Sum(nil)) != trailer {
		return digest, nil, corrupt("the checksum does not match: the file has changed since it was written")
	}
	if !seen[sumsType] {
		return digest, nil, corrupt("section %q is missing", sumsType)
	}
	return digest, records, nil
}

func (s *source) readHeader(r *reader, size int64) (digest [32]byte, sections uint32, err error) {
	var h [headerBytes]byte
	if err := r.read(h[:], "the header"); err != nil {
		return digest, 0, err
	}
	if string(h[:8]) != magic {
		return digest, 0, corrupt("it is no index of public pages")
	}
	if v := binary.LittleEndian.Uint32(h[8:]); v != formatVersion {
		return digest, 0, fmt.Errorf("it has version %d, this AgentZip reads %d: %s, or use the AgentZip that built it: %w", v, formatVersion, rebuild, ErrFormat)
	}
	if n := binary.LittleEndian.Uint64(h[16:]); n != uint64(size) { //nolint:gosec // G115: sizes are not negative
		return digest, 0, corrupt("the file has %d bytes instead of %d", size, n)
	}
	if sections = binary.LittleEndian.Uint32(h[12:]); sections > maxSections {
		return digest, 0, corrupt("it claims %d sections", sections)
	}
	frames, blocks := binary.LittleEndian.Uint32(h[24:]), binary.LittleEndian.Uint32(h[28:])
	if frames != s.frames || blocks != s.blocks {
		return digest, 0, mismatch(fmt.Sprintf("it describes %d pages of memory and %d blocks of root image, here are %d and %d", frames, blocks, s.frames, s.blocks))
	}
	return [32]byte(h[32:]), sections, nil
}

func readSectionHead(r *reader) (name string, length int64, err error) {
	var h [sectionBytes]byte
	if err := r.read(h[:], "the head of a section"); err != nil {
		return "", 0, err
	}
	name = string(h[:4])
	if binary.LittleEndian.Uint32(h[4:]) != 0 {
		return "", 0, corrupt("the head of section %q is malformed", name)
	}
	n := binary.LittleEndian.Uint64(h[8:])
	if n > uint64(r.left) { //nolint:gosec // G115: left is not negative
		return "", 0, corrupt("section %q has %d bytes, the file only %d more", name, n, r.left)
	}
	return name, int64(n), nil //nolint:gosec // G115: at most left
}

// skipSection passes over a section this version does not know, if it may.
func skipSection(r *reader, name string, length int64) error {
	if name[0] < 'a' || name[0] > 'z' {
		return fmt.Errorf("it has a section %q that this AgentZip does not know: %s, or use the AgentZip that built it: %w", name, rebuild, ErrFormat)
	}
	var buf [4096]byte
	for length > 0 {
		p := buf[:min(length, int64(len(buf)))]
		if err := r.read(p, fmt.Sprintf("section %q", name)); err != nil {
			return err
		}
		length -= int64(len(p))
	}
	return nil
}

// readRecords reads the section SUMS. What it allocates is bounded by the template, and by
// the length of the file.
func (s *source) readRecords(r *reader, length int64) ([]record, error) {
	n := length / recordBytes
	if length%recordBytes != 0 || n > int64(s.total()) {
		return nil, corrupt("section %s has %d bytes, which fit no list of pages", sumsType, length)
	}
	records := make([]record, 0, n)
	var b [recordBytes]byte
	for range n {
		if err := r.read(b[:], "the list of pages"); err != nil {
			return nil, err
		}
		rec := record{binary.LittleEndian.Uint32(b[:4]), ID(binary.LittleEndian.Uint32(b[4:]))}
		if len(records) > 0 && !records[len(records)-1].before(rec) {
			return nil, corrupt("the list of pages is out of order")
		}
		if uint32(rec.id) >= s.total() || uint32(rec.id) < s.frames && s.image.Hole(units.Frame(rec.id)) {
			return nil, corrupt("the list of pages names %#x, which is none", uint32(rec.id))
		}
		records = append(records, rec)
	}
	return records, nil
}
