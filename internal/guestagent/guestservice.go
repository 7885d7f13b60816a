package guestagent

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/agentzip/agentzip/api/gen/agentzip/guest/v1"
)

// System is what Guest acts on: the kernel and the files of the running guest.
// Each setter returns only when the change is in force.
type System interface {
	// AddEntropy credits seed to the kernel's generator and reseeds it at once.
	AddEntropy(seed []byte) error
	SetTime(t time.Time) error
	SetHostname(name string) error
	SetMachineID(id string) error
	SetBootID(id string) error
	// SetInternet raises or lowers the network interface. A guest without one is left as it is.
	SetInternet(up bool) error

	Hostname() (string, error)
	MachineID() (string, error)
	BootID() (string, error)
	Uptime() (time.Duration, error)

	// Quiesce writes dirty data to the disk and gives memory back as asked.
	Quiesce(dropCaches, compactMemory bool) error
	// Shutdown begins the end of the guest and returns.
	Shutdown(reboot bool) error
}

// minimumEntropy is what reseeding needs to make two clones' generators independent.
const minimumEntropy = 32

var (
	hostnamePattern  = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,62}[a-zA-Z0-9])?$`)
	machineIDPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)
	bootIDPattern    = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// guestService is agentzip.guest.v1.Guest.
type guestService struct {
	server *Server
}

func (g *guestService) Health(context.Context, *connect.Request[guestv1.HealthRequest]) (*connect.Response[guestv1.HealthResponse], error) {
	s := g.server
	system := s.options.System
	uptime, err := system.Uptime()
	if err != nil {
		return nil, internalError("read uptime", err)
	}
	hostname, err := system.Hostname()
	if err != nil {
		return nil, internalError("read host name", err)
	}
	bootID, err := system.BootID()
	if err != nil {
		return nil, internalError("read boot id", err)
	}
	return connect.NewResponse(&guestv1.HealthResponse{
		AgentVersion:     s.options.Version,
		Uptime:           durationpb.New(uptime),
		GuestTime:        timestamppb.Now(),
		Sealed:           s.sealed.Load(),
		RunningProcesses: uint32(s.processes.runningCount()),
		BootId:           bootID,
		Hostname:         hostname,
	}), nil
}

func internalError(what string, err error) error {
	return connect.NewError(connect.CodeInternal, fmt.Errorf("%s: %w", what, err))
}

func (g *guestService) Quiesce(_ context.Context, req *connect.Request[guestv1.QuiesceRequest]) (*connect.Response[guestv1.QuiesceResponse], error) {
	s := g.server
	s.identity.Lock()
	defer s.identity.Unlock()
	// Sealed first: what comes after this moment would not be in the snapshot the caller wants.
	was := s.sealed.Load()
	if err := s.setSealed(true); err != nil {
		return nil, internalError("seal", err)
	}
	if err := s.options.System.Quiesce(req.Msg.GetDropCaches(), req.Msg.GetCompactMemory()); err != nil {
		return nil, internalError("quiesce", errors.Join(err, s.setSealed(was)))
	}
	return connect.NewResponse(&guestv1.QuiesceResponse{}), nil
}

func (g *guestService) Personalize(_ context.Context, req *connect.Request[guestv1.PersonalizeRequest]) (*connect.Response[guestv1.PersonalizeResponse], error) {
	m := req.Msg
	if err := checkIdentity(m); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s := g.server
	s.identity.Lock()
	defer s.identity.Unlock()
	system := s.options.System
	// Time first: it is the item that grows old while the others are done.
	if err := system.SetTime(m.GetTime().AsTime()); err != nil {
		return nil, internalError("set clock", err)
	}
	if err := system.AddEntropy(m.GetEntropy()); err != nil {
		return nil, internalError("add entropy", err)
	}
	for _, item := range []struct {
		what  string
		set   func(string) error
		value string
	}{
		{"host name", system.SetHostname, m.GetHostname()},
		{"machine id", system.SetMachineID, m.GetMachineId()},
		{"boot id", system.SetBootID, m.GetBootId()},
	} {
		if err := item.set(item.value); err != nil {
			return nil, internalError("set "+item.what, err)
		}
	}
	if err := s.configure(m.GetSettings()); err != nil {
		return nil, err
	}
	// Acknowledge what is in force, not what was asked for.
	answer := &guestv1.PersonalizeResponse{EntropyCredited: uint32(len(m.GetEntropy()))}
	for _, item := range []struct {
		what string
		get  func() (string, error)
		to   *string
	}{
		{"host name", system.Hostname, &answer.Hostname},
		{"machine id", system.MachineID, &answer.MachineId},
		{"boot id", system.BootID, &answer.BootId},
	} {
		value, err := item.get()
		if err != nil {
			return nil, internalError("read "+item.what, err)
		}
		*item.to = value
	}
	if err := s.setSealed(false); err != nil {
		return nil, internalError("unseal", err)
	}
	answer.Time = timestamppb.Now()
	return connect.NewResponse(answer), nil
}

func checkIdentity(m *guestv1.PersonalizeRequest) error {
	switch {
	case len(m.GetEntropy()) < minimumEntropy:
		return fmt.Errorf("entropy: %d bytes, at least %d are needed", len(m.GetEntropy()), minimumEntropy)
	case len(m.GetEntropy()) > 4096:
		return errors.New("entropy: more than 4096 bytes")
	case m.GetTime() == nil || m.GetTime().CheckValid() != nil || m.GetTime().GetSeconds() <= 0:
		return errors.New("time: missing or not a time after 1970")
	case !hostnamePattern.MatchString(m.GetHostname()):
		return fmt.Errorf("hostname: %q is not one", m.GetHostname())
	case !machineIDPattern.MatchString(m.GetMachineId()):
		return fmt.Errorf("machine_id: %q is not 32 lower-case hexadecimal digits", m.GetMachineId())
	case !bootIDPattern.MatchString(m.GetBootId()):
		return fmt.Errorf("boot_id: %q is not a lower-case UUID", m.GetBootId())
	}
	return nil
}

func (g *guestService) Shutdown(_ context.Context, req *connect.Request[guestv1.ShutdownRequest]) (*connect.Response[guestv1.ShutdownResponse], error) {
	if err := g.server.options.System.Shutdown(req.Msg.GetReboot()); err != nil {
		return nil, internalError("shut down", err)
	}
	return connect.NewResponse(&guestv1.ShutdownResponse{}), nil
}
