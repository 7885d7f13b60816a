package guestlink

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/agentzip/agentzip/api/gen/agentzip/guest/v1"
	"github.com/agentzip/agentzip/api/gen/agentzip/guest/v1/guestv1connect"
	"github.com/agentzip/agentzip/api/gen/process/processconnect"
)

// baseURL is a name for the other end of the link; nothing resolves it.
const baseURL = "http://guest"

// clockPatience is how long a Personalize may take for its time to count as
// current. Twice as long makes clones' clocks that much later.
const clockPatience = 200 * time.Millisecond

// ErrSealed says that the guest refuses commands and files because it is a
// clone that was not personalized. Nothing was done.
var ErrSealed = errors.New("guest is sealed")

// Client is one connection to one guest.
type Client struct {
	conn    net.Conn // immutable
	process processconnect.ProcessClient
	guest   guestv1connect.GuestClient

	opening chan struct{} // a token: one call at a time opens the session

	mu      sync.Mutex
	session *session // guarded by mu; nil until opened
	closed  bool     // guarded by mu
}

// New takes over conn, the host's end of the stream to the guest's agent. It
// does no I/O; the agent may start later.
func New(conn net.Conn) *Client {
	c := &Client{conn: conn, opening: make(chan struct{}, 1)}
	c.opening <- struct{}{}
	// No compression: a guest could answer with little that inflates to much.
	plain := connect.WithAcceptCompression("gzip", nil, nil)
	c.process = processconnect.NewProcessClient(c.HTTPClient(), baseURL, plain)
	c.guest = guestv1connect.NewGuestClient(c.HTTPClient(), baseURL, plain)
	return c
}

// HTTPClient sends requests to the guest's agent, whatever host their URL names.
func (c *Client) HTTPClient() *http.Client {
	return &http.Client{
		Transport:     c.Transport(),
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Transport is the link as a http.RoundTripper, for a proxy.
func (c *Client) Transport() http.RoundTripper { return roundTripper{c} }

// Process is the guest's process service.
func (c *Client) Process() processconnect.ProcessClient { return c.process }

// Close ends the session and closes the connection. What runs in the guest goes on.
func (c *Client) Close() error {
	c.mu.Lock()
	s, closed := c.session, c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	if s != nil {
		_ = s.http.Close()
		_ = s.conn.Close()
		return nil
	}
	return c.conn.Close()
}

// Down is closed when the link is: the session ended or the Client was closed.
// It is nil before the first call that reached the guest.
func (c *Client) Down() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		return nil
	}
	return c.session.conn.down
}

// current returns the open session, opening it if needed.
func (c *Client) current(ctx context.Context) (*session, error) {
	if s, err := c.opened(); s != nil || err != nil {
		return s, err
	}
	select {
	case <-c.opening:
		defer func() { c.opening <- struct{}{} }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s, err := c.opened(); s != nil || err != nil {
		return s, err
	}
	s, err := open(ctx, c.conn)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = s.conn.Close()
		return nil, fmt.Errorf("%w: closed", ErrLinkDown)
	}
	c.session = s
	return s, nil
}

func (c *Client) opened() (*session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("%w: closed", ErrLinkDown)
	}
	return c.session, nil
}

type roundTripper struct{ c *Client }

// RoundTrip sends req over the session. An error that is the link's wraps ErrLinkDown.
func (rt roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	s, err := rt.c.current(req.Context())
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	resp, err := s.http.RoundTrip(req)
	if err != nil {
		return nil, s.explain(req.Context(), err)
	}
	return resp, nil
}

// explain adds ErrLinkDown to err if the session is over.
func (s *session) explain(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, ErrLinkDown) || ctx.Err() != nil || !s.isDown() {
		return err
	}
	return fmt.Errorf("%w: %w", ErrLinkDown, err)
}

func (s *session) isDown() bool {
	select {
	case <-s.conn.down:
		return true
	default:
		return s.http.Err() != nil
	}
}

// describe turns an error of a call into one of this package's, with what was being done.
func (c *Client) describe(ctx context.Context, what string, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil {
		err = s.explain(ctx, err)
	}
	if connect.CodeOf(err) == connect.CodeFailedPrecondition && !errors.Is(err, ErrLinkDown) {
		err = fmt.Errorf("%w: %w", ErrSealed, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Health is how a guest's agent is.
type Health struct {
	AgentVersion string
	Uptime       time.Duration // since the boot of the template
	GuestTime    time.Time     // the guest's wall clock when it answered
	Sealed       bool          // Quiesce was called and no Personalize since
	Processes    int           // commands running
	BootID       string
	Hostname     string
}

// Health asks the agent how it is. It waits for an agent that has not started
// yet; bound it with ctx.
func (c *Client) Health(ctx context.Context) (Health, error) {
	resp, err := c.guest.Health(ctx, connect.NewRequest(&guestv1.HealthRequest{}))
	if err != nil {
		return Health{}, c.describe(ctx, "ask guest for its health", err)
	}
	m := resp.Msg
	return Health{
		AgentVersion: m.GetAgentVersion(), Uptime: m.GetUptime().AsDuration(), GuestTime: m.GetGuestTime().AsTime(),
		Sealed: m.GetSealed(), Processes: int(m.GetRunningProcesses()), BootID: m.GetBootId(), Hostname: m.GetHostname(),
	}, nil
}

// Identity is what no two clones may share.
type Identity struct {
	Entropy   []byte    // at least 32 random bytes; nil: Personalize draws 64
	Time      time.Time // zero: the host's time when the request is made
	Hostname  string
	MachineID string // 32 lower-case hexadecimal digits
	BootID    string // a lower-case UUID
	// Settings are in force before the first command; nil leaves them as they are.
	Settings *Settings
}

// Settings are what a sandbox is told about itself. What is nil stays as it is.
type Settings struct {
	SandboxID, TemplateID *string
	// AccessToken is what programs inside the guest must show at localhost:49983.
	AccessToken *string
	// Envs replaces the variables of every command; an empty map removes them all.
	Envs map[string]string
	// DefaultUser and DefaultWorkdir hold where a request names none; "" is "user" and its home.
	DefaultUser, DefaultWorkdir *string
	// Internet raises or lowers the guest's network interface, if it has one.
	// What a guest can reach is decided by its VMM, not by this.
	Internet *bool
}

func (s *Settings) message() *guestv1.Settings {
	if s == nil {
		return nil
	}
	m := &guestv1.Settings{
		SandboxId: s.SandboxID, TemplateId: s.TemplateID, AccessToken: s.AccessToken,
		DefaultUser: s.DefaultUser, DefaultWorkdir: s.DefaultWorkdir, Internet: s.Internet,
	}
	if s.Envs != nil {
		m.Envs = &guestv1.Settings_Envs{Values: s.Envs}
	}
	return m
}

// Configure changes the settings of a running sandbox.
func (c *Client) Configure(ctx context.Context, s Settings) error {
	_, err := c.guest.Configure(ctx, connect.NewRequest(&guestv1.ConfigureRequest{Settings: s.message()}))
	return c.describe(ctx, "configure guest", err)
}

// Personalize gives the guest its identity and lets it accept commands. It
// returns nil only if the guest acknowledged each item with the value asked for.
func (c *Client) Personalize(ctx context.Context, id Identity) error {
	if id.Entropy == nil {
		id.Entropy = make([]byte, 64)
		if _, err := rand.Read(id.Entropy); err != nil {
			return fmt.Errorf("draw entropy: %w", err)
		}
	}
	// Open the session first: the time must not grow old while it opens.
	if _, err := c.current(ctx); err != nil {
		return c.describe(ctx, "personalize guest", err)
	}
	stamp := id.Time.IsZero()
	for attempt := 1; ; attempt++ {
		begin := time.Now()
		if stamp {
			id.Time = begin
		}
		if err := c.personalize(ctx, id); err != nil {
			return err
		}
		// A clone that has just woken up may be slow to see the request, and its
		// clock is late by as much. Then once more: by now it is awake.
		if !stamp || time.Since(begin) < clockPatience || attempt == 3 {
			return nil
		}
	}
}

func (c *Client) personalize(ctx context.Context, id Identity) error {
	resp, err := c.guest.Personalize(ctx, connect.NewRequest(&guestv1.PersonalizeRequest{
		Entropy: id.Entropy, Time: timestamppb.New(id.Time), Hostname: id.Hostname, MachineId: id.MachineID, BootId: id.BootID,
		Settings: id.Settings.message(),
	}))
	if err != nil {
		return c.describe(ctx, "personalize guest", err)
	}
	m := resp.Msg
	for _, item := range []struct{ what, got, want string }{
		{"host name", m.GetHostname(), id.Hostname},
		{"machine id", m.GetMachineId(), id.MachineID},
		{"boot id", m.GetBootId(), id.BootID},
	} {
		if item.got != item.want {
			return fmt.Errorf("personalize guest: %s is %q, want %q", item.what, item.got, item.want)
		}
	}
	if int(m.GetEntropyCredited()) != len(id.Entropy) {
		return fmt.Errorf("personalize guest: %d bytes of entropy were credited, want %d", m.GetEntropyCredited(), len(id.Entropy))
	}
	if m.GetTime().AsTime().Before(id.Time) {
		return fmt.Errorf("personalize guest: its clock shows %v, want at least %v", m.GetTime().AsTime(), id.Time.UTC())
	}
	return nil
}

// QuiesceOptions say what is given back before a snapshot.
type QuiesceOptions struct {
	KeepCaches    bool // leave the page cache as it is
	CompactMemory bool
}

// Quiesce makes the guest ready to be snapshotted and seals it. Close the
// Client after it and before the snapshot.
func (c *Client) Quiesce(ctx context.Context) error {
	return c.QuiesceWith(ctx, QuiesceOptions{})
}

// QuiesceWith is Quiesce with options.
func (c *Client) QuiesceWith(ctx context.Context, o QuiesceOptions) error {
	_, err := c.guest.Quiesce(ctx, connect.NewRequest(&guestv1.QuiesceRequest{DropCaches: !o.KeepCaches, CompactMemory: o.CompactMemory}))
	return c.describe(ctx, "quiesce guest", err)
}

// Shutdown asks the guest to write everything to its disk and power off. It
// returns when the guest has begun.
func (c *Client) Shutdown(ctx context.Context) error {
	if _, err := c.current(ctx); err != nil {
		return c.describe(ctx, "shut guest down", err)
	}
	_, err := c.guest.Shutdown(ctx, connect.NewRequest(&guestv1.ShutdownRequest{}))
	if err = c.describe(ctx, "shut guest down", err); errors.Is(err, ErrLinkDown) {
		return nil // the end was faster than its announcement
	}
	return err
}
