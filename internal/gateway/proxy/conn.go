package proxy

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"

	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
)

type connKey struct{}

// WithConn is the ConnContext of the server: a request must be able to reset
// its connection.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// resetOnAbort, deferred, lets an answer that is broken off end with a reset of
// the connection. A client that saw a clean end would take what it has for all
// there is. answered: the whole answer is our own.
func resetOnAbort(r *http.Request, forwarding context.Context, answered *bool) { //nolint:revive // the request's context is another
	e := recover()
	if e == nil {
		if *answered || !errors.Is(context.Cause(forwarding), lifecycle.ErrCut) {
			return
		}
		e = http.ErrAbortHandler // the copy may have ended without an error
	}
	if err, ok := e.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		Reset(r.Context()) //nolint:contextcheck // it holds the connection, which is all that is asked of it
	}
	panic(e)
}

// Reset makes the coming close of a request's connection a reset.
func Reset(ctx context.Context) {
	c, ok := ctx.Value(connKey{}).(net.Conn)
	if !ok {
		return
	}
	if tcp, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = tcp.SetLinger(0) // fails only on a connection that is gone
	}
}

// active counts the requests of each sandbox.
type active struct {
	mu sync.Mutex
	by map[string]int // guarded by mu; without zeros
}

func (a *active) enter(id string, limit int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.by[id] >= limit {
		return false
	}
	a.by[id]++
	return true
}

func (a *active) leave(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.by[id]--; a.by[id] <= 0 {
		delete(a.by, id)
	}
}
