package guestlink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// FileError is the guest's answer to a file request it did not carry out.
type FileError struct {
	Status  int // of HTTP: 400, 401, 403, 404, 507, ...
	Message string
}

func (e *FileError) Error() string { return fmt.Sprintf("%s (%d)", e.Message, e.Status) }

// Upload writes what r gives to path in the guest, owned by user ("" is
// "user"). Missing folders are created. If r or the link fails, the file holds
// what was sent until then.
func (c *Client) Upload(ctx context.Context, path, user string, r io.Reader) error {
	what := "upload " + path
	// Not r itself: the transport would close it if it can be closed.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, fileURL(path, user), struct{ io.Reader }{r})
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	return c.exchange(req, what, io.Discard)
}

// Download writes the content of path in the guest to w. After an error w has
// the part that came.
func (c *Client) Download(ctx context.Context, path, user string, w io.Writer) error {
	what := "download " + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fileURL(path, user), nil)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return c.exchange(req, what, w)
}

// exchange sends a request about a file and copies the answer's body to w.
func (c *Client) exchange(req *http.Request, what string, w io.Writer) error {
	resp, err := c.HTTPClient().Do(req)
	if err != nil {
		return c.describe(req.Context(), what, err)
	}
	defer resp.Body.Close()
	if err := fileStatus(resp); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	_, err = io.Copy(w, resp.Body)
	return c.describe(req.Context(), what, err)
}

func fileURL(path, user string) string {
	query := url.Values{"path": {path}}
	if user != "" {
		query.Set("username", user)
	}
	return baseURL + "/files?" + query.Encode()
}

// fileStatus returns nil for a 200, ErrSealed or a *FileError.
func fileStatus(resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	var body struct {
		Message string `json:"message"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&body); err != nil || body.Message == "" {
		body.Message = http.StatusText(resp.StatusCode)
	}
	err := error(&FileError{Status: resp.StatusCode, Message: body.Message})
	if resp.StatusCode == http.StatusPreconditionFailed {
		return errors.Join(ErrSealed, err)
	}
	return err
}
