package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

// An apiError is an answer that a handler has chosen.
type apiError struct {
	status  int
	message string
	retry   int // Retry-After in seconds; 0 is none
}

func (e *apiError) Error() string { return e.message }

func refuse(status int, format string, args ...any) error {
	return &apiError{status: status, message: fmt.Sprintf(format, args...)}
}

// statuses says what an error of the fleet is to a client; the first that fits.
var statuses = []struct {
	err    error
	status int
	retry  int
}{
	{lifecycle.ErrKilling, http.StatusConflict, 0},
	{lifecycle.ErrNotFound, http.StatusNotFound, 0},
	{lifecycle.ErrPaused, http.StatusConflict, 0},
	{lifecycle.ErrRunning, http.StatusConflict, 0},
	{lifecycle.ErrNotReady, http.StatusConflict, 0},
	{lifecycle.ErrNoTemplate, http.StatusNotFound, 0},
	{lifecycle.ErrLimit, http.StatusTooManyRequests, 1},
	{lifecycle.ErrBusy, http.StatusTooManyRequests, 1},
	{lifecycle.ErrUnchanged, http.StatusServiceUnavailable, 1},
	{lifecycle.ErrUnsupported, http.StatusNotImplemented, 0},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, 0},
}

// classify turns any error into an answer. What is not in the table is ours, and
// its text goes to the log, not to the client.
func (a *API) classify(r *http.Request, err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return &apiError{status: http.StatusRequestEntityTooLarge, message: fmt.Sprintf("the body is larger than %d bytes", e.Limit)}
	}
	for _, s := range statuses {
		if !errors.Is(err, s.err) {
			continue
		}
		// "not found, being killed": to all but connect it is not there any more.
		if s.status == http.StatusConflict && errors.Is(err, lifecycle.ErrKilling) && errors.Is(err, lifecycle.ErrNotFound) {
			continue
		}
		return &apiError{status: s.status, message: err.Error(), retry: s.retry}
	}
	if r.Context().Err() == nil {
		a.opts.Log.Error("answer request", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	return &apiError{status: http.StatusInternalServerError, message: "internal error: " + firstLine(err)}
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// WriteError answers with an error body.
func WriteError(w http.ResponseWriter, status int, message string) {
	body, err := json.Marshal(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
	if err != nil { // two plain fields: cannot be
		body = nil
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that has left
}

func (a *API) fail(w http.ResponseWriter, r *http.Request, err error) {
	e := a.classify(r, err)
	if e.retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.retry))
	}
	WriteError(w, e.status, e.message)
}

// badRequest answers what could not be decoded.
func (a *API) badRequest(w http.ResponseWriter, r *http.Request, err error) {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		a.fail(w, r, err)
		return
	}
	WriteError(w, http.StatusBadRequest, firstLine(err))
}
