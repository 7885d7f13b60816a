package guestagent

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	fspb "github.com/agentzip/agentzip/api/gen/filesystem"
)

// metadataPrefix is where the metadata of an upload is kept: extended
// attributes of the file, so that they move and die with it.
const metadataPrefix = "user.e2b."

// entries describes files; it remembers the names of owners while one request
// lasts. Not safe for concurrent use.
type entries struct {
	users, groups map[uint32]string
}

// describe returns what there is to say of the file at path, which a client
// knows as reported. The rights are those of the thread.
func (e *entries) describe(path, reported string) (*fspb.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return e.entry(st, path, reported), nil
}

func (e *entries) entry(st os.FileInfo, path, reported string) *fspb.EntryInfo {
	info := &fspb.EntryInfo{
		Name: filepath.Base(reported), Path: reported, Type: fileType(st.Mode()), Size: st.Size(),
		Mode: uint32(st.Mode().Perm()), Permissions: permissions(st.Mode()), ModifiedTime: timestamppb.New(st.ModTime()),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		info.Owner, info.Group = e.userName(sys.Uid), e.groupName(sys.Gid)
	}
	if st.Mode()&os.ModeSymlink != 0 {
		target, err := filepath.EvalSymlinks(reported)
		if err != nil {
			target, _ = os.Readlink(path)
		} else if st, err := os.Stat(target); err == nil {
			info.Type, info.Mode = fileType(st.Mode()), uint32(st.Mode().Perm())
		}
		info.SymlinkTarget = &target
	}
	if info.Type == fspb.FileType_FILE_TYPE_FILE {
		info.Metadata = readMetadata(path)
	}
	valid(info)
	return info
}

// valid replaces what protobuf refuses: file names are bytes, its strings UTF-8.
func valid(info *fspb.EntryInfo) {
	for _, s := range []*string{&info.Name, &info.Path, info.SymlinkTarget} {
		if s != nil {
			*s = strings.ToValidUTF8(*s, "\uFFFD")
		}
	}
}

// fileType is FILE for everything that is neither a folder nor a link, as E2B's clients expect.
func fileType(m os.FileMode) fspb.FileType {
	switch {
	case m.IsDir():
		return fspb.FileType_FILE_TYPE_DIRECTORY
	case m&os.ModeSymlink != 0:
		return fspb.FileType_FILE_TYPE_SYMLINK
	default:
		return fspb.FileType_FILE_TYPE_FILE
	}
}

// permissions is a mode as ls(1) prints it.
func permissions(m os.FileMode) string {
	kind := byte('-')
	switch {
	case m.IsDir():
		kind = 'd'
	case m&os.ModeSymlink != 0:
		kind = 'l'
	case m&os.ModeNamedPipe != 0:
		kind = 'p'
	case m&os.ModeSocket != 0:
		kind = 's'
	case m&os.ModeCharDevice != 0:
		kind = 'c'
	case m&os.ModeDevice != 0:
		kind = 'b'
	}
	return string(kind) + m.Perm().String()[1:]
}

func (e *entries) userName(id uint32) string {
	return remember(&e.users, id, func(id string) (string, error) {
		u, err := user.LookupId(id)
		if err != nil {
			return "", err
		}
		return u.Username, nil
	})
}

func (e *entries) groupName(id uint32) string {
	return remember(&e.groups, id, func(id string) (string, error) {
		g, err := user.LookupGroupId(id)
		if err != nil {
			return "", err
		}
		return g.Name, nil
	})
}

// remember looks a number up once; one without a name is its own.
func remember(names *map[uint32]string, id uint32, lookUp func(string) (string, error)) string {
	if name, known := (*names)[id]; known {
		return name
	}
	if *names == nil {
		*names = map[uint32]string{}
	}
	number := strconv.FormatUint(uint64(id), 10)
	name, err := lookUp(number)
	if err != nil {
		name = number
	}
	(*names)[id] = name
	return name
}

// readMetadata returns the metadata of the file at path, nil if there is none.
func readMetadata(path string) map[string]string {
	names, err := attributes(func(buf []byte) (int, error) { return unix.Listxattr(path, buf) })
	if err != nil {
		return nil
	}
	var metadata map[string]string
	for name := range strings.SplitSeq(names, "\x00") {
		key, ours := strings.CutPrefix(name, metadataPrefix)
		if !ours {
			continue
		}
		value, err := attributes(func(buf []byte) (int, error) { return unix.Getxattr(path, name, buf) })
		if err != nil {
			continue
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[strings.ToValidUTF8(key, "\uFFFD")] = strings.ToValidUTF8(value, "\uFFFD")
	}
	return metadata
}

// attributes calls get with a buffer that is large enough.
func attributes(get func([]byte) (int, error)) (string, error) {
	for {
		n, err := get(nil)
		if err != nil || n == 0 {
			return "", err
		}
		buf := make([]byte, n)
		n, err = get(buf)
		if errors.Is(err, unix.ERANGE) {
			continue // it grew
		}
		return string(buf[:max(n, 0)]), err
	}
}

// writeMetadata makes metadata the whole metadata of an open file.
func writeMetadata(file *os.File, metadata map[string]string) error {
	return control(file, func(fd int) error {
		names, err := attributes(func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) })
		if errors.Is(err, unix.ENOTSUP) && len(metadata) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		for name := range strings.SplitSeq(names, "\x00") {
			key, ours := strings.CutPrefix(name, metadataPrefix)
			if _, stays := metadata[key]; !ours || stays {
				continue
			}
			if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
				return err
			}
		}
		for key, value := range metadata {
			if err := unix.Fsetxattr(fd, metadataPrefix+key, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	})
}
