package store

import "time"

// A Sandbox is what survives of a sandbox.
type Sandbox struct {
	ID        string `json:"id"`
	Team      string `json:"team"`
	Template  string `json:"template"`           // the template at the root of its history
	Requested string `json:"requested"`          // templateID as the client gave it
	Snapshot  string `json:"snapshot,omitempty"` // key of the snapshot it was created from
	Cohort    string `json:"cohort,omitempty"`   // as the client named it, without the team

	Metadata map[string]string `json:"metadata,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	User     string            `json:"user,omitempty"`    // default user; "" is the agent's
	Workdir  string            `json:"workdir,omitempty"` // default folder; "" is the user's home

	Started time.Time     `json:"started"`
	End     time.Time     `json:"end"`     // of its time to live; of a paused one: when it was paused
	Timeout time.Duration `json:"timeout"` // of its creation

	Paused       bool `json:"paused"`
	MemoryKept   bool `json:"memory_kept"` // paused with its memory, not only its disk
	AutoPause    bool `json:"auto_pause"`
	AutoMemory   bool `json:"auto_memory"` // an automatic pause keeps the memory
	AutoResume   bool `json:"auto_resume"`
	InternetSet  bool `json:"internet_set"` // allow_internet_access was given
	Internet     bool `json:"internet"`
	TrafficToken bool `json:"traffic_token"` // ports other than the agent's need the token

	Network *Network `json:"network,omitempty"`

	CPUs     int `json:"cpus"`
	MemoryMB int `json:"memory_mb"`
	DiskMB   int `json:"disk_mb"`
}

// A Network is the egress and ingress configuration of a sandbox.
type Network struct {
	AllowOut   []string `json:"allow_out,omitempty"`
	DenyOut    []string `json:"deny_out,omitempty"`
	Public     *bool    `json:"public,omitempty"`
	MaskHost   string   `json:"mask_host,omitempty"`
	HTTPSPorts []int    `json:"https_ports,omitempty"`
}

// A Snapshot is a copy that new sandboxes are made from.
type Snapshot struct {
	Key      string    `json:"key"`   // under which the backend keeps it
	ID       string    `json:"id"`    // as clients know it
	Names    []string  `json:"names"` // the same, with its names
	Team     string    `json:"team"`
	Source   string    `json:"source"` // sandbox it was taken of
	Template string    `json:"template"`
	Cohort   string    `json:"cohort,omitempty"`
	Created  time.Time `json:"created"`
	CPUs     int       `json:"cpus"`
	MemoryMB int       `json:"memory_mb"`
	DiskMB   int       `json:"disk_mb"`

	// Of templates that were built: what commands get if they name nothing else.
	Built   bool              `json:"built,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
}

// A Key is an API key; of the key itself only its hash is kept.
type Key struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Team    string    `json:"team"`
	Hash    []byte    `json:"hash"` // SHA-256 of the key
	Hint    string    `json:"hint"` // its last 4 characters
	Created time.Time `json:"created"`
	Revoked time.Time `json:"revoked,omitzero"`
}
