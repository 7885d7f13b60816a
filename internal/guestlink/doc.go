// Package guestlink is the host's end of the link to the agent in a guest.
//
// A Client speaks HTTP/2 over one byte stream to the guest's virtio-serial port
// (api/link says how a session opens). The session is opened by the first call:
//
//	idle --first call--> opening --Welcome--> open --stream ends, Reset, Close--> down
//	                     opening --its context ends--> idle
//
// down is final: calls fail with ErrLinkDown, wrapped, and what ran in the
// guest goes on there. Make a new Client on a new connection to go on.
//
// Dial gives connections to ports of the guest: each is one stream of the session.
//
// The Client sends nothing by itself: no pings, no timers. Output of a command
// is bounded by HTTP/2 flow control; a slow writer slows the command down.
//
// Safe for concurrent use. Lock order: Client.mu only, not held across I/O.
package guestlink
