package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns two connected sockets.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { _ = c.Close() })
	}
	return conns[0], conns[1]
}

// serve answers each command with what reply returns, after a greeting. The QEMU of
// these tests: it knows the wire format and nothing else.
func serve(t *testing.T, conn *net.UnixConn, reply func(command string, id uint64, args json.RawMessage) string) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		fmt.Fprintln(conn, `{"QMP": {"version": {}, "capabilities": []}}`)
		sc := bufio.NewScanner(conn)
		for sc.Scan() {
			var m struct {
				Execute   string
				Arguments json.RawMessage
				ID        uint64
			}
			if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
				t.Errorf("client sent %q: %v", sc.Text(), err)
				return
			}
			answer := fmt.Sprintf(`{"return": {}, "id": %d}`, m.ID)
			if m.Execute != "qmp_capabilities" {
				answer = reply(m.Execute, m.ID, m.Arguments)
			}
			if _, err := fmt.Fprintln(conn, answer); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() { _ = conn.Close(); wg.Wait() })
}

func dial(t *testing.T, conn *net.UnixConn, onEvent func(Event)) *Client {
	t.Helper()
	c, err := Dial(t.Context(), conn, onEvent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestAnAnswerIsDecodedAndARefusalIsAnError(t *testing.T) {
	ours, theirs := pair(t)
	serve(t, theirs, func(command string, id uint64, args json.RawMessage) string {
		if command == "echo" {
			return fmt.Sprintf("{\"return\": %s, \"id\": %d}\r", args, id)
		}
		return fmt.Sprintf(`{"error": {"class": "CommandNotFound", "desc": "no %s here"}, "id": %d}`, command, id)
	})
	c := dial(t, ours, nil)
	want := map[string]string{"a": strings.Repeat("long ", 10000)}
	var got map[string]string
	if err := c.Execute(t.Context(), "echo", want, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the answer differs (-want +got):\n%s", diff)
	}
	err := c.Execute(t.Context(), "nothing", nil, nil)
	var refused *Error
	if !errors.As(err, &refused) {
		t.Fatalf("the refusal is %v, want an *Error", err)
	}
	if diff := cmp.Diff(&Error{"nothing", "CommandNotFound", "no nothing here"}, refused); diff != "" {
		t.Errorf("the refusal differs (-want +got):\n%s", diff)
	}
}

func TestEventsArriveInOrderBetweenAnswers(t *testing.T) {
	ours, theirs := pair(t)
	serve(t, theirs, func(command string, id uint64, _ json.RawMessage) string {
		return fmt.Sprintf("{\"event\": \"BEFORE\", \"data\": {\"of\": %q}}\n{\"return\": {}, \"id\": %d}\n{\"event\": \"AFTER\"}", command, id)
	})
	events := make(chan string, 10)
	c := dial(t, ours, func(e Event) { events <- e.Name + string(e.Data) })
	for _, name := range []string{"one", "two"} {
		if err := c.Execute(t.Context(), name, nil, nil); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{fmt.Sprintf(`BEFORE{"of": %q}`, name), "AFTER"} {
			if got := <-events; got != want {
				t.Errorf("event %s, want %s", got, want)
			}
		}
	}
}

func TestALateAnswerIsNotTakenForTheNextOne(t *testing.T) {
	ours, theirs := pair(t)
	var late string
	serve(t, theirs, func(command string, id uint64, _ json.RawMessage) string {
		if command == "slow" {
			late = fmt.Sprintf(`{"return": "slow", "id": %d}`, id)
			return `{"event": "TAKEN"}`
		}
		return late + "\n" + fmt.Sprintf(`{"return": "fast", "id": %d}`, id)
	})
	taken := make(chan struct{})
	c := dial(t, ours, func(Event) { close(taken) })
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-taken; cancel() }()
	if err := c.Execute(ctx, "slow", nil, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("the slow command ends with %v, want context.Canceled", err)
	}
	var got string
	if err := c.Execute(t.Context(), "fast", nil, &got); err != nil || got != "fast" {
		t.Errorf("the fast command answers %q (%v)", got, err)
	}
}

func TestADescriptorTravelsWithItsCommand(t *testing.T) {
	ours, theirs := pair(t)
	c := make(chan *Client, 1)
	go func() {
		client, err := Dial(t.Context(), ours, nil)
		if err != nil {
			t.Error(err)
		}
		c <- client
	}()
	fmt.Fprintln(theirs, `{"QMP": {}}`)
	buf, oob := make([]byte, 4096), make([]byte, 64)
	if _, err := theirs.Read(buf); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(theirs, `{"return": {}, "id": 1}`)
	client := <-c
	defer client.Close()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	executed := make(chan error)
	go func() {
		executed <- client.ExecuteFile(t.Context(), "getfd", map[string]string{"fdname": "x"}, nil, f)
	}()
	_, n, _, _, err := theirs.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		t.Fatalf("%d control messages (%v), want 1", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("descriptors %v (%v), want 1", fds, err)
	}
	got := os.NewFile(uintptr(fds[0]), "received")
	defer got.Close()
	a, _ := f.Stat()
	if b, err := got.Stat(); err != nil || !os.SameFile(a, b) {
		t.Errorf("the descriptor is of another file (%v)", err)
	}
	fmt.Fprintln(theirs, `{"return": {}, "id": 2}`)
	if err := <-executed; err != nil {
		t.Error(err)
	}
}

func TestAVMMThatMisbehavesEndsTheSession(t *testing.T) {
	for _, tc := range []struct{ name, says, want string }{
		{"it closes", "", "closed"},
		{"it speaks no JSON", "hello\n", "parse QMP message"},
		{"its line never ends", strings.Repeat("x", maxLine+8192), "longer than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ours, theirs := pair(t)
			serve(t, theirs, func(string, uint64, json.RawMessage) string {
				_, _ = theirs.Write([]byte(tc.says)) // fails when the client has had enough
				_ = theirs.Close()
				return ""
			})
			c := dial(t, ours, nil)
			err := c.Execute(t.Context(), "anything", nil, nil)
			if !errors.Is(err, ErrClosed) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the command ends with %v, want ErrClosed and %q", err, tc.want)
			}
			select {
			case <-c.Done():
			case <-time.After(5 * time.Second):
				t.Error("the session does not end")
			}
			if err := c.Execute(t.Context(), "more", nil, nil); !errors.Is(err, ErrClosed) {
				t.Errorf("a command after the end: %v, want ErrClosed", err)
			}
		})
	}
}

func TestDialGivesUpWithItsContext(t *testing.T) {
	ours, _ := pair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, ours, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial ends with %v, want the deadline", err)
	}
}

func TestCommandsOfSeveralGoroutinesGetTheirOwnAnswers(t *testing.T) {
	ours, theirs := pair(t)
	serve(t, theirs, func(command string, id uint64, _ json.RawMessage) string {
		return fmt.Sprintf(`{"return": %q, "id": %d}`, command, id)
	})
	c := dial(t, ours, nil)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 100 {
				want, got := fmt.Sprintf("%d-%d", g, i), ""
				if err := c.Execute(t.Context(), want, nil, &got); err != nil || got != want {
					t.Errorf("%s answers %q (%v)", want, got, err)
				}
			}
		})
	}
	wg.Wait()
}
