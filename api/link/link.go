// Package link is the framing below HTTP/2 on the byte stream between host and
// guest. It is shared by both ends and knows no I/O.
//
// The stream is a virtio-serial port that outlives the processes at both ends
// and tells neither reliably that the other one changed: bytes of a former
// session may still be in flight when a new one begins. So a session opens with
// marks that cannot occur in payload by accident:
//
//	host  -> guest: Hello, then a nonce of NonceSize bytes, then the HTTP/2 client preface
//	guest -> host:  Welcome, then the same nonce, then HTTP/2
//	guest -> host:  Reset: a fresh agent took over the port, whatever session you had is gone
//
// Each end discards what comes before the mark it waits for, and ends the
// session in hand when a Hello (guest) or a Reset (host) shows up inside it. A
// mark is a SHA-256 digest computed at start, never stored, so that even a copy
// of the agent's own binary does not contain one. A guest that writes a mark on
// purpose only cuts its own link.
package link

import (
	"bytes"
	"crypto/sha256"
)

// PortName is the name of the virtio-serial port, as QEMU is told and as the
// guest reads it in /sys/class/virtio-ports.
const PortName = "agentzip.link"

// DialPath is where the host asks the agent for a connection to a port of the
// guest: POST, with the query port=N. The request's body is what the host sends;
// its end closes the sending half. The answer 200 carries what the port sends, in
// pieces of a length (4 bytes, big-endian) and as many bytes; length 0 says that
// the port's sending half is closed. An answer that ends before is a reset. The
// status 502 says that nothing listens on the port.
const DialPath = "/agentzip/dial"

// DialPiece is the largest piece.
const DialPiece = 32 << 10

// NonceSize is the length of the nonce that follows Hello and Welcome.
const NonceSize = 16

// MarkSize is the length of a mark.
const MarkSize = sha256.Size

// Mark is a byte pattern that begins or ends a session.
type Mark [MarkSize]byte

// Hello is the mark the host opens a session with.
func Hello() Mark { return sha256.Sum256([]byte("agentzip guest link v1: hello")) }

// Welcome is the mark the guest answers Hello with.
func Welcome() Mark { return sha256.Sum256([]byte("agentzip guest link v1: welcome")) }

// Reset is the mark a fresh agent writes when it opens the port.
func Reset() Mark { return sha256.Sum256([]byte("agentzip guest link v1: restart")) }

// Scanner finds a mark in a stream that arrives in pieces. Not safe for
// concurrent use.
type Scanner struct {
	mark    Mark
	matched int // bytes at the end of what was fed that begin the mark
}

// NewScanner looks for mark.
func NewScanner(mark Mark) *Scanner { return &Scanner{mark: mark} }

// Feed looks at the next piece of the stream. If the mark ends in p, Feed
// returns the index behind it and true, and starts over; else len(p), false.
func (s *Scanner) Feed(p []byte) (int, bool) {
	// The digests have no prefix that is also a suffix (a test checks it), so a
	// broken match can only start again at the byte that broke it.
	i := 0
	for i < len(p) {
		if s.matched == 0 {
			j := bytes.IndexByte(p[i:], s.mark[0])
			if j < 0 {
				return len(p), false
			}
			i += j + 1
			s.matched = 1
			continue
		}
		switch p[i] {
		case s.mark[s.matched]:
			s.matched++
			i++
			if s.matched == MarkSize {
				s.matched = 0
				return i, true
			}
		default:
			s.matched = 0 // look at the same byte again as a first byte
		}
	}
	return len(p), false
}

// Restart forgets a partial match.
func (s *Scanner) Restart() { s.matched = 0 }
