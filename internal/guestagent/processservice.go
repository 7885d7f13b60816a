package guestagent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/api/gen/process/processconnect"
)

// endPatience is how long a stream whose deadline passed waits for the killed
// process to be gone. Longer keeps the caller of a command that cannot be
// killed (uninterruptible I/O) waiting.
const endPatience = 5 * time.Second

// processService is process.Process.
type processService struct {
	processconnect.UnimplementedProcessHandler
	server *Server
}

var _ processconnect.ProcessHandler = (*processService)(nil)

func (s *processService) Start(ctx context.Context, req *connect.Request[pb.StartRequest], stream *connect.ServerStream[pb.StartResponse]) error {
	l, err := s.prepare(req)
	if err != nil {
		return err
	}
	var timeout time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(deadline), time.Millisecond)
	}
	ps := s.server.processes
	p, err := ps.start(l)
	if err != nil {
		return connect.NewError(startErrorCode(err), err)
	}
	sub := newSubscriber(keepaliveInterval(req.Header()), func(e *pb.ProcessEvent) error {
		return stream.Send(&pb.StartResponse{Event: e})
	}, keepaliveEvent())
	_ = p.subscribe(sub) // cannot have ended before run
	_ = sub.send(startEvent(p))
	p.run(timeout, ps.end)
	return follow(ctx, p, sub, true)
}

// prepare checks a request and turns it into a launch.
func (s *processService) prepare(req *connect.Request[pb.StartRequest]) (launch, error) {
	config := req.Msg.GetProcess()
	if config.GetCmd() == "" {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, errors.New("process.cmd is required"))
	}
	account, err := s.server.account(req.Header())
	if err != nil {
		return launch{}, err
	}
	if err := checkStrings(config); err != nil {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, err)
	}
	settings := s.server.settings()
	dir, err := account.resolve(config.GetCwd(), settings.workdir)
	if err != nil {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, err)
	}
	l := launch{
		config: config, tag: req.Msg.Tag, account: account, dir: dir,
		env:   environment(account, settings.environment(s.server.options.Env), config.GetEnvs()),
		stdin: req.Msg.Stdin == nil || req.Msg.GetStdin(),
	}
	if st, err := os.Stat(l.dir); err != nil || !st.IsDir() {
		return launch{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' does not exist", l.dir))
	}
	if req.Msg.Pty != nil {
		l.window = winsize(req.Msg.Pty)
	}
	return l, nil
}

// checkStrings refuses what execve(2) cannot be told.
func checkStrings(config *pb.ProcessConfig) error {
	for _, s := range append([]string{config.GetCmd(), config.GetCwd()}, config.GetArgs()...) {
		if strings.ContainsRune(s, 0) {
			return errors.New("cmd, args and cwd must not contain NUL")
		}
	}
	for k, v := range config.GetEnvs() {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return fmt.Errorf("envs: %q is not a variable", k)
		}
	}
	return nil
}

func startErrorCode(err error) connect.Code {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return connect.CodePermissionDenied
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return connect.CodeResourceExhausted
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.EINVAL):
		return connect.CodeInvalidArgument
	default:
		return connect.CodeInternal
	}
}

// defaultKeepalive is how long a stream may be silent if the client does not say.
const defaultKeepalive = 90 * time.Second

// keepaliveInterval is what the client asks for; 0 is none, which only our own host asks for.
func keepaliveInterval(h http.Header) time.Duration {
	seconds, err := strconv.ParseUint(h.Get("Keepalive-Ping-Interval"), 10, 16)
	if err != nil {
		return defaultKeepalive
	}
	return time.Duration(seconds) * time.Second
}

func winsize(p *pb.PTY) *unix.Winsize {
	size := unix.Winsize{Col: 80, Row: 24}
	if c := p.GetSize().GetCols(); c > 0 && c < 1<<16 {
		size.Col = uint16(c)
	}
	if r := p.GetSize().GetRows(); r > 0 && r < 1<<16 {
		size.Row = uint16(r)
	}
	return &size
}

func startEvent(p *process) *pb.ProcessEvent {
	return &pb.ProcessEvent{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: p.pid}}}
}

func keepaliveEvent() *pb.ProcessEvent {
	return &pb.ProcessEvent{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}}
}

// follow waits for the end of p or of the stream. owner says that the
// deadline of the stream is the deadline of the process.
func follow(ctx context.Context, p *process, sub *subscriber[*pb.ProcessEvent], owner bool) error {
	defer p.unsubscribe(sub)
	select {
	case <-p.done:
	case <-ctx.Done():
		if !owner || !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return ctx.Err() // the client left; the process goes on
		}
		patience := time.NewTimer(endPatience)
		defer patience.Stop()
		select {
		case <-p.done:
		case <-patience.C:
			return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the command did not end after it was killed at its deadline"))
		}
	}
	if owner && p.expired() {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the command was killed at its deadline"))
	}
	return nil
}

func (s *processService) Connect(ctx context.Context, req *connect.Request[pb.ConnectRequest], stream *connect.ServerStream[pb.ConnectResponse]) error {
	p, err := s.server.processes.find(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	sub := newSubscriber(keepaliveInterval(req.Header()), func(e *pb.ProcessEvent) error {
		return stream.Send(&pb.ConnectResponse{Event: e})
	}, keepaliveEvent())
	// The start event comes before any output, so it is sent before subscribing.
	_ = sub.send(startEvent(p))
	if end := p.subscribe(sub); end != nil {
		_ = sub.send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: end}})
		sub.stop()
		return nil
	}
	return follow(ctx, p, sub, false)
}

func (s *processService) List(context.Context, *connect.Request[pb.ListRequest]) (*connect.Response[pb.ListResponse], error) {
	return connect.NewResponse(&pb.ListResponse{Processes: s.server.processes.list()}), nil
}

func (s *processService) SendInput(ctx context.Context, req *connect.Request[pb.SendInputRequest]) (*connect.Response[pb.SendInputResponse], error) {
	p, err := s.server.processes.findRunning(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := feed(ctx, p, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SendInputResponse{}), nil
}

func feed(ctx context.Context, p *process, in *pb.ProcessInput) error {
	if p.input == nil {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process was started without stdin"))
	}
	var b []byte
	switch i := in.GetInput().(type) {
	case *pb.ProcessInput_Stdin:
		b = i.Stdin
	case *pb.ProcessInput_Pty:
		b = i.Pty
	}
	switch err := p.input.write(b, ctx.Done()); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, unix.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO):
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("stdin of the process is closed"))
	default:
		return connect.NewError(connect.CodeInternal, fmt.Errorf("write to stdin: %w", err))
	}
}

func (s *processService) StreamInput(ctx context.Context, stream *connect.ClientStream[pb.StreamInputRequest]) (*connect.Response[pb.StreamInputResponse], error) {
	var p *process
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *pb.StreamInputRequest_Start:
			found, err := s.server.processes.findRunning(e.Start.GetProcess())
			if err != nil {
				return nil, err
			}
			p = found
		case *pb.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("data before start"))
			}
			if err := feed(ctx, p, e.Data.GetInput()); err != nil {
				return nil, err
			}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StreamInputResponse{}), nil
}

func (s *processService) CloseStdin(_ context.Context, req *connect.Request[pb.CloseStdinRequest]) (*connect.Response[pb.CloseStdinResponse], error) {
	p, err := s.server.processes.findRunning(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if p.terminal() != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("a terminal's stdin cannot be closed; send ^D"))
	}
	if p.input != nil {
		p.input.close()
	}
	return connect.NewResponse(&pb.CloseStdinResponse{}), nil
}

func (s *processService) SendSignal(_ context.Context, req *connect.Request[pb.SendSignalRequest]) (*connect.Response[pb.SendSignalResponse], error) {
	p, err := s.server.processes.findRunning(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	var sig unix.Signal
	switch req.Msg.GetSignal() {
	case pb.Signal_SIGNAL_SIGKILL:
		sig = unix.SIGKILL
	case pb.Signal_SIGNAL_SIGTERM:
		sig = unix.SIGTERM
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %v", req.Msg.GetSignal()))
	}
	switch err := p.signal(sig); {
	case errors.Is(err, unix.ESRCH):
		return nil, connect.NewError(connect.CodeNotFound, errNoProcess)
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("signal process %d: %w", p.pid, err))
	}
	return connect.NewResponse(&pb.SendSignalResponse{}), nil
}

func (s *processService) Update(_ context.Context, req *connect.Request[pb.UpdateRequest]) (*connect.Response[pb.UpdateResponse], error) {
	p, err := s.server.processes.findRunning(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if req.Msg.Pty == nil {
		return connect.NewResponse(&pb.UpdateResponse{}), nil
	}
	tty := p.terminal()
	if tty == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal"))
	}
	if err := resizePTY(tty, winsize(req.Msg.Pty)); err != nil {
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("resize terminal: %w", err))
	}
	return connect.NewResponse(&pb.UpdateResponse{}), nil
}

// terminal is our end of the process's terminal, nil if it has pipes.
func (p *process) terminal() *os.File {
	if p.input != nil && len(p.outputs) == 1 && p.outputs[0].file == p.input.file {
		return p.input.file
	}
	return nil
}
