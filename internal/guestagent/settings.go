package guestagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	guestv1 "github.com/agentzip/agentzip/api/gen/agentzip/guest/v1"
)

// settings is what the sandbox was told about itself. A value is never changed:
// Configure puts a new one in its place.
type settings struct {
	sandboxID, templateID string
	token                 string
	envs                  map[string]string
	user, workdir         string
	// stated is what the values came from, for the agent after this one.
	stated *guestv1.Settings
}

func (s *Server) settings() *settings { return s.current.Load() }

// environment is what every command sees: the agent's own variables, who the
// sandbox is, and what its owner set.
func (s *settings) environment(own map[string]string) map[string]string {
	env := maps.Clone(own)
	if env == nil {
		env = map[string]string{}
	}
	if s.sandboxID != "" {
		env["E2B_SANDBOX"] = "true"
		env["E2B_SANDBOX_ID"] = s.sandboxID
	}
	if s.templateID != "" {
		env["E2B_TEMPLATE_ID"] = s.templateID
	}
	maps.Copy(env, s.envs)
	return env
}

// with returns the settings after a change.
func (s *settings) with(change *guestv1.Settings, defaultUser string) (*settings, error) {
	stated := proto.CloneOf(s.stated)
	if change.Envs != nil {
		stated.Envs = nil // replaced, not merged
	}
	proto.Merge(stated, change)
	next := &settings{
		sandboxID: stated.GetSandboxId(), templateID: stated.GetTemplateId(), token: stated.GetAccessToken(),
		envs: stated.GetEnvs().GetValues(), user: stated.GetDefaultUser(), workdir: stated.GetDefaultWorkdir(), stated: stated,
	}
	if next.user == "" {
		next.user = defaultUser
	}
	for k, v := range next.envs {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, fmt.Errorf("envs: %q is not a variable", k)
		}
	}
	if next.workdir != "" && !filepath.IsAbs(next.workdir) {
		return nil, fmt.Errorf("default_workdir: %q is not absolute", next.workdir)
	}
	return next, nil
}

// loadSettings restores those of an agent before this one.
func (s *Server) loadSettings() error {
	s.current.Store(&settings{user: s.options.DefaultUser, stated: &guestv1.Settings{}})
	if s.options.SettingsFile == "" {
		return nil
	}
	content, err := os.ReadFile(s.options.SettingsFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	stated := &guestv1.Settings{}
	if err := protojson.Unmarshal(content, stated); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	next, err := s.settings().with(stated, s.options.DefaultUser)
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	s.current.Store(next)
	return nil
}

// configure puts a change of the settings into force. Preconditions: identity is held.
func (s *Server) configure(change *guestv1.Settings) error {
	if change == nil {
		return nil
	}
	next, err := s.settings().with(change, s.options.DefaultUser)
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	if change.Internet != nil {
		if err := s.options.System.SetInternet(change.GetInternet()); err != nil {
			return internalError("set network", err)
		}
	}
	if err := s.writeMarks(next); err != nil {
		return internalError("write settings", err)
	}
	s.current.Store(next)
	return nil
}

// writeMarks writes what others than the agent's commands read: the files that
// programs look for to see that they are in an E2B sandbox, and our own file.
func (s *Server) writeMarks(next *settings) error {
	if file := s.options.SettingsFile; file != "" {
		content, err := protojson.Marshal(next.stated)
		if err != nil {
			return err
		}
		// It holds the token.
		if err := replaceFile(file, string(content), 0o600); err != nil {
			return err
		}
	}
	dir := s.options.MarkDir
	if dir == "" || next.sandboxID == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, content := range map[string]string{
		".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": next.sandboxID, ".E2B_TEMPLATE_ID": next.templateID,
	} {
		if err := replaceFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (g *guestService) Configure(_ context.Context, req *connect.Request[guestv1.ConfigureRequest]) (*connect.Response[guestv1.ConfigureResponse], error) {
	g.server.identity.Lock()
	defer g.server.identity.Unlock()
	if err := g.server.configure(req.Msg.GetSettings()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&guestv1.ConfigureResponse{}), nil
}

// account is the user of a request: HTTP basic authentication without a password.
func (s *Server) account(h http.Header) (Account, error) {
	name := ""
	if h.Get("Authorization") != "" {
		user, _, ok := (&http.Request{Header: h}).BasicAuth()
		if !ok {
			return Account{}, connect.NewError(connect.CodeUnauthenticated, errors.New("invalid Authorization header"))
		}
		name = user
	}
	a, err := s.lookUp(name)
	if err != nil {
		return Account{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return a, nil
}

// lookUp finds the account of a name; "" is the default user.
func (s *Server) lookUp(name string) (Account, error) {
	if name == "" {
		name = s.settings().user
	}
	a, err := s.options.Lookup(name)
	if err != nil {
		return Account{}, fmt.Errorf("invalid username: '%s'", name)
	}
	return a, nil
}

// envs is GET /envs: the variables the owner of the sandbox set for all commands.
func (s *Server) envs(w http.ResponseWriter, _ *http.Request) {
	envs := s.settings().envs
	if envs == nil {
		envs = map[string]string{}
	}
	writeJSON(w, envs)
}

// writeJSON sends a small answer whole.
func writeJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body)
}
