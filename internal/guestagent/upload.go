package guestagent

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// maxMetadata bounds the metadata of one file, keys and values: ext4 keeps all
// extended attributes of a file in one block.
const maxMetadata = 4096

// metadataHeader begins the headers that carry metadata.
const metadataHeader = "X-Metadata-"

var errNotRegular = errors.New("not a regular file")

// uploaded describes one file of the answer to POST /files.
type uploaded struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload is POST /files: one file as the body, or several as the parts of a form.
func (s *Server) upload(w http.ResponseWriter, r *http.Request) {
	a, ok := s.fileAccount(w, r)
	if !ok {
		return
	}
	u := &uploading{
		account: a, workdir: s.settings().workdir, path: r.URL.Query().Get("path"),
		seen: map[string]bool{}, done: []uploaded{},
	}
	if err := u.read(r); err != nil {
		// What is left of the body is not read: the client sees the answer and stops.
		writeFileError(w, u.at, err)
		return
	}
	writeJSON(w, u.done)
}

// uploading is one upload in progress.
type uploading struct {
	account  Account
	workdir  string
	path     string // of the query; may be empty
	metadata map[string]string

	at   string          // path in hand, for errors
	seen map[string]bool // paths written
	done []uploaded
}

func (u *uploading) read(r *http.Request) error {
	var err error
	if u.metadata, err = requestMetadata(r.Header); err != nil {
		return err
	}
	return readUpload(r, u.path, u.write)
}

// readUpload calls write with each file of a request: its body, or the parts of
// a form. path is that of the query; with it parts need no name.
func readUpload(r *http.Request, path string, write func(path string, content io.Reader) error) error {
	kind, parameters, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return badRequest("Content-Type: %v", err)
	}
	body := io.Reader(r.Body)
	switch coding := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); coding {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return badRequest("the body is not gzip: %v", err)
		}
		body = gzipReader{z}
	default:
		return badRequest("Content-Encoding %q is not supported: use gzip or none", coding)
	}
	switch kind {
	case "application/octet-stream":
		if path == "" {
			return badRequest("path is required")
		}
		return write(path, body)
	case "multipart/form-data":
		if parameters["boundary"] == "" {
			return badRequest("Content-Type: no boundary")
		}
		return readForm(multipart.NewReader(body, parameters["boundary"]), path, write)
	}
	return badRequest("Content-Type %q is not supported: use multipart/form-data or application/octet-stream", kind)
}

// gzipReader turns what is wrong with compressed data into a fault of the request.
type gzipReader struct{ z *gzip.Reader }

func (g gzipReader) Read(p []byte) (int, error) {
	n, err := g.z.Read(p)
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) {
		err = badRequest("the body is not gzip: %v", err)
	}
	return n, err
}

// readForm calls write with the parts named "file"; others are skipped.
func readForm(parts *multipart.Reader, query string, write func(path string, content io.Reader) error) error {
	for {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return bodyError(err)
		}
		if part.FormName() != "file" {
			continue
		}
		path := query
		if path == "" {
			path = fullFileName(part)
		}
		if path == "" {
			return badRequest("a part has no filename, and there is no path in the query")
		}
		if err := write(path, part); err != nil {
			return err
		}
	}
}

// fullFileName is the file name of a part with its folders, which
// multipart.Part.FileName takes off.
func fullFileName(part *multipart.Part) string {
	_, parameters, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	if err != nil {
		return ""
	}
	return parameters["filename"]
}

// bodyError says that a body which cannot be read to its end is the request's fault.
func bodyError(err error) error {
	if re := (*requestError)(nil); errors.As(err, &re) {
		return err
	}
	return badRequest("read body: %v", err)
}

// write writes one file.
func (u *uploading) write(path string, content io.Reader) error {
	abs, err := u.account.resolve(path, u.workdir)
	if err != nil {
		return badRequest("%v", err)
	}
	u.at = abs
	if u.seen[abs] {
		return badRequest("path '%s' is there twice", abs)
	}
	u.seen[abs] = true
	if strings.HasSuffix(path, "/") {
		return badRequest("path '%s' is a directory", abs)
	}
	f, err := u.account.openForWriting(abs)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := writeMetadata(f, u.metadata); err != nil {
		if errors.Is(err, unix.ENOTSUP) {
			return badRequest("path '%s': its file system keeps no metadata", abs)
		}
		return fmt.Errorf("write metadata: %w", err)
	}
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	body := &countedReader{r: content}
	if _, err := io.CopyBuffer(onlyWriter{f}, body, buf[:]); err != nil {
		if body.failed != nil {
			return bodyError(body.failed)
		}
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	u.done = append(u.done, uploaded{Path: abs, Name: filepath.Base(abs), Type: "file", Metadata: u.metadata})
	return nil
}

// countedReader remembers its error, to tell it from the writer's.
type countedReader struct {
	r      io.Reader
	failed error
}

func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		c.failed = err
	}
	return n, err
}

// openForWriting opens path, empty, and makes it and the folders above it where
// they are missing. A file that is there is written in place: its links and its
// mode survive.
func (a Account) openForWriting(path string) (f *os.File, err error) {
	err = a.perform(path, goalWrite, func(p place) error {
		f, err = a.create(p)
		return err
	})
	return f, err
}

// create opens the file at p, empty.
func (a Account) create(p place) (*os.File, error) {
	// O_NONBLOCK: opening a FIFO must not wait for its reader.
	flags := os.O_WRONLY | os.O_CREATE | unix.O_NONBLOCK
	if p.asRoot {
		flags |= unix.O_NOFOLLOW
	}
	f, err := os.OpenFile(p.path, flags, 0o666)
	if err != nil {
		return nil, err
	}
	err = func() error {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if !st.Mode().IsRegular() {
			return errNotRegular
		}
		if p.asRoot {
			if err := f.Chown(int(a.UID), int(a.GID)); err != nil {
				return err
			}
		}
		return f.Truncate(0)
	}()
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// requestMetadata reads the X-Metadata-* headers.
func requestMetadata(h http.Header) (map[string]string, error) {
	var metadata map[string]string
	size := 0
	for name, values := range h {
		key, ours := strings.CutPrefix(name, metadataHeader)
		if !ours {
			continue
		}
		key = strings.ToLower(key)
		value := strings.Join(values, ", ")
		if key == "" || len(key)+len(metadataPrefix) > 255 || !printable(key) || !printable(value) {
			return nil, badRequest("metadata: key and value must be printable ASCII, the key at most %d bytes", 255-len(metadataPrefix))
		}
		if size += len(key) + len(value); size > maxMetadata {
			return nil, badRequest("metadata: more than %d bytes", maxMetadata)
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[key] = value
	}
	return metadata, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
