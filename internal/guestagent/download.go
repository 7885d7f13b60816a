package guestagent

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// fileAccount is the user of a request for /files, and answers it if there is none.
func (s *Server) fileAccount(w http.ResponseWriter, r *http.Request) (Account, bool) {
	a, err := s.lookUp(r.URL.Query().Get("username"))
	if err != nil {
		writeError(w, http.StatusUnauthorized, err.Error())
		return a, false
	}
	return a, true
}

// download is GET /files.
func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	a, ok := s.fileAccount(w, r)
	if !ok {
		return
	}
	path, err := a.resolve(r.URL.Query().Get("path"), s.settings().workdir)
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	coding, acceptable := responseCoding(r.Header)
	if !acceptable {
		writeError(w, http.StatusNotAcceptable, "no acceptable encoding: the agent has identity and gzip")
		return
	}
	f, err := a.openForReading(path)
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
	switch {
	case coding == "gzip" && r.Header.Get("Range") == "":
		sendCompressed(w, path, f)
	case st.Size() > 0 && !generated(f):
		http.ServeContent(w, r, "", st.ModTime(), f)
	default:
		sendToEnd(w, path, f)
	}
}

func (a Account) openForReading(path string) (f *os.File, err error) {
	err = a.perform(path, goalTarget, func(p place) error {
		// O_NONBLOCK: opening a FIFO must not wait for its writer.
		flags := os.O_RDONLY | unix.O_NONBLOCK
		if p.asRoot {
			flags |= unix.O_NOFOLLOW
		}
		f, err = os.OpenFile(p.path, flags, 0)
		return err
	})
	return f, err
}

// generated says that the kernel makes the file's content when it is read, so
// that its size is not known.
func generated(f *os.File) bool {
	var st unix.Statfs_t
	err := control(f, func(fd int) error { return unix.Fstatfs(fd, &st) })
	if err != nil {
		return false
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC:
		return true
	}
	return false
}

// sendToEnd sends a file without a size: it is empty, or generated.
func sendToEnd(w http.ResponseWriter, path string, f *os.File) {
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	n, err := f.Read(buf[:])
	if n == 0 {
		if err != nil && !errors.Is(err, io.EOF) {
			writeFileError(w, path, err)
			return
		}
		w.Header().Set("Content-Length", "0")
		return
	}
	if _, err := w.Write(buf[:n]); err != nil {
		return
	}
	if _, err := io.CopyBuffer(onlyWriter{w}, onlyReader{f}, buf[:]); err != nil {
		panic(http.ErrAbortHandler) // the head is sent; a reset is the only honest end
	}
}

// sendCompressed sends a file to a client that wants gzip.
func sendCompressed(w http.ResponseWriter, path string, f *os.File) {
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	n, err := f.Read(buf[:])
	if err != nil && !errors.Is(err, io.EOF) {
		writeFileError(w, path, err)
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		panic("guestagent: " + err.Error()) // the level is a constant
	}
	_, err = z.Write(buf[:n])
	if err == nil && n > 0 {
		_, err = io.CopyBuffer(onlyWriter{z}, onlyReader{f}, buf[:])
	}
	if err = errors.Join(err, z.Close()); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// onlyReader and onlyWriter hide ReadFrom and WriteTo, which would bring their own buffers.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// responseCoding picks how a file is sent: as it is wherever the client takes
// that, because compressing costs the guest time to save copies within one
// machine; "gzip" if it takes or offers nothing else. acceptable is false if it
// takes neither.
func responseCoding(h http.Header) (coding string, acceptable bool) {
	offered := h.Values("Accept-Encoding")
	if len(offered) == 0 {
		return "", true
	}
	quality := map[string]float64{}
	for part := range strings.SplitSeq(strings.Join(offered, ","), ",") {
		name, parameters, _ := strings.Cut(part, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name == "" {
			continue
		}
		q := 1.0
		if value, found := strings.CutPrefix(strings.TrimSpace(parameters), "q="); found {
			var err error
			if q, err = strconv.ParseFloat(value, 64); err != nil {
				q = 0
			}
		}
		quality[name] = q
	}
	rest, hasRest := quality["*"]
	identity, hasIdentity := quality["identity"]
	gz, hasGzip := quality["gzip"]
	takesIdentity := hasIdentity && identity > 0 || !hasIdentity && (!hasRest || rest > 0)
	takesGzip := hasGzip && gz > 0 || !hasGzip && hasRest && rest > 0
	switch {
	case takesGzip && (!takesIdentity || hasGzip && len(quality) == 1):
		return "gzip", true
	case takesIdentity:
		return "", true
	}
	return "", false
}

// writeFileError maps an error of the file system to what E2B's clients expect.
func writeFileError(w http.ResponseWriter, path string, err error) {
	if re := (*requestError)(nil); errors.As(err, &re) {
		writeError(w, re.status, re.message)
		return
	}
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, os.ErrNotExist):
		status = http.StatusNotFound
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		status = http.StatusInsufficientStorage
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ELOOP),
		errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ETXTBSY), errors.Is(err, os.ErrExist), errors.Is(err, errNotRegular):
		status = http.StatusBadRequest
	case errors.Is(err, os.ErrPermission), errors.Is(err, unix.EROFS):
		status = http.StatusForbidden
	}
	writeError(w, status, fmt.Sprintf("path '%s': %v", path, plainError(err)))
}

// requestError is a fault of the request itself.
type requestError struct {
	status  int
	message string
}

func (e *requestError) Error() string { return e.message }

func badRequest(format string, args ...any) error {
	return &requestError{status: http.StatusBadRequest, message: fmt.Sprintf(format, args...)}
}
