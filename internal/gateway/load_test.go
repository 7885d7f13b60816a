package gateway_test

import (
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/gateway"
)

// idleConnections stands for the 10,000 of real life, which cost five times as much.
const idleConnections = 2000

func TestIdleConnectionsCostLittleAndBlockNobody(t *testing.T) {
	r := newRig(t, nil)
	b := r.create(nil)
	before := heap()
	conns := make([]net.Conn, 0, idleConnections)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range idleConnections {
		c, err := net.Dial("tcp", strings.TrimPrefix(r.server.URL(), "http://"))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		switch i % 3 { // never a byte, half a header, one request and then nothing
		case 1:
			fmt.Fprint(c, "GET /health HTTP/1.1\r\nHo")
		case 2:
			fmt.Fprint(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		}
	}
	time.Sleep(200 * time.Millisecond)
	begin := time.Now()
	r.want(200, r.do("GET", "/v2/sandboxes", nil))
	r.do("GET", "/health", nil, b.route(49983)...)
	if took := time.Since(begin); took > time.Second {
		t.Errorf("two requests beside them took %v", took)
	}
	if each := (heap() - before) / idleConnections; each > 32<<10 {
		t.Errorf("an idle connection costs %d bytes of heap and stack, want 32 KiB at most", each)
	}
}

// heap returns what the heap and the stacks occupy.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

func TestConnectionsAboveTheLimitWaitAndAreServedInTheEnd(t *testing.T) {
	r := newRig(t, func(c *gateway.Config) { c.MaxConns = 3 })
	address := strings.TrimPrefix(r.server.URL(), "http://")
	var held []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	time.Sleep(100 * time.Millisecond)
	answered := make(chan int)
	go func() { answered <- r.do("GET", "/health", nil).status }()
	select {
	case s := <-answered:
		t.Errorf("a fourth connection is served (%d) although three are open", s)
	case <-time.After(200 * time.Millisecond):
	}
	for _, c := range held {
		c.Close()
	}
	select {
	case s := <-answered:
		if s != 204 {
			t.Errorf("status %d", s)
		}
	case <-time.After(5 * time.Second):
		t.Error("the fourth connection is never served")
	}
}

func TestKeysAreChangedWhileTheServerRunsAndWhileItDoesNot(t *testing.T) {
	r := newRig(t, nil)
	change := func() (secret, id string) {
		t.Helper()
		k, err := gateway.OpenKeys(r.config.Dir, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		secret, rec, err := k.Create("x", "blue")
		if err != nil {
			t.Fatal(err)
		}
		list, err := k.List()
		if err != nil || len(list) == 0 {
			t.Fatalf("list: %v, %v", list, err)
		}
		if _, _, err := k.Create("no/name", "blue"); err == nil {
			t.Error("a bad name is accepted")
		}
		if err := k.Revoke("nothing"); err == nil {
			t.Error("a key that does not exist was revoked")
		}
		return secret, rec.ID
	}
	live, id := change()
	r.want(200, r.do("GET", "/sandboxes", nil, "X-API-Key", live))
	k, err := gateway.OpenKeys(r.config.Dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Revoke(id); err != nil {
		t.Fatal(err)
	}
	k.Close()
	r.want(401, r.do("GET", "/sandboxes", nil, "X-API-Key", live))
	r.stop()
	asleep, _ := change()
	r.start()
	r.want(200, r.do("GET", "/sandboxes", nil, "X-API-Key", asleep))
}
