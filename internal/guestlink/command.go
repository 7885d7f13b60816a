package guestlink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	pb "github.com/agentzip/agentzip/api/gen/process"
)

const (
	// inputChunk is how much of a command's stdin is sent in one request.
	inputChunk = 32 << 10
	// killPatience bounds the request that kills an abandoned command. Longer
	// keeps the caller of a cancelled Run waiting for a guest that does not answer.
	killPatience = 2 * time.Second
)

// Command is what to run in the guest. Either Args or Shell is set.
type Command struct {
	Args  []string // program and arguments; the program is looked up in PATH
	Shell string   // a line for /bin/bash -l -c
	Cwd   string   // "" is the user's home; "~" and relative paths start there
	User  string   // "" is "user"
	Env   map[string]string
	Stdin io.Reader // nil: /dev/null
	// Timeout kills the command's process group on the guest's clock; 0 is none.
	Timeout time.Duration
}

// Exit is how a command ended.
type Exit struct {
	Code     int    // exit code; -1 if a signal or the timeout ended it
	Signal   string // "killed", "terminated", ...; "" if it exited
	TimedOut bool   // Timeout ended it
	Error    string // the guest's words for an exit that was not 0
}

// Run runs a command and returns when it ended and all its output was written.
// Output is written from one goroutine; a slow writer slows the command down.
// A nil writer discards.
//
// Errors are those of the link, the request or a writer, never the command's
// own failure. When ctx ends, or a writer fails, the command's process group is
// killed and Run returns promptly. After ErrLinkDown the command may go on.
func (c *Client) Run(ctx context.Context, cmd Command, stdout, stderr io.Writer) (Exit, error) {
	req, err := cmd.request()
	if err != nil {
		return Exit{}, err
	}
	// The deadline of ctx is ours to enforce by killing; sent along, it would
	// come back as if it were the command's timeout.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	r := &run{c: c, streamCtx: streamCtx, stdout: stdout, stderr: stderr, started: make(chan uint32, 1)}

	// Kills when ctx ends. It outlives neither ctx nor Run.
	watch := make(chan struct{})
	go func() {
		defer close(watch)
		select {
		case <-ctx.Done():
			r.abandon(cancel) //nolint:contextcheck // ctx has ended; the kill needs one that has not
		case <-streamCtx.Done():
		}
	}()
	exit, err := r.follow(req, cmd.Stdin) //nolint:contextcheck // the stream has its own, see above
	cancel()
	<-watch
	if r.abandoned || (err != nil && ctx.Err() != nil) {
		// Even if the command's end came back: it may be our kill that ended it.
		return Exit{}, fmt.Errorf("run command: %w", context.Cause(ctx))
	}
	if err != nil {
		return Exit{}, c.describe(ctx, "run command", err)
	}
	return exit, nil
}

func (cmd Command) request() (*connect.Request[pb.StartRequest], error) {
	args := cmd.Args
	switch {
	case cmd.Shell != "" && len(args) > 0:
		return nil, errors.New("run command: both Args and Shell are set")
	case cmd.Shell != "":
		args = []string{"/bin/bash", "-l", "-c", cmd.Shell}
	case len(args) == 0:
		return nil, errors.New("run command: neither Args nor Shell is set")
	}
	stdin := cmd.Stdin != nil
	start := &pb.StartRequest{Process: &pb.ProcessConfig{Cmd: args[0], Args: args[1:], Envs: cmd.Env}, Stdin: &stdin}
	if cmd.Cwd != "" {
		start.Process.Cwd = &cmd.Cwd
	}
	req := connect.NewRequest(start)
	setUser(req.Header(), cmd.User)
	req.Header().Set("Keepalive-Ping-Interval", "0") // nothing between us drops a silent stream
	if cmd.Timeout > 0 {
		req.Header().Set("Connect-Timeout-Ms", strconv.FormatInt(max(cmd.Timeout.Milliseconds(), 1), 10))
	}
	return req, nil
}

// setUser names the guest's user the way the E2B clients do.
func setUser(h http.Header, user string) {
	if user == "" {
		return
	}
	r := http.Request{Header: h}
	r.SetBasicAuth(user, "")
}

// run is one command in progress.
type run struct {
	c              *Client
	streamCtx      context.Context // ends with the stream
	stdout, stderr io.Writer
	started        chan uint32 // receives the pid once
	abandoned      bool        // owned by the goroutine that watches ctx until Run has waited for it
}

// follow starts the command and copies its output until it ended.
func (r *run) follow(req *connect.Request[pb.StartRequest], stdin io.Reader) (Exit, error) {
	stream, err := r.c.process.Start(r.streamCtx, req)
	if err != nil {
		return Exit{}, err
	}
	defer func() { _ = stream.Close() }()
	var end *pb.ProcessEvent_EndEvent
	var input *feeder
	defer func() { input.stop() }()
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *pb.ProcessEvent_Start:
			r.started <- e.Start.GetPid()
			if stdin != nil {
				input = r.feed(e.Start.GetPid(), stdin)
			}
		case *pb.ProcessEvent_Data:
			if err := r.write(e.Data); err != nil {
				r.kill()
				return Exit{}, fmt.Errorf("write output: %w", err)
			}
		case *pb.ProcessEvent_End:
			end = e.End
		}
	}
	err = stream.Err()
	switch {
	case connect.CodeOf(err) == connect.CodeDeadlineExceeded && r.streamCtx.Err() == nil:
		exit := Exit{Code: -1, Signal: "killed", TimedOut: true, Error: "timed out"}
		return exit, nil
	case err != nil:
		return Exit{}, err
	case end == nil:
		return Exit{}, fmt.Errorf("the stream ended before the command: %w", io.ErrUnexpectedEOF)
	}
	exit := Exit{Code: int(end.GetExitCode()), Error: end.GetError()}
	if !end.GetExited() {
		if signal, found := strings.CutPrefix(end.GetStatus(), "signal: "); found {
			exit.Signal = signal
		}
	}
	return exit, nil
}

func (r *run) write(data *pb.ProcessEvent_DataEvent) error {
	w, b := r.stdout, data.GetStdout()
	if out, ok := data.GetOutput().(*pb.ProcessEvent_DataEvent_Stderr); ok {
		w, b = r.stderr, out.Stderr
	}
	if w == nil || len(b) == 0 {
		return nil
	}
	_, err := w.Write(b)
	return err
}

// abandon ends a command whose caller has left. It kills before it cancels the
// stream: without the stream the guest would let the command run.
func (r *run) abandon(cancel context.CancelFunc) {
	r.abandoned = true
	r.kill()
	cancel()
}

// kill kills the process group if the command has started. A command whose
// start is still on its way is waited for, within killPatience.
func (r *run) kill() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.streamCtx), killPatience)
	defer cancel()
	select {
	case pid := <-r.started:
		r.started <- pid
		_, _ = r.c.process.SendSignal(ctx, connect.NewRequest(&pb.SendSignalRequest{Process: pidSelector(pid), Signal: pb.Signal_SIGNAL_SIGKILL}))
	case <-r.streamCtx.Done():
	case <-ctx.Done():
	}
}

func pidSelector(pid uint32) *pb.ProcessSelector {
	return &pb.ProcessSelector{Selector: &pb.ProcessSelector_Pid{Pid: pid}}
}

// feeder sends a reader to a command's stdin.
type feeder struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// feed starts sending. A command that closes its stdin, or ends, ends it too.
func (r *run) feed(pid uint32, stdin io.Reader) *feeder {
	ctx, cancel := context.WithCancel(r.streamCtx)
	f := &feeder{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		buf := make([]byte, inputChunk)
		for {
			n, err := stdin.Read(buf)
			if ctx.Err() != nil {
				return
			}
			if n > 0 {
				input := &pb.ProcessInput{Input: &pb.ProcessInput_Stdin{Stdin: buf[:n]}}
				if _, err := r.c.process.SendInput(ctx, connect.NewRequest(&pb.SendInputRequest{Process: pidSelector(pid), Input: input})); err != nil {
					return
				}
			}
			if err != nil {
				_, _ = r.c.process.CloseStdin(ctx, connect.NewRequest(&pb.CloseStdinRequest{Process: pidSelector(pid)}))
				return
			}
		}
	}()
	return f
}

// stop makes the feeder end at its next step. It does not wait for it: a Read
// of a terminal or a socket cannot be interrupted here, and the command is over.
func (f *feeder) stop() {
	if f != nil {
		f.cancel()
	}
}
