// Package proxy is the data plane: requests of clients to the agent and to the
// ports of one sandbox.
//
// Parse says whether a request belongs here and where it goes; ServeHTTP checks
// who asks, waits for the sandbox, opens a tool window and passes the request
// on, unbuffered, also WebSocket upgrades and event streams.
//
//	unknown, paused or killed sandbox   502 "The sandbox was not found"
//	nobody listens on the port          502 "The sandbox is running but port is not open"
//	wrong token                         401 (agent), 403 (other ports, auto-resume)
//	the sandbox ends meanwhile          the TCP connection is reset
//
// A request to a sandbox that is compressed or on its way is held, never
// answered "busy": clients take 429, 502, 503 and 504 for its death.
//
// A tool window (window.go) is open while bytes flow. A stream without bytes
// closes it after a while unless the guest computes, and the next byte opens it again.
//
// Lock order: window.mu, then nothing; not held across a call out of the package.
package proxy
