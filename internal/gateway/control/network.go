package control

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

// allTraffic is what clients call "everything".
const allTraffic = "0.0.0.0/0"

// network checks a network configuration. nil stays nil.
func network(n *rest.Network) (*store.Network, error) {
	if n == nil {
		return nil, nil //nolint:nilnil // no configuration
	}
	for what, given := range map[string]bool{
		"egressProxy": n.EgressProxy != nil && len(*n.EgressProxy) > 0,
		"rules":       n.Rules != nil && len(*n.Rules) > 0,
	} {
		if given {
			return nil, refuse(http.StatusBadRequest, "network.%s is not supported by AgentZip: it needs the cloud's egress proxy", what)
		}
	}
	out := &store.Network{Public: n.AllowPublicTraffic}
	if n.AllowOut != nil {
		out.AllowOut = *n.AllowOut
	}
	if n.DenyOut != nil {
		out.DenyOut = *n.DenyOut
	}
	if n.MaskRequestHost != nil {
		out.MaskHost = *n.MaskRequestHost
		if strings.ContainsAny(out.MaskHost, "/\\@ \t\r\n\x00") {
			return nil, refuse(http.StatusBadRequest, "network.maskRequestHost %q is not a host", out.MaskHost)
		}
	}
	if n.HttpsPorts != nil {
		out.HTTPSPorts = *n.HttpsPorts
		for _, p := range out.HTTPSPorts {
			if p < 1 || p > 65535 {
				return nil, refuse(http.StatusBadRequest, "network.httpsPorts: %d is not a port", p)
			}
		}
	}
	for _, d := range out.DenyOut {
		if !isAddress(d) {
			return nil, refuse(http.StatusBadRequest, "network.denyOut: %q is not an address or CIDR block", d)
		}
	}
	for _, d := range out.AllowOut {
		if isAddress(d) {
			continue
		}
		if !isDomain(d) {
			return nil, refuse(http.StatusBadRequest, "network.allowOut: %q is not an address, CIDR block or domain", d)
		}
		if !slices.Contains(out.DenyOut, allTraffic) {
			return nil, refuse(http.StatusBadRequest, "network.allowOut: the domain %q needs %s in denyOut", d, allTraffic)
		}
	}
	return out, nil
}

func isAddress(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return true
	}
	_, err := netip.ParsePrefix(s)
	return err == nil
}

func isDomain(s string) bool {
	s = strings.TrimPrefix(s, "*.")
	if s == "" || len(s) > 253 {
		return s == "*"
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			return false
		}
	}
	return true
}

// UpdateNetwork is PUT /sandboxes/{id}/network.
func (a *API) UpdateNetwork(ctx context.Context, r rest.UpdateNetworkRequestObject) (rest.UpdateNetworkResponseObject, error) {
	b, err := a.box(ctx, r.SandboxID)
	if err != nil {
		return nil, err
	}
	var body rest.Network
	if r.Body != nil {
		body = *r.Body
	}
	n, err := network(&body)
	if err != nil {
		return nil, err
	}
	if err := b.SetNetwork(ctx, n, body.AllowInternetAccess); err != nil {
		return nil, err
	}
	return rest.UpdateNetwork204Response{}, nil
}
