package guestagent

import (
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	pb "github.com/agentzip/agentzip/api/gen/process"
)

const (
	// chunkSize bounds one data event. Larger chunks hold more memory per pipe;
	// E2B's clients are used to 32 KiB.
	chunkSize = 32 << 10
	// drainLimit bounds what is still read from the pipes of a killed process:
	// what the kernel can hold in them, unless somebody enlarged them.
	drainLimit = 128 << 10
)

// chunks holds the buffers of pumps that ended, as *[chunkSize]byte.
var chunks = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// process is one started command.
//
//	running --exit--> draining --pipes at end--> ended
//
// draining lasts as long as a background child holds a pipe, unless a signal
// or the deadline ended the command: then it ends with what the pipes hold.
type process struct {
	config  *pb.ProcessConfig // immutable
	tag     *string           // immutable
	pid     uint32            // immutable; also the process group and the session
	handle  *os.Process       // owned by wait
	outputs []output          // immutable
	input   *input            // immutable; nil without stdin

	done chan struct{} // closed when ended is set and was sent to all subscribers

	mu          sync.Mutex
	subscribers []*subscriber[*pb.ProcessEvent] // guarded by mu
	cut         bool                            // guarded by mu: a signal or the deadline is ending the command
	timedOut    bool                            // guarded by mu: it was the deadline
	exited      bool                            // guarded by mu: the process was reaped
	ended       *pb.ProcessEvent_EndEvent
	endedAt     time.Time // guarded by mu
}

// output is one pipe (or terminal) the process writes to.
type output struct {
	file *os.File
	wrap func([]byte) *pb.ProcessEvent_DataEvent
}

func stdoutEvent(b []byte) *pb.ProcessEvent_DataEvent {
	return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: b}}
}

func stderrEvent(b []byte) *pb.ProcessEvent_DataEvent {
	return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: b}}
}

func ptyEvent(b []byte) *pb.ProcessEvent_DataEvent {
	return &pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: b}}
}

// run moves output until the process ended. timeout 0 means none. onEnd is called
// after the end event was sent, before done is closed.
func (p *process) run(timeout time.Duration, onEnd func(*process)) {
	var killer *time.Timer
	if timeout > 0 {
		// Guest time: a stopped guest does not use up the deadline.
		killer = time.AfterFunc(timeout, p.expire)
	}
	var pumps sync.WaitGroup
	for _, o := range p.outputs {
		pumps.Go(func() { p.pump(o) })
	}
	go func() {
		state, err := p.handle.Wait()
		p.mu.Lock()
		p.exited = true
		cut := p.cut
		p.mu.Unlock()
		if cut || (err == nil && signaled(state)) {
			p.cutOutputs()
		}
		pumps.Wait()
		if killer != nil {
			killer.Stop()
		}
		if p.input != nil {
			p.input.close()
		}
		end := endEvent(state, err)
		p.mu.Lock()
		p.ended = end
		p.endedAt = time.Now()
		subscribers := p.subscribers
		p.subscribers = nil
		p.mu.Unlock()
		for _, s := range subscribers {
			_ = s.send(&pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: end}})
		}
		onEnd(p)
		close(p.done)
	}()
}

func signaled(state *os.ProcessState) bool {
	status, ok := state.Sys().(syscall.WaitStatus)
	return ok && status.Signaled()
}

func endEvent(state *os.ProcessState, err error) *pb.ProcessEvent_EndEvent {
	if err != nil {
		text := err.Error()
		return &pb.ProcessEvent_EndEvent{ExitCode: -1, Status: text, Error: &text}
	}
	status := state.String()
	end := &pb.ProcessEvent_EndEvent{ExitCode: int32(state.ExitCode()), Exited: state.Exited(), Status: status}
	if !state.Success() {
		end.Error = &status
	}
	return end
}

// pump moves one output to the subscribers. It holds one chunk and is slowed
// down by the slowest subscriber, and so the process is.
func (p *process) pump(o output) {
	defer o.file.Close()
	buf := chunks.Get().(*[chunkSize]byte) //nolint:forcetypeassert // the pool holds nothing else
	defer chunks.Put(buf)
	for {
		n, err := o.file.Read(buf[:])
		if n > 0 {
			p.publish(o.wrap(buf[:n]))
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			p.drain(o, buf[:])
			return
		}
		if err != nil {
			return // EOF, or EIO from a terminal whose last user left
		}
	}
}

// drain publishes what is in a pipe now, without waiting for more.
func (p *process) drain(o output, buf []byte) {
	raw, err := o.file.SyscallConn()
	if err != nil {
		return
	}
	for moved := 0; moved < drainLimit; {
		n := 0
		// Control, not Read: the deadline has passed. The pipe is non-blocking.
		err := raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), buf) })
		if err != nil || n <= 0 {
			return
		}
		p.publish(o.wrap(buf[:n]))
		moved += n
	}
}

// publish sends a data event to all subscribers; with none it is dropped.
func (p *process) publish(data *pb.ProcessEvent_DataEvent) {
	p.mu.Lock()
	subscribers := p.subscribers
	p.mu.Unlock()
	if len(subscribers) == 0 {
		return
	}
	event := &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}
	for _, s := range subscribers {
		_ = s.send(event) // one that fails leaves by itself
	}
}

// subscribe adds s and returns nil, or returns the end event of a process that has ended.
func (p *process) subscribe(s *subscriber[*pb.ProcessEvent]) *pb.ProcessEvent_EndEvent {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		return p.ended
	}
	// A fresh slice: publish iterates over the old one without the lock.
	p.subscribers = append(slices.Clip(slices.Clone(p.subscribers)), s)
	return nil
}

// unsubscribe removes s and returns when no send to it is in progress.
func (p *process) unsubscribe(s *subscriber[*pb.ProcessEvent]) {
	p.mu.Lock()
	p.subscribers = slices.DeleteFunc(slices.Clone(p.subscribers), func(o *subscriber[*pb.ProcessEvent]) bool { return o == s })
	p.mu.Unlock()
	s.stop()
}

// signal sends sig to the whole process group.
func (p *process) signal(sig unix.Signal) error {
	p.mu.Lock()
	ended, exited := p.ended != nil, p.exited
	if !ended {
		p.cut = true
	}
	p.mu.Unlock()
	if ended {
		return unix.ESRCH
	}
	err := unix.Kill(-int(p.pid), sig)
	if exited {
		// What is left of the group is background; the command is over for its caller.
		p.cutOutputs()
		return nil
	}
	return err
}

// expire is the deadline.
func (p *process) expire() {
	p.mu.Lock()
	if p.ended == nil {
		p.timedOut = true
	}
	p.mu.Unlock()
	_ = p.signal(unix.SIGKILL)
}

func (p *process) expired() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.timedOut
}

// cutOutputs makes the pumps stop after what the pipes hold now.
func (p *process) cutOutputs() {
	for _, o := range p.outputs {
		_ = o.file.SetReadDeadline(time.Unix(1, 0)) // fails if the pump has closed it: good
	}
}

// input is the write end of a process's stdin.
type input struct {
	file *os.File
	mu   sync.Mutex // one writer at a time
}

// write sends b whole. cancel ends it early.
func (in *input) write(b []byte, cancel <-chan struct{}) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	written := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-cancel:
			_ = in.file.SetWriteDeadline(time.Unix(1, 0))
		case <-written:
		}
	}()
	_, err := in.file.Write(b)
	close(written)
	<-watched
	_ = in.file.SetWriteDeadline(time.Time{})
	return err
}

func (in *input) close() {
	_ = in.file.Close()
}
