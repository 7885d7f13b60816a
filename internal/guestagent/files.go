package guestagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// fileRequest is the common part of GET and POST /files.
func (s *Server) fileRequest(w http.ResponseWriter, r *http.Request) (path string, a Account, ok bool) {
	query := r.URL.Query()
	name := query.Get("username")
	if name == "" {
		name = s.options.DefaultUser
	}
	a, err := s.options.Lookup(name)
	if err != nil {
		writeError(w, http.StatusUnauthorized, fmt.Sprintf("invalid username: '%s'", name))
		return "", a, false
	}
	if query.Get("path") == "" {
		writeError(w, http.StatusBadRequest, "path is required")
		return "", a, false
	}
	return a.resolve(query.Get("path")), a, true
}

// download is GET /files.
func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	path, _, ok := s.fileRequest(w, r)
	if !ok {
		return
	}
	// O_NONBLOCK: opening a FIFO must not wait for its writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		writeFileError(w, path, err)
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		writeFileError(w, path, err)
		return
	}
	switch {
	case st.IsDir():
		writeError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path))
		return
	case !st.Mode().IsRegular():
		writeError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", path))
		return
	}
	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Vary", "Accept-Encoding")
	if st.Size() > 0 {
		http.ServeContent(w, r, "", st.ModTime(), f)
		return
	}
	// Empty, or a file of procfs that says so and is not.
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	n, err := f.Read(buf[:])
	if n == 0 {
		if err != nil && !errors.Is(err, io.EOF) {
			writeFileError(w, path, err)
			return
		}
		h.Set("Content-Length", "0")
		return
	}
	if _, err := w.Write(buf[:n]); err != nil {
		return
	}
	if _, err := io.CopyBuffer(onlyWriter{w}, onlyReader{f}, buf[:]); err != nil {
		panic(http.ErrAbortHandler) // the head is sent; a reset is the only honest end
	}
}

// onlyReader and onlyWriter hide ReadFrom and WriteTo, which would bring their own buffers.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// upload is POST /files with the content as the body.
func (s *Server) upload(w http.ResponseWriter, r *http.Request) {
	path, account, ok := s.fileRequest(w, r)
	if !ok {
		return
	}
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/octet-stream" {
		writeError(w, http.StatusBadRequest, "the body must be application/octet-stream")
		return
	}
	if r.Header.Get("Content-Encoding") != "" {
		writeError(w, http.StatusBadRequest, "the agent takes no Content-Encoding")
		return
	}
	if err := account.makeParents(filepath.Dir(path)); err != nil {
		writeFileError(w, path, err)
		return
	}
	if err := receive(path, account, r.Body); err != nil {
		writeFileError(w, path, err)
		return
	}
	body, err := json.Marshal([]map[string]string{{"path": path, "name": filepath.Base(path), "type": "file"}})
	if err != nil {
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body)
}

// receive writes body to path, in place: links to the file and its mode survive.
func receive(path string, a Account, body io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return errNotRegular
	}
	if err := f.Truncate(0); err != nil {
		return err
	}
	if !a.Own {
		if err := f.Chown(int(a.UID), int(a.GID)); err != nil {
			return err
		}
	}
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	if _, err := io.CopyBuffer(onlyWriter{f}, onlyReader{body}, buf[:]); err != nil {
		return err
	}
	return f.Close()
}

var errNotRegular = errors.New("not a regular file")

// makeParents creates dir and what is missing above it, owned by the account.
func (a Account) makeParents(dir string) error {
	st, err := os.Stat(dir)
	if err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := a.makeParents(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil // two uploads at once
		}
		return err
	}
	if a.Own {
		return nil
	}
	return os.Chown(dir, int(a.UID), int(a.GID))
}

// writeFileError maps an error of the file system to what E2B's clients expect.
func writeFileError(w http.ResponseWriter, path string, err error) {
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		status = http.StatusNotFound
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		status = http.StatusInsufficientStorage
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ELOOP),
		errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL), errors.Is(err, errNotRegular):
		status = http.StatusBadRequest
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		status = http.StatusForbidden
	}
	writeError(w, status, fmt.Sprintf("path '%s': %v", path, err))
}
