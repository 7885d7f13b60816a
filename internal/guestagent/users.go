package guestagent

import (
	"fmt"
	"os/user"
	"strconv"
)

// Account is what the agent needs to know of a user.
type Account struct {
	Name   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary, with GID
	Home   string
	// Own says that the agent already is this user and must not change its
	// credentials for it. Only tests without root need it.
	Own bool
}

// LookupAccount finds a user by name in /etc/passwd and /etc/group. It reads
// them each time: a command may have added a user.
func LookupAccount(name string) (Account, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return Account{}, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return Account{}, fmt.Errorf("parse uid of %s: %w", name, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return Account{}, fmt.Errorf("parse gid of %s: %w", name, err)
	}
	a := Account{Name: u.Username, UID: uint32(uid), GID: uint32(gid), Home: u.HomeDir}
	ids, err := u.GroupIds()
	if err != nil {
		return Account{}, fmt.Errorf("list groups of %s: %w", name, err)
	}
	for _, id := range ids {
		if g, err := strconv.ParseUint(id, 10, 32); err == nil {
			a.Groups = append(a.Groups, uint32(g))
		}
	}
	return a, nil
}
