package guestagent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"

	"connectrpc.com/connect"

	fspb "github.com/agentzip/agentzip/api/gen/filesystem"
)

const (
	// maxPolled is how many events a watcher keeps for a client that polls. What
	// comes after that stays in the kernel's queue, which has an end too.
	maxPolled = 16384
	// maxWatchers bounds the watchers of clients that forget to remove theirs.
	maxWatchers = 256
)

// openWatch checks a request for a watch and begins it.
func (f *filesystemService) openWatch(h http.Header, path string, recursive, describe, network bool) (*watch, error) {
	a, abs, err := f.target(h, path)
	if err != nil {
		return nil, err
	}
	w, err := newWatch(a, abs, recursive, describe)
	if err != nil {
		return nil, fileError(abs, err)
	}
	if !network && onNetwork(w.root) {
		w.Close()
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("path '%s' is on a network file system, whose changes are not all seen here; allow network mounts to watch it all the same", abs))
	}
	return w, nil
}

// WatchDir sends events until the client leaves.
func (f *filesystemService) WatchDir(ctx context.Context, req *connect.Request[fspb.WatchDirRequest], stream *connect.ServerStream[fspb.WatchDirResponse]) error {
	m := req.Msg
	w, err := f.openWatch(req.Header(), m.GetPath(), m.GetRecursive(), m.GetIncludeEntry(), m.GetAllowNetworkMounts())
	if err != nil {
		return err
	}
	defer w.Close()
	sub := newSubscriber(keepaliveInterval(req.Header()), stream.Send,
		&fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Keepalive{Keepalive: &fspb.WatchDirResponse_KeepAlive{}}})
	defer sub.stop()
	stop := context.AfterFunc(ctx, w.Close)
	defer stop()
	if err := sub.send(&fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Start{Start: &fspb.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	err = w.run(func(e *fspb.FilesystemEvent) error {
		return sub.send(&fspb.WatchDirResponse{Event: &fspb.WatchDirResponse_Filesystem{Filesystem: e}})
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fileError(w.reported, err)
}

// poller is a watch whose events wait for a client that asks for them.
type poller struct {
	watch *watch
	done  chan struct{} // closed when its goroutine has ended
	room  *sync.Cond    // of mu: events were taken, or the end began

	mu     sync.Mutex
	events []*fspb.FilesystemEvent // guarded by mu
	ended  bool                    // guarded by mu
	failed error                   // guarded by mu: why there will be no more events
}

func newPoller(w *watch) *poller {
	p := &poller{watch: w, done: make(chan struct{})}
	p.room = sync.NewCond(&p.mu)
	go func() {
		defer close(p.done)
		err := w.run(p.keep)
		for errors.Is(err, errEventsLost) { // said once, and then it goes on
			p.fail(err)
			err = w.run(p.keep)
		}
		p.fail(err)
	}()
	return p
}

func (p *poller) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = err
}

// keep waits while the client has not taken enough.
func (p *poller) keep(e *fspb.FilesystemEvent) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.events) >= maxPolled && !p.ended {
		p.room.Wait()
	}
	if p.ended {
		return os.ErrClosed
	}
	p.events = append(p.events, e)
	return nil
}

// take returns what has happened since the last call. An error comes after the
// events before it, once.
func (p *poller) take() ([]*fspb.FilesystemEvent, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events) == 0 && p.failed != nil {
		err := p.failed
		p.failed = nil
		return nil, err
	}
	events := p.events
	p.events = nil
	p.room.Broadcast()
	return events, nil
}

func (p *poller) close() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.room.Broadcast()
	p.watch.Close()
	<-p.done
}

// watchers are those of clients that poll. They live until they are removed.
type watchers struct {
	mu   sync.Mutex
	byID map[string]*poller // guarded by mu
}

var errNoWatcher = errors.New("watcher not found")

func (ws *watchers) add(p *poller) (id string, ok bool) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.byID) >= maxWatchers {
		return "", false
	}
	if ws.byID == nil {
		ws.byID = map[string]*poller{}
	}
	id = "w" + rand.Text()
	ws.byID[id] = p
	return id, true
}

func (ws *watchers) find(id string) (*poller, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if p := ws.byID[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errNoWatcher)
}

func (ws *watchers) remove(id string) error {
	ws.mu.Lock()
	p := ws.byID[id]
	delete(ws.byID, id)
	ws.mu.Unlock()
	if p == nil {
		return connect.NewError(connect.CodeNotFound, errNoWatcher)
	}
	p.close()
	return nil
}

func (ws *watchers) closeAll() {
	ws.mu.Lock()
	all := ws.byID
	ws.byID = nil
	ws.mu.Unlock()
	for _, p := range all {
		p.close()
	}
}

func (f *filesystemService) CreateWatcher(_ context.Context, req *connect.Request[fspb.CreateWatcherRequest]) (*connect.Response[fspb.CreateWatcherResponse], error) {
	m := req.Msg
	w, err := f.openWatch(req.Header(), m.GetPath(), m.GetRecursive(), m.GetIncludeEntry(), m.GetAllowNetworkMounts())
	if err != nil {
		return nil, err
	}
	p := newPoller(w)
	id, ok := f.server.watchers.add(p)
	if !ok {
		p.close()
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d watchers exist: remove some", maxWatchers))
	}
	return connect.NewResponse(&fspb.CreateWatcherResponse{WatcherId: id}), nil
}

func (f *filesystemService) GetWatcherEvents(_ context.Context, req *connect.Request[fspb.GetWatcherEventsRequest]) (*connect.Response[fspb.GetWatcherEventsResponse], error) {
	p, err := f.server.watchers.find(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	events, err := p.take()
	if err != nil {
		return nil, fileError(p.watch.reported, err)
	}
	return connect.NewResponse(&fspb.GetWatcherEventsResponse{Events: events}), nil
}

func (f *filesystemService) RemoveWatcher(_ context.Context, req *connect.Request[fspb.RemoveWatcherRequest]) (*connect.Response[fspb.RemoveWatcherResponse], error) {
	if err := f.server.watchers.remove(req.Msg.GetWatcherId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&fspb.RemoveWatcherResponse{}), nil
}
