package control

import (
	"time"

	"github.com/agentzip/agentzip/api/gen/rest"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

func (a *API) sandbox(v lifecycle.View) rest.Sandbox {
	s := rest.Sandbox{
		SandboxID: v.ID, TemplateID: v.Requested, Alias: alias(v), ClientID: clientID, EnvdVersion: a.opts.Agent,
		EnvdAccessToken: a.opts.Minter.Access(v.ID), Domain: a.domain(),
	}
	if v.TrafficToken {
		t := a.opts.Minter.Traffic(v.ID)
		s.TrafficAccessToken = &t
	}
	return s
}

func (a *API) domain() *string {
	d := a.opts.Domain()
	if d == "" {
		return nil
	}
	return &d
}

// alias is the template's name, unless the sandbox comes from a snapshot.
func alias(v lifecycle.View) *string {
	if v.Snapshot != "" {
		return nil
	}
	name := v.Requested
	return &name
}

func metadataOf(v lifecycle.View) rest.StringMap {
	if v.Metadata == nil {
		return rest.StringMap{}
	}
	return v.Metadata
}

func (a *API) listed(v lifecycle.View) rest.ListedSandbox {
	return rest.ListedSandbox{
		SandboxID: v.ID, TemplateID: v.Requested, Alias: alias(v), ClientID: clientID, EnvdVersion: a.opts.Agent,
		StartedAt: stamp(v.Started), EndAt: stamp(v.End), State: v.Visible(),
		CpuCount: v.CPUs, MemoryMB: v.MemoryMB, DiskSizeMB: v.DiskMB,
		Metadata: metadataOf(v), VolumeMounts: []map[string]any{},
	}
}

func (a *API) detail(v lifecycle.View) rest.SandboxDetail {
	d := rest.SandboxDetail{
		SandboxID: v.ID, TemplateID: v.Requested, Alias: alias(v), ClientID: clientID, EnvdVersion: a.opts.Agent,
		EnvdAccessToken: a.opts.Minter.Access(v.ID), Domain: a.domain(),
		StartedAt: stamp(v.Started), EndAt: stamp(v.End), State: v.Visible(),
		CpuCount: v.CPUs, MemoryMB: v.MemoryMB, DiskSizeMB: v.DiskMB,
		Metadata: metadataOf(v), VolumeMounts: []map[string]any{}, Network: networkShape(v.Network),
	}
	if v.InternetSet {
		d.AllowInternetAccess = &v.Internet
	}
	d.Lifecycle.OnTimeout = "kill"
	if v.AutoPause {
		d.Lifecycle.OnTimeout = "pause"
	}
	d.Lifecycle.AutoResume = v.AutoResume
	return d
}

func networkShape(n *store.Network) *rest.Network {
	if n == nil {
		return nil
	}
	r := &rest.Network{AllowPublicTraffic: n.Public}
	if n.AllowOut != nil {
		r.AllowOut = &n.AllowOut
	}
	if n.DenyOut != nil {
		r.DenyOut = &n.DenyOut
	}
	if n.MaskHost != "" {
		r.MaskRequestHost = &n.MaskHost
	}
	if n.HTTPSPorts != nil {
		r.HttpsPorts = &n.HTTPSPorts
	}
	return r
}

func stamp(t time.Time) time.Time { return t.UTC() }
