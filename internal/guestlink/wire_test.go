package guestlink_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/internal/guestlink"
)

// startJSON starts a command as an E2B SDK does and returns the JSON messages
// of the answer, the last one being the end of the stream.
func startJSON(t *testing.T, c *guestlink.Client, body string, headers map[string]string) []string {
	t.Helper()
	envelope := make([]byte, 5, 5+len(body))
	binary.BigEndian.PutUint32(envelope[1:], uint32(len(body)))
	req, err := http.NewRequestWithContext(testContext(t), http.MethodPost, "http://guest/process.Process/Start", bytes.NewReader(append(envelope, body...)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/connect+json")
	req.Header.Set("Connect-Protocol-Version", "1")
	req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("user:")))
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := c.HTTPClient().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "application/connect+json" {
		t.Fatalf("answer %s, %s", resp.Status, resp.Header.Get("Content-Type"))
	}
	var messages []string
	for {
		var head [5]byte
		if _, err := io.ReadFull(resp.Body, head[:]); err != nil {
			t.Fatalf("after %v: %v", messages, err)
		}
		message := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(resp.Body, message); err != nil {
			t.Fatal(err)
		}
		messages = append(messages, fmt.Sprintf("%d %s", head[0], compact(t, message)))
		if head[0]&2 != 0 {
			if n, err := resp.Body.Read(head[:]); n != 0 || err != io.EOF {
				t.Errorf("after the end of the stream: %d bytes, %v", n, err)
			}
			return messages
		}
	}
}

// compact removes the spaces protobuf puts into its JSON at random, and the pid.
func compact(t *testing.T, message []byte) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(message, &v); err != nil {
		t.Fatalf("%s: %v", message, err)
	}
	if m, ok := v.(map[string]any); ok {
		if event, ok := m["event"].(map[string]any); ok {
			if start, ok := event["start"].(map[string]any); ok && start["pid"] != nil {
				start["pid"] = "PID"
			}
		}
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestTheWireIsWhatTheE2BClientsRead(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	shell := func(line string) string {
		return fmt.Sprintf(`{"process":{"cmd":"/bin/bash","args":["-c",%q],"envs":{}},"stdin":false}`, line)
	}
	start := `0 {"event":{"start":{"pid":"PID"}}}`
	for _, tc := range []struct {
		name, body string
		headers    map[string]string
		want       []string
	}{
		{"a command that succeeds", shell("printf hi"), nil, []string{
			start, `0 {"event":{"data":{"stdout":"aGk="}}}`, `0 {"event":{"end":{"exited":true,"status":"exit status 0"}}}`, `2 {}`,
		}},
		{"a command that fails", shell("printf no >&2; exit 3"), nil, []string{
			start, `0 {"event":{"data":{"stderr":"bm8="}}}`, `0 {"event":{"end":{"error":"exit status 3","exitCode":3,"exited":true,"status":"exit status 3"}}}`, `2 {}`,
		}},
		{"a command that a signal ends", shell("kill -9 $$"), nil, []string{
			start, `0 {"event":{"end":{"error":"signal: killed","exitCode":-1,"status":"signal: killed"}}}`, `2 {}`,
		}},
		{"a deadline", shell("printf hi; exec sleep 100"), map[string]string{"Connect-Timeout-Ms": "400"}, []string{
			start, `0 {"event":{"data":{"stdout":"aGk="}}}`, `0 {"event":{"end":{"error":"signal: killed","exitCode":-1,"status":"signal: killed"}}}`,
			`2 {"error":{"code":"deadline_exceeded","message":"the command was killed at its deadline"}}`,
		}},
		{"keepalives while idle", shell("sleep 1.5"), map[string]string{"Keepalive-Ping-Interval": "1"}, []string{
			start, `0 {"event":{"keepalive":{}}}`, `0 {"event":{"end":{"exited":true,"status":"exit status 0"}}}`, `2 {}`,
		}},
		{"no such folder", `{"process":{"cmd":"true","cwd":"/nope"}}`, nil, []string{
			`2 {"error":{"code":"invalid_argument","message":"cwd '/nope' does not exist"}}`,
		}},
		{"no such user", shell("true"), map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte("ghost:"))}, []string{
			`2 {"error":{"code":"unauthenticated","message":"invalid username: 'ghost'"}}`,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, startJSON(t, c, tc.body, tc.headers)); diff != "" {
				t.Errorf("messages (-want +got):\n%s", diff)
			}
		})
	}
}

func request[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

func byPID(pid uint32) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}
}

func byTag(tag string) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Tag{Tag: tag}}
}

func TestAProcessIsFoundWhileItRunsAndShortlyAfter(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	c := g.connect(t)
	rpc := c.Process()
	ctx := testContext(t)
	tag := "my tag"
	stream, err := rpc.Start(ctx, request(&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "cat"}, Tag: &tag}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()

	list, err := rpc.List(ctx, request(&pb.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetPid() != pid || list.Msg.GetProcesses()[0].GetTag() != tag {
		t.Errorf("list: %v, %v", list.Msg, err)
	}
	// The starter leaves; the process stays. Others attach, by tag and by pid.
	stream.Close()
	var attached []*connect.ServerStreamForClient[pb.ConnectResponse]
	for _, sel := range []*pb.ProcessSelector{byTag(tag), byPID(pid)} {
		s, err := rpc.Connect(ctx, request(&pb.ConnectRequest{Process: sel}))
		if err != nil || !s.Receive() || s.Msg().GetEvent().GetStart().GetPid() != pid {
			t.Fatalf("connect: %v, %v", s.Msg(), errorsOf(err, s))
		}
		defer s.Close()
		attached = append(attached, s)
	}
	time.Sleep(100 * time.Millisecond) // the start event is sent before the subscription
	if _, err := rpc.SendInput(ctx, request(&pb.SendInputRequest{Process: byTag(tag), Input: &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte("ping")}}})); err != nil {
		t.Fatal(err)
	}
	for _, s := range attached {
		if !s.Receive() || string(s.Msg().GetEvent().GetData().GetStdout()) != "ping" {
			t.Errorf("attached stream: %v, %v", s.Msg(), s.Err())
		}
	}
	if _, err := rpc.CloseStdin(ctx, request(&pb.CloseStdinRequest{Process: byPID(pid)})); err != nil {
		t.Fatal(err)
	}
	for _, s := range attached {
		if !s.Receive() || !s.Msg().GetEvent().GetEnd().GetExited() || s.Receive() || s.Err() != nil {
			t.Errorf("end of attached stream: %v, %v", s.Msg(), s.Err())
		}
	}
	late, err := rpc.Connect(ctx, request(&pb.ConnectRequest{Process: byPID(pid)}))
	if err != nil || !late.Receive() || late.Msg().GetEvent().GetStart().GetPid() != pid || !late.Receive() || !late.Msg().GetEvent().GetEnd().GetExited() {
		t.Errorf("late connect: %v, %v", late.Msg(), errorsOf(err, late))
	}
	late.Close()
	if _, err := rpc.SendSignal(ctx, request(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGKILL})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("kill of an ended process: %v, want not_found", err)
	}
	list, err = rpc.List(ctx, request(&pb.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 0 {
		t.Errorf("list after the end: %v, %v", list.Msg, err)
	}
}

func errorsOf[T any](err error, s *connect.ServerStreamForClient[T]) error {
	if err != nil || s == nil {
		return err
	}
	return s.Err()
}

func TestATerminalIsOne(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	rpc := g.connect(t).Process()
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := rpc.Start(ctx, request(&pb.StartRequest{
		Process: &pb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", "stty size; read line; stty size; echo got $line; exit 4"}},
		Pty:     &pb.PTY{Size: &pb.PTY_Size{Cols: 101, Rows: 31}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var out strings.Builder
	var pid uint32
	var end *pb.ProcessEvent_EndEvent
	typed := false
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *pb.ProcessEvent_Start:
			pid = e.Start.GetPid()
		case *pb.ProcessEvent_Data:
			out.Write(e.Data.GetPty())
		case *pb.ProcessEvent_End:
			end = e.End
		}
		if typed || !strings.Contains(out.String(), "31 101") {
			continue
		}
		typed = true
		if _, err := rpc.Update(ctx, request(&pb.UpdateRequest{Process: byPID(pid), Pty: &pb.PTY{Size: &pb.PTY_Size{Cols: 77, Rows: 22}}})); err != nil {
			t.Fatal(err)
		}
		if _, err := rpc.CloseStdin(ctx, request(&pb.CloseStdinRequest{Process: byPID(pid)})); err == nil {
			t.Error("a terminal's stdin was closed")
		}
		if _, err := rpc.SendInput(ctx, request(&pb.SendInputRequest{Process: byPID(pid), Input: &pb.ProcessInput{Input: &pb.ProcessInput_Pty{Pty: []byte("typed\n")}}})); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if end.GetExitCode() != 4 {
		t.Errorf("end %v", end)
	}
	if want := "31 101\r\ntyped\r\n22 77\r\ngot typed\r\n"; out.String() != want {
		t.Errorf("terminal showed %q, want %q", out.String(), want)
	}
}

func TestInputIsRefusedWhereThereIsNone(t *testing.T) {
	t.Parallel()
	g := startGuest(t, false)
	rpc := g.connect(t).Process()
	ctx := testContext(t)
	none := false
	stream, err := rpc.Start(ctx, request(&pb.StartRequest{Process: &pb.ProcessConfig{Cmd: "sleep", Args: []string{"100"}}, Stdin: &none}))
	if err != nil || !stream.Receive() {
		t.Fatal(err)
	}
	defer stream.Close()
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	input := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: []byte("x")}}
	if _, err := rpc.SendInput(ctx, request(&pb.SendInputRequest{Process: byPID(pid), Input: input})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("input without stdin: %v, want failed_precondition", err)
	}
	if _, err := rpc.Update(ctx, request(&pb.UpdateRequest{Process: byPID(pid), Pty: &pb.PTY{}})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("resize without terminal: %v, want failed_precondition", err)
	}
	if _, err := rpc.SendInput(ctx, request(&pb.SendInputRequest{Process: byPID(1), Input: input})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("input to somebody else's process: %v, want not_found", err)
	}
	if _, err := rpc.SendSignal(ctx, request(&pb.SendSignalRequest{Process: byPID(pid)})); connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Errorf("no signal: %v, want unimplemented", err)
	}
	if _, err := rpc.SendSignal(ctx, request(&pb.SendSignalRequest{Process: byPID(pid), Signal: pb.Signal_SIGNAL_SIGTERM})); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	for stream.Receive() {
		if end := stream.Msg().GetEvent().GetEnd(); end != nil && end.GetStatus() != "signal: terminated" {
			t.Errorf("end %v", end)
		}
	}
}
