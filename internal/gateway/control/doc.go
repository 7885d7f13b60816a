// Package control is the control plane: the REST routes of api/openapi over a
// lifecycle.Fleet.
//
// Every answer that is not a success has the body {"code", "message"}, its code
// equal to the HTTP status: one kind of client reads the one, another the other.
// errors.go has the table from errors to status codes. Successes have exactly
// the status of the OpenAPI document, for generated clients read nothing else.
//
// Requests are authenticated by X-API-Key, whose team is all a request can see.
// Bodies are bounded before they are read.
//
// Lock order: API.snapshots (orders changes of one name) before everything of
// package lifecycle; the other locks of this package are leaves.
package control
