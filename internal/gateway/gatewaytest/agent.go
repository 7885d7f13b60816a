package gatewaytest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// host serves a handler on connections within this process.
type host struct {
	server    *http.Server
	conns     chan net.Conn
	closed    chan struct{}
	once      sync.Once
	wait      sync.WaitGroup
	transport *http.Transport

	mu  sync.Mutex
	all []net.Conn // guarded by mu; our ends
}

func newHost(h http.Handler) *host {
	s := &host{conns: make(chan net.Conn), closed: make(chan struct{}), server: &http.Server{Handler: h}} //nolint:gosec // within this process
	s.transport = &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx) },
		DisableCompression: true,
	}
	s.wait.Go(func() { _ = s.server.Serve(s) })
	return s
}

func (s *host) dial(ctx context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case s.conns <- theirs:
		s.mu.Lock()
		s.all = append(s.all, ours)
		s.mu.Unlock()
		return ours, nil
	case <-s.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept is the net.Listener's.
func (s *host) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close is the net.Listener's.
func (s *host) Close() error { return nil }

// Addr is the net.Listener's.
func (s *host) Addr() net.Addr { return &net.UnixAddr{Name: "guest"} }

func (s *host) close() {
	s.once.Do(func() {
		close(s.closed)
		_ = s.server.Close()
		s.mu.Lock()
		for _, c := range s.all {
			_ = c.Close()
		}
		s.mu.Unlock()
		s.transport.CloseIdleConnections()
		s.wait.Wait()
	})
}

// routes are those of the agent that the tests need. A command line is "echo
// WORDS", "fail", "sleep SECONDS" (a line each second), "hold" (one line, then silence),
// "flood" (lines until the client leaves).
func (s *Sandbox) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /process.Process/Start", s.start)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"ts":1,"cpu_count":2,"cpu_used_pct":1.5,"mem_total":100,"mem_used":50,"mem_cache":7,"disk_used":8,"disk_total":9}`)
	})
	mux.HandleFunc("GET /files", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		text, ok := s.files[r.URL.Query().Get("path")]
		s.mu.Unlock()
		if !ok {
			http.Error(w, `{"code":404,"message":"not found"}`, http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(w, text)
	})
	mux.HandleFunc("POST /files", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		s.mu.Lock()
		s.files[r.URL.Query().Get("path")] = string(body)
		s.mu.Unlock()
		fmt.Fprint(w, `[]`)
	})
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "header": r.Header, "path": r.URL.Path, "query": r.URL.RawQuery})
	})
	mux.HandleFunc("/init", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	return mux
}

func (s *Sandbox) start(w http.ResponseWriter, r *http.Request) {
	var head [5]byte
	if _, err := io.ReadFull(r.Body, head[:]); err != nil {
		http.Error(w, "short", http.StatusBadRequest)
		return
	}
	message := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(r.Body, message); err != nil {
		http.Error(w, "short", http.StatusBadRequest)
		return
	}
	var start struct {
		Process struct {
			Args []string `json:"args"`
		} `json:"process"`
	}
	if err := json.Unmarshal(message, &start); err != nil || len(start.Process.Args) == 0 {
		http.Error(w, "bad", http.StatusBadRequest)
		return
	}
	word, rest, _ := strings.Cut(start.Process.Args[len(start.Process.Args)-1], " ")
	w.Header().Set("Content-Type", "application/connect+json")
	out := func(flags byte, v any) error {
		body, _ := json.Marshal(v)
		frame := append([]byte{flags, 0, 0, 0, 0}, body...)
		binary.BigEndian.PutUint32(frame[1:5], uint32(len(body)))
		if _, err := w.Write(frame); err != nil {
			return err
		}
		return http.NewResponseController(w).Flush()
	}
	line := func(text string) error {
		return out(0, map[string]any{"event": map[string]any{"data": map[string]any{"stdout": []byte(text)}}})
	}
	_ = out(0, map[string]any{"event": map[string]any{"start": map[string]any{"pid": 7}}})
	switch word {
	case "echo":
		_ = line(rest)
	case "sleep":
		var n int
		_, _ = fmt.Sscan(rest, &n)
		for range n {
			select {
			case <-time.After(time.Second):
				_ = line("tick")
			case <-r.Context().Done():
				return
			}
		}
	case "hold":
		_ = line("held")
		<-r.Context().Done()
		return
	case "flood":
		for line(strings.Repeat("x", 16<<10)) == nil {
			if r.Context().Err() != nil {
				return
			}
		}
		return
	}
	end := map[string]any{"exited": true, "status": "exit status 0"}
	if word == "fail" {
		end = map[string]any{"exited": true, "status": "exit status 3", "exitCode": 3, "error": "exit status 3"}
	}
	_ = out(0, map[string]any{"event": map[string]any{"end": end}})
	_ = out(2, map[string]any{})
}
