// Package guestagent is the agent inside a guest: it runs commands, moves files
// and gives a clone its identity, over one byte stream from the host.
//
// The agent is in one of two states:
//
//	open --Quiesce--> sealed --Personalize--> open
//
// It starts open (a template is being built, commands run). Quiesce seals it
// before the snapshot, so every clone wakes up sealed and refuses commands and
// files with failed_precondition until Personalize has given it what no two
// clones may share.
//
// The stream carries one HTTP/2 session at a time (see api/link for how a
// session opens). Services on it: process.Process and filesystem.Filesystem as the
// E2B SDKs speak them, agentzip.guest.v1.Guest, plain HTTP /files, /health,
// /metrics and /envs, and connections to ports of the guest (link.DialPath). Who
// may call is decided at the host: whoever holds the link may do everything.
// Programs inside the guest reach a few of these at localhost:49983, with the
// sandbox's token (inside.go).
//
// Whose rights a request about files has is said in rights.go.
//
// Output of a process is never buffered here beyond one chunk per pipe: the
// goroutine that reads a pipe writes to the stream itself and is held by HTTP/2
// flow control, then the pipe fills, then the process waits.
//
// Goroutines of a process: one per output pipe (pump), one that waits for the
// exit (wait). All end when the process and its pipes do.
//
// Lock order: processes.mu, process.mu, subscriber.mu. subscriber.mu is held
// while a chunk is written to the stream (that is its purpose: chunks of stdout
// and stderr must not interleave); no other lock is held across I/O, except
// processes.startMu, which orders starts and is never taken under another lock.
//
// While nothing runs, the agent does nothing: no tickers, no pings, no
// collection of garbage on a timer. An idle guest must not dirty pages.
package guestagent
