// Package gateway is the server that E2B's clients speak to: one port, on which
// each request belongs to the first of these that fits.
//
//	names a sandbox by headers, host or signature   data plane (package proxy)
//	CONNECT                                         501
//	GET /health, GET /metrics                       the server itself
//	anything else                                   control plane (package control)
//
// A Server goes Open -> Listen -> Run. Run ends with its context; then running
// sandboxes are paused or killed, as configured, and connections are closed.
//
// The sandboxes themselves are behind lifecycle.Backend, which the daemon
// implements; this package and its sub-packages know no VM.
//
// A second listener, a Unix socket in the gateway's folder that only its owner
// can open, answers the key commands while the store is locked (admin.go).
package gateway
