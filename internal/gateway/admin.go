package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/control"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// errInUse: another process listens on the port.
var errInUse error = syscall.EADDRINUSE

// adminSocket in the gateway's folder.
const adminSocket = "admin.sock"

// admin answers the key commands of this host. Who may open the socket may read
// the store as well: it needs no key.
type admin struct {
	keys *keys.Ring
	http *http.Server
	l    net.Listener // set by listen
	path string       // of the socket; set by listen
}

func newAdmin(ring *keys.Ring, log *slog.Logger) *admin {
	a := &admin{keys: ring}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /keys", a.list)
	mux.HandleFunc("POST /keys", a.create)
	mux.HandleFunc("DELETE /keys/{id}", a.revoke)
	a.http = &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	return a
}

func (a *admin) listen(ctx context.Context, dir string) error {
	path := filepath.Join(dir, adminSocket)
	if err := removeStale(path); err != nil {
		return fmt.Errorf("listen for key commands: %w", err)
	}
	// Made where nobody else can reach it, then moved: between bind and chmod anybody
	// could connect. (The umask is the whole process's: files that other goroutines make
	// meanwhile would get it too.)
	// The names are short because those of sockets are limited to 107 bytes.
	private := filepath.Join(dir, ".a")
	if err := errors.Join(os.RemoveAll(private), os.Mkdir(private, 0o700)); err != nil {
		return fmt.Errorf("listen for key commands: %w", err)
	}
	defer func() { _ = os.RemoveAll(private) }()
	made := filepath.Join(private, "s")
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", made)
	if err != nil {
		return fmt.Errorf("listen for key commands: %w", err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // it would look for the first name
	}
	if err := errors.Join(os.Chmod(made, 0o600), os.Rename(made, path)); err != nil {
		_ = l.Close()
		return fmt.Errorf("listen for key commands: %w", err)
	}
	a.l, a.path = l, path
	return nil
}

func (a *admin) run() {
	if a.l != nil {
		_ = a.http.Serve(a.l) // ends with close
	}
}

func (a *admin) close() {
	_ = a.http.Close()
	if a.l != nil {
		_ = a.l.Close() // if run never served it
		_ = os.Remove(a.path)
	}
}

// A newKey is the request and the answer of a creation.
type newKey struct {
	Name   string    `json:"name"`
	Team   string    `json:"team"`
	Secret string    `json:"secret,omitempty"`
	Key    store.Key `json:"key,omitzero"`
}

func (a *admin) list(w http.ResponseWriter, _ *http.Request) { answer(w, a.keys.List()) }

func (a *admin) create(w http.ResponseWriter, r *http.Request) {
	var k newKey
	if err := json.NewDecoder(io.LimitReader(r.Body, 4096)).Decode(&k); err != nil {
		control.WriteError(w, http.StatusBadRequest, err.Error())
		return
	}
	var err error
	if k.Secret, k.Key, err = a.keys.Create(k.Name, k.Team); err != nil {
		control.WriteError(w, http.StatusBadRequest, err.Error())
		return
	}
	answer(w, k)
}

func (a *admin) revoke(w http.ResponseWriter, r *http.Request) {
	err := a.keys.Revoke(r.PathValue("id"))
	switch {
	case errors.Is(err, keys.ErrNoKey):
		control.WriteError(w, http.StatusNotFound, err.Error())
	case err != nil:
		control.WriteError(w, http.StatusInternalServerError, err.Error())
	default:
		answer(w, struct{}{})
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // a client that has left
}

// A KeyStore changes the keys of a host, whether its server runs or not.
type KeyStore interface {
	List() ([]store.Key, error)
	Create(name, team string) (secret string, k store.Key, err error)
	Revoke(id string) error
	Close() error
}

// OpenKeys opens the keys in the gateway's folder, or asks the server that has
// them open.
func OpenKeys(dir string, log *slog.Logger) (KeyStore, error) {
	s, err := store.Open(dir, log)
	if errors.Is(err, store.ErrLocked) {
		return remoteKeys(dir), nil
	}
	if err != nil {
		return nil, err
	}
	ring, err := keys.Load(s)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return localKeys{ring, s}, nil
}

type localKeys struct {
	*keys.Ring
	store *store.Store
}

func (l localKeys) List() ([]store.Key, error) { return l.Ring.List(), nil }
func (l localKeys) Close() error               { return l.store.Close() }

// remote asks the running server.
type remote struct{ client *http.Client }

func remoteKeys(dir string) remote {
	path := filepath.Join(dir, adminSocket)
	return remote{&http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}},
	}}
}

func (r remote) call(method, path string, in, out any) error {
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(context.Background(), method, "http://admin"+path, &body)
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return fmt.Errorf("ask the running server: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var e struct {
			Message string `json:"message"`
		}
		if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&e); err != nil || e.Message == "" {
			e.Message = resp.Status
		}
		return errors.New(e.Message)
	}
	return json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(out)
}

func (r remote) List() (list []store.Key, err error) {
	err = r.call(http.MethodGet, "/keys", nil, &list)
	return list, err
}

func (r remote) Create(name, team string) (string, store.Key, error) {
	var k newKey
	err := r.call(http.MethodPost, "/keys", newKey{Name: name, Team: team}, &k)
	return k.Secret, k.Key, err
}

func (r remote) Revoke(id string) error {
	var none struct{}
	return r.call(http.MethodDelete, "/keys/"+id, nil, &none)
}

func (r remote) Close() error {
	r.client.CloseIdleConnections()
	return nil
}
