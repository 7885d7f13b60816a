package proxy

import (
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/agentzip/agentzip/internal/gateway/keys"
)

// AgentPort is the port of the agent in the guest.
const AgentPort = 49983

// Headers by which clients route.
const (
	headerID   = "E2b-Sandbox-Id"
	headerPort = "E2b-Sandbox-Port"
)

// A Target is where a request of the data plane goes.
type Target struct {
	ID     string
	Port   uint16
	signed bool // found by the signature of its URL, or to be checked against it
}

// A RouteError is a request that nobody can route.
type RouteError struct {
	Status  int
	Message string
}

func (e *RouteError) Error() string { return e.Message }

var (
	idPattern   = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
	hostPattern = regexp.MustCompile(`^([0-9]{1,5})-([a-z0-9]{1,64})(-[a-z0-9-]*)?\.`)
)

// Parse routes a request: by its headers, by the host it names (also that of the
// absolute form a forward proxy is sent), by the signature of a file URL. ok is
// false for a request of the control plane. bySignature finds a sandbox whose
// token made a signature.
func Parse(r *http.Request, bySignature func(keys.Signature) (string, bool)) (t Target, ok bool, err error) {
	id, hasID := single(r.Header, headerID)
	port, hasPort := single(r.Header, headerPort)
	if hasID || hasPort {
		t, err = parseHeaders(id, port, hasID && hasPort)
		return t, true, err
	}
	host := r.Host
	if r.URL.Host != "" {
		host = r.URL.Host
	}
	if m := hostPattern.FindStringSubmatch(strings.ToLower(host)); m != nil {
		n, err := strconv.ParseUint(m[1], 10, 16)
		if err != nil || n == 0 {
			return t, true, &RouteError{http.StatusBadRequest, fmt.Sprintf("%q is not a port", m[1])}
		}
		return Target{ID: m[2], Port: uint16(n)}, true, nil
	}
	if r.URL.Path == "/files" && (r.Method == http.MethodGet || r.Method == http.MethodPost) {
		return parseSigned(r.Method, r.URL.Query(), bySignature)
	}
	return t, false, nil
}

func single(h http.Header, name string) (string, bool) {
	v, ok := h[name]
	if !ok || len(v) == 0 {
		return "", false
	}
	return v[0], true
}

func parseHeaders(id, port string, both bool) (Target, error) {
	if !both {
		return Target{}, &RouteError{http.StatusBadRequest, "both " + headerID + " and " + headerPort + " are required"}
	}
	id, _, _ = strings.Cut(id, "-")
	if !idPattern.MatchString(id) {
		return Target{}, &RouteError{http.StatusBadRequest, headerID + " is not a sandbox id"}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return Target{}, &RouteError{http.StatusBadRequest, headerPort + " is not a port"}
	}
	return Target{ID: id, Port: uint16(n)}, nil
}

func parseSigned(method string, q url.Values, bySignature func(keys.Signature) (string, bool)) (Target, bool, error) {
	sig, present, err := keys.ParseSignature(method, q, time.Now())
	if err != nil {
		return Target{}, true, &RouteError{http.StatusUnauthorized, err.Error()}
	}
	if !present {
		return Target{}, true, &RouteError{http.StatusUnauthorized, "missing signature: file URLs must be signed, or name their sandbox in " + headerID}
	}
	id, found := bySignature(sig)
	if !found {
		return Target{}, true, &RouteError{http.StatusUnauthorized, "invalid signature"}
	}
	return Target{ID: id, Port: AgentPort, signed: true}, true, nil
}

// controlOnly are routes of the agent that only the host may use.
var controlOnly = map[string]bool{
	"/init": true, "/freeze": true, "/unfreeze": true, "/collapse": true, "/fsfreeze": true, "/fsthaw": true, "/upgrade": true,
}

// hidden says whether a path of the agent is closed to clients. Our own routes
// are: they would let a client seal or shut down the guest behind our back.
func hidden(path string) bool {
	return controlOnly[path] || strings.HasPrefix(path, "/agentzip.") || strings.HasPrefix(path, "/agentzip/")
}
