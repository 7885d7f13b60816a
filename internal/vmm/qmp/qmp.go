// Package qmp speaks the QEMU Machine Protocol over one connected Unix socket.
//
//	Dial --greeting, qmp_capabilities--> ready --peer closes, bad or too long line--> dead
//
// A Client is safe for concurrent use. One command is on the wire at a time;
// commands carry ids, so the late answer to one that was given up is recognised
// and dropped. Events are handed to the callback on the reader's goroutine,
// in order: it must not block, and must not execute commands.
//
// Lock order: the turn (a channel of one), then mu.
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// maxLine bounds what one message of QEMU may occupy here. The longest answer we
// ask for is a few KiB; a VMM taken over by its guest must not fill our memory.
const maxLine = 1 << 20

// writeTimeout is how long a VMM may leave a command unread before it counts as
// dead. Twice as long only delays the report of a hung VMM.
const writeTimeout = 10 * time.Second

// ErrClosed is wrapped by every error of a client whose VMM has gone. Whether a
// command in flight was carried out is unknown.
var ErrClosed = errors.New("QMP connection is closed")

// An Error is QEMU's refusal of a command: nothing was done.
type Error struct {
	Command     string
	Class, Desc string
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%s)", e.Command, e.Desc, e.Class) }

// An Event is something QEMU tells unasked, such as SHUTDOWN.
type Event struct {
	Name string
	Data json.RawMessage
}

// Client is one QMP session.
type Client struct {
	conn    *net.UnixConn
	onEvent func(Event)   // immutable; may be nil
	turn    chan struct{} // holds a token while a command is on the wire
	done    chan struct{} // closed by the reader when the session is over

	mu      sync.Mutex
	next    uint64      // guarded by mu; id of the next command
	waiting uint64      // guarded by mu; id whose answer is expected, 0 if none
	answer  chan answer // guarded by mu; where that answer goes; buffered
	err     error       // guarded by mu; why the session is over
}

type answer struct {
	value json.RawMessage
	err   *Error
}

type message struct {
	Greeting *json.RawMessage `json:"QMP"`
	ID       uint64           `json:"id"`
	Return   json.RawMessage  `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

// Dial takes over conn, waits for QEMU's greeting and leaves negotiation mode.
// On error conn is closed.
func Dial(ctx context.Context, conn *net.UnixConn, onEvent func(Event)) (*Client, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	r := bufio.NewReaderSize(conn, 4096)
	line, err := readLine(r)
	if !stop() && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err == nil {
		var m message
		if err = json.Unmarshal(line, &m); err == nil && m.Greeting == nil {
			err = fmt.Errorf("unexpected first message %.80q", line)
		}
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("read QMP greeting: %w", err)
	}
	c := &Client{conn: conn, onEvent: onEvent, turn: make(chan struct{}, 1), done: make(chan struct{}), next: 1}
	go c.read(r)
	if err := c.Execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// Done is closed when the session is over, whoever ended it.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the session and waits for the reader.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	return err
}

// Execute runs a command and decodes its answer into out, unless out is nil. A
// context that ends first leaves QEMU to finish the command on its own.
func (c *Client) Execute(ctx context.Context, command string, args, out any) error {
	return c.execute(ctx, command, args, out, nil)
}

// ExecuteFile is Execute with a descriptor passed along, for getfd and add-fd.
func (c *Client) ExecuteFile(ctx context.Context, command string, args, out any, f *os.File) error {
	return c.execute(ctx, command, args, out, f)
}

func (c *Client) execute(ctx context.Context, command string, args, out any, f *os.File) error {
	select {
	case c.turn <- struct{}{}:
	case <-c.done:
		return fmt.Errorf("execute %s: %w", command, c.reason())
	case <-ctx.Done():
		return fmt.Errorf("execute %s: %w", command, ctx.Err())
	}
	defer func() { <-c.turn }()

	got := make(chan answer, 1)
	c.mu.Lock()
	id := c.next
	c.next++
	c.waiting, c.answer = id, got
	c.mu.Unlock()

	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	if err != nil {
		return fmt.Errorf("encode %s: %w", command, err)
	}
	if err := c.write(append(line, '\n'), f); err != nil {
		// Half a command may be on the wire: nothing after it would be understood.
		_ = c.conn.Close()
		return fmt.Errorf("execute %s: %w: %w", command, ErrClosed, err)
	}
	select {
	case a := <-got:
		return finish(command, a, out)
	case <-c.done:
		select {
		case a := <-got:
			return finish(command, a, out)
		default:
		}
		return fmt.Errorf("execute %s: %w", command, c.reason())
	case <-ctx.Done():
		return fmt.Errorf("execute %s: %w", command, ctx.Err())
	}
}

func finish(command string, a answer, out any) error {
	if a.err != nil {
		a.err.Command = command
		return a.err
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(a.value, out); err != nil {
		return fmt.Errorf("decode answer of %s: %w", command, err)
	}
	return nil
}

// write sends a whole line; the descriptor, if any, travels with its first byte.
func (c *Client) write(line []byte, f *os.File) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if f != nil {
		raw, err := f.SyscallConn()
		if err != nil {
			return err
		}
		var n int
		var werr error
		// Control keeps f open for the call; Fd() would switch it to blocking mode.
		err = raw.Control(func(fd uintptr) {
			n, _, werr = c.conn.WriteMsgUnix(line, syscall.UnixRights(int(fd)), nil)
		})
		if err = errors.Join(err, werr); err != nil {
			return err
		}
		line = line[n:]
	}
	_, err := c.conn.Write(line)
	return err
}

func (c *Client) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// read runs until the session is over.
func (c *Client) read(r *bufio.Reader) {
	err := c.readAll(r)
	_ = c.conn.Close()
	c.mu.Lock()
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		c.err = ErrClosed
	} else {
		c.err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	c.mu.Unlock()
	close(c.done)
}

func (c *Client) readAll(r *bufio.Reader) error {
	for {
		line, err := readLine(r)
		if err != nil {
			return err
		}
		var m message
		if err := json.Unmarshal(line, &m); err != nil {
			return fmt.Errorf("parse QMP message %.80q: %w", line, err)
		}
		switch {
		case m.Event != "":
			if c.onEvent != nil {
				c.onEvent(Event{Name: m.Event, Data: m.Data})
			}
		case m.Error != nil:
			c.deliver(m.ID, answer{err: &Error{Class: m.Error.Class, Desc: m.Error.Desc}})
		case m.Return != nil:
			c.deliver(m.ID, answer{value: m.Return})
		}
	}
}

// deliver hands an answer to whoever waits for exactly it. An error without an id
// is QEMU's complaint about a line it could not parse: the one now waiting.
func (c *Client) deliver(id uint64, a answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	complaint := id == 0 && a.err != nil
	if c.answer == nil || (id != c.waiting && !complaint) {
		return
	}
	c.answer <- a
	c.answer = nil
}

// readLine returns one line without its end. The slice is valid until the next call.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if err == nil {
		return line, nil
	}
	if !errors.Is(err, bufio.ErrBufferFull) {
		return nil, err
	}
	long := append([]byte(nil), line...)
	for {
		line, err = r.ReadSlice('\n')
		if len(long)+len(line) > maxLine {
			return nil, fmt.Errorf("QMP message longer than %d bytes", maxLine)
		}
		long = append(long, line...)
		if err == nil {
			return long, nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}
