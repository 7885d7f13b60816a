package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// maxUpload bounds the files of one COPY.
const maxUpload = 2 << 30

// ErrTooLarge: an upload is larger than maxUpload. Nothing of it was kept.
var ErrTooLarge = errors.New("the upload is too large")

var hashPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// ValidHash says whether a client's name for its files is one.
func ValidHash(hash string) bool { return hashPattern.MatchString(hash) }

func (b *Builder) upload(hash string) string { return filepath.Join(b.opts.Dir, "uploads", hash) }

// HasUpload says whether the files of a hash are there.
func (b *Builder) HasUpload(hash string) bool {
	if !ValidHash(hash) {
		return false
	}
	_, err := os.Stat(b.upload(hash))
	return err == nil
}

// Upload keeps the files of a hash, once they have come completely: size is what
// the client has announced, -1 if nothing.
func (b *Builder) Upload(hash string, body io.Reader, size int64) (err error) {
	if size > maxUpload {
		return ErrTooLarge
	}
	f, err := os.CreateTemp(filepath.Join(b.opts.Dir, "uploads"), ".tmp-*")
	if err != nil {
		return fmt.Errorf("keep upload: %w", err)
	}
	defer func() {
		f.Close()
		os.Remove(f.Name()) // gone, if it was renamed
	}()
	n, err := io.Copy(f, io.LimitReader(body, maxUpload+1))
	switch {
	case err != nil:
		return fmt.Errorf("keep upload: %w", err)
	case n > maxUpload:
		return ErrTooLarge
	case size >= 0 && n != size:
		return fmt.Errorf("keep upload: %d of %d bytes came", n, size)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("keep upload: %w", err)
	}
	if err := os.Rename(f.Name(), b.upload(hash)); err != nil {
		return fmt.Errorf("keep upload: %w", err)
	}
	return nil
}

// copyScript puts what the archive has at SRC to DEST: a file to a path, or into
// a folder if DEST ends with a slash or is one; a folder's content into DEST. An
// archive may be compressed or not; tar finds out. It unpacks inside the guest,
// where a hostile one harms nobody but its owner.
const copyScript = `set -e
work=$(mktemp -d)
trap 'rm -rf "$work" "$ARCHIVE"' EXIT
tar -xf "$ARCHIVE" -C "$work" --no-same-owner
cd "$work"
set -- $SRC
[ -e "$1" ] || { echo "COPY: $SRC is not among the uploaded files" >&2; exit 1; }
for from in "$@"; do
	[ -n "$MODE" ] && chmod -R "$MODE" "$from"
	chown -R "$OWNER" "$from"
	if [ -d "$from" ]; then
		mkdir -p "$DEST"
		cp -a "$from/." "$DEST/"
	elif [ "${DEST%/}" != "$DEST" ] || [ -d "$DEST" ] || [ $# -gt 1 ]; then
		mkdir -p "$DEST"
		cp -a "$from" "$DEST/"
	else
		mkdir -p "$(dirname "$DEST")"
		cp -a "$from" "$DEST"
	fi
done
`

// copy is the step COPY: source, destination, user, octal mode.
func (r *run) copy(ctx context.Context, s Step) error {
	archive := "/tmp/.copy-" + s.FilesHash
	if err := r.send(ctx, r.builder.upload(s.FilesHash), archive); err != nil {
		return err
	}
	arg := func(i int) string {
		if i < len(s.Args) {
			return s.Args[i]
		}
		return ""
	}
	dest := r.dir(arg(1))
	if strings.HasSuffix(arg(1), "/") {
		dest += "/"
	}
	owner := arg(2)
	if owner == "" {
		owner = r.owner()
	}
	// Patterns are the shell's; a space in a name is not one.
	src := strings.ReplaceAll(path.Clean(arg(0)), " ", "?")
	return r.command(ctx, copyScript, "root", "/", map[string]string{
		"ARCHIVE": archive, "SRC": src, "DEST": dest, "OWNER": owner, "MODE": arg(3),
	})
}

// send writes a file of the host into the guest.
func (r *run) send(ctx context.Context, from, to string) error {
	f, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("send files: %w", err)
	}
	defer f.Close()
	end, err := r.sandbox.BeginCall(ctx, "build")
	if err != nil {
		return err
	}
	defer end()
	q := url.Values{"path": {to}, "username": {"root"}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/files?"+q.Encode(), f)
	if err != nil {
		return fmt.Errorf("send files: %w", err)
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := r.sandbox.Agent().RoundTrip(req)
	if err != nil {
		return fmt.Errorf("send files: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		return fmt.Errorf("send files: the agent answered %s: %s", resp.Status, text)
	}
	return nil
}
