// Package api holds the wire formats: our own .proto files (below proto), the
// OpenAPI document of the control plane (openapi), the code generated from both
// (below gen, committed) and the framing of the link between host and guest
// (package link).
//
// "go generate ./api" writes gen again. It needs Debian's protobuf-compiler;
// the plugins are tools of go.mod.
package api

//go:generate sh generate.sh
