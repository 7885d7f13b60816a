package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	fspb "github.com/agentzip/agentzip/api/gen/filesystem"
	"github.com/agentzip/agentzip/api/gen/filesystem/filesystemconnect"
)

// maxListed bounds the answer of ListDir: it is one message, some 300 bytes an
// entry, held here and by whoever reads it.
const maxListed = 100_000

var errTooManyEntries = fmt.Errorf("more than %d entries: list a lower depth", maxListed)

// filesystemService is filesystem.Filesystem.
type filesystemService struct {
	server *Server
}

var _ filesystemconnect.FilesystemHandler = (*filesystemService)(nil)

// target returns the account of a request and the absolute form of a path in it.
func (f *filesystemService) target(h http.Header, path string) (Account, string, error) {
	a, err := f.server.account(h)
	if err != nil {
		return a, "", err
	}
	abs, err := a.resolve(path, f.server.settings().workdir)
	if err != nil {
		return a, "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return a, abs, nil
}

// fileError gives an error of the file system the code that E2B's clients act on.
func fileError(path string, err error) error {
	if err == nil {
		return nil
	}
	if ce := (*connect.Error)(nil); errors.As(err, &ce) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return connect.NewError(fileErrorCode(err), fmt.Errorf("path '%s': %w", path, plainError(err)))
}

// plainError takes off the path that system calls saw: it may be one of ours.
func plainError(err error) error {
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	if le := (*os.LinkError)(nil); errors.As(err, &le) {
		return le.Err
	}
	return err
}

func fileErrorCode(err error) connect.Code {
	for _, c := range []struct {
		code   connect.Code
		errnos []error
	}{
		{connect.CodeNotFound, []error{fs.ErrNotExist}},
		{connect.CodeInvalidArgument, []error{
			unix.ENOTDIR, unix.EISDIR, unix.ENAMETOOLONG, unix.EINVAL, unix.ELOOP, unix.ENXIO, unix.EOPNOTSUPP, errNotRegular,
		}},
		{connect.CodeFailedPrecondition, []error{unix.ENOTEMPTY, unix.EBUSY, unix.EROFS}},
		{connect.CodeAlreadyExists, []error{fs.ErrExist}},
		{connect.CodePermissionDenied, []error{fs.ErrPermission}},
		{connect.CodeResourceExhausted, []error{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, errTooManyEntries, errEventsLost}},
	} {
		for _, errno := range c.errnos {
			if errors.Is(err, errno) {
				return c.code
			}
		}
	}
	return connect.CodeInternal
}

func (f *filesystemService) Stat(_ context.Context, req *connect.Request[fspb.StatRequest]) (*connect.Response[fspb.StatResponse], error) {
	a, path, err := f.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	entry, err := a.stat(path)
	if err != nil {
		return nil, fileError(path, err)
	}
	return connect.NewResponse(&fspb.StatResponse{Entry: entry}), nil
}

func (a Account) stat(path string) (entry *fspb.EntryInfo, err error) {
	var e entries
	err = a.perform(path, goalEntry, func(p place) error {
		entry, err = e.describe(p.path, path)
		return err
	})
	return entry, err
}

func (f *filesystemService) MakeDir(_ context.Context, req *connect.Request[fspb.MakeDirRequest]) (*connect.Response[fspb.MakeDirResponse], error) {
	a, path, err := f.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	err = a.perform(path, goalMake, func(p place) error {
		if err := os.Mkdir(p.path, 0o755); err != nil {
			if st, statErr := os.Stat(p.path); errors.Is(err, fs.ErrExist) && statErr == nil && !st.IsDir() {
				return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path '%s' is a file", path))
			}
			return err
		}
		return a.give(p)
	})
	if err != nil {
		return nil, fileError(path, err)
	}
	entry, err := a.stat(path)
	if err != nil {
		return nil, fileError(path, err)
	}
	return connect.NewResponse(&fspb.MakeDirResponse{Entry: entry}), nil
}

func (f *filesystemService) Move(ctx context.Context, req *connect.Request[fspb.MoveRequest]) (*connect.Response[fspb.MoveResponse], error) {
	if req.Msg.GetSource() == "" || req.Msg.GetDestination() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("source and destination are required"))
	}
	a, source, err := f.target(req.Header(), req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	_, destination, err := f.target(req.Header(), req.Msg.GetDestination())
	if err != nil {
		return nil, err
	}
	// Asked first, so that nothing is made for a source that is not there.
	if _, err := a.stat(source); err != nil {
		return nil, fileError(source, err)
	}
	err = a.perform(destination, goalMake, func(to place) error {
		if !to.asRoot {
			return a.rename(ctx, source, to.path)
		}
		return a.perform(source, goalEntry, func(from place) error { return os.Rename(from.path, to.path) })
	})
	if isRefusal(err) { // the destination is the user's, the source is not
		err = a.perform(source, goalEntry, func(from place) error { return os.Rename(from.path, destination) })
	}
	if err != nil {
		return nil, fileError(source, err)
	}
	entry, err := a.stat(destination)
	if err != nil {
		return nil, fileError(destination, err)
	}
	return connect.NewResponse(&fspb.MoveResponse{Entry: entry}), nil
}

// rename is rename(2), or mv(1) where that cannot be done in place: from one
// file system to another. Preconditions: the thread has the account's rights.
func (a Account) rename(ctx context.Context, source, destination string) error {
	err := os.Rename(source, destination)
	if !errors.Is(err, unix.EXDEV) {
		return err
	}
	mv := exec.CommandContext(ctx, "mv", "-T", "--", source, destination)
	if !a.Own {
		mv.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}}
	}
	if out, err := mv.CombinedOutput(); err != nil {
		return fmt.Errorf("move to another file system: %w: %s", err, out[:min(len(out), 1<<10)])
	}
	return nil
}

func (f *filesystemService) Remove(_ context.Context, req *connect.Request[fspb.RemoveRequest]) (*connect.Response[fspb.RemoveResponse], error) {
	if req.Msg.GetPath() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("path is required"))
	}
	a, path, err := f.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the root folder cannot be removed"))
	}
	err = a.perform(path, goalEntry, func(p place) error { return os.RemoveAll(p.path) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fileError(path, err)
	}
	return connect.NewResponse(&fspb.RemoveResponse{}), nil
}

func (f *filesystemService) ListDir(ctx context.Context, req *connect.Request[fspb.ListDirRequest]) (*connect.Response[fspb.ListDirResponse], error) {
	a, path, err := f.target(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	l := &listing{ctx: ctx, depth: max(int(req.Msg.GetDepth()), 1)}
	err = a.perform(path, goalTarget, func(p place) error {
		l.found = nil
		// With a slash the root is followed if it is a link; what root may follow is resolved by now.
		root := p.path + "/"
		if p.asRoot {
			root = p.path
		}
		return l.list(root, path, 1)
	})
	if err != nil {
		return nil, fileError(path, err)
	}
	return connect.NewResponse(&fspb.ListDirResponse{Entries: l.found}), nil
}

// listing is one ListDir.
type listing struct {
	ctx   context.Context //nolint:containedctx // it lives as long as one call
	depth int
	names entries
	found []*fspb.EntryInfo
}

// list adds the entries of a folder, each folder followed by its own entries.
// Links are not followed.
func (l *listing) list(path, reported string, level int) error {
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	children, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}
	slices.SortFunc(children, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, c := range children {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		if len(l.found) >= maxListed {
			return errTooManyEntries
		}
		childPath, childReported := filepath.Join(path, c.Name()), filepath.Join(reported, c.Name())
		entry, err := l.names.describe(childPath, childReported)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it went away meanwhile
		}
		if err != nil {
			return err
		}
		l.found = append(l.found, entry)
		if c.IsDir() && level < l.depth {
			if err := l.list(childPath, childReported, level+1); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
				return err
			}
		}
	}
	return nil
}
