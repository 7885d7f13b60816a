package proxy

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"path"
	"strings"

	"google.golang.org/protobuf/proto"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/internal/prefetch"
)

// startRoute is the one call whose message says what will run.
const startRoute = "/process.Process/Start"

// peekLimit bounds what is read ahead of a start message. A longer command line
// runs as well; its kind is just not known.
const peekLimit = 32 << 10

// maxKind bounds the name of a kind.
const maxKind = 64

// kindOf reads the command's kind out of the first envelope of a start request
// and leaves the body as it was. "" if it is no start request or not readable:
// to say what is wrong with it is the agent's business.
func kindOf(r *http.Request) string {
	if r.Method != http.MethodPost || r.URL.Path != startRoute || r.Body == nil {
		return ""
	}
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return ""
	}
	ahead := bufio.NewReaderSize(r.Body, peekLimit)
	r.Body = struct {
		io.Reader
		io.Closer
	}{ahead, r.Body}
	head, err := ahead.Peek(5)
	if err != nil || head[0]&1 != 0 { // compressed
		return ""
	}
	size := binary.BigEndian.Uint32(head[1:5])
	if size > peekLimit-5 {
		return ""
	}
	message, err := ahead.Peek(5 + int(size))
	if err != nil {
		return ""
	}
	return commandKind(media, message[5:])
}

// commandKind names the kind of the command of a start message.
func commandKind(media string, message []byte) string {
	var cmd string
	var args []string
	switch media {
	case "application/connect+json":
		var start struct {
			Process struct {
				Cmd  string   `json:"cmd"`
				Args []string `json:"args"`
			} `json:"process"`
		}
		if json.Unmarshal(message, &start) != nil {
			return ""
		}
		cmd, args = start.Process.Cmd, start.Process.Args
	case "application/connect+proto", "application/grpc", "application/grpc+proto":
		var start pb.StartRequest
		if proto.Unmarshal(message, &start) != nil {
			return ""
		}
		cmd, args = start.GetProcess().GetCmd(), start.GetProcess().GetArgs()
	}
	// bash -l -c LINE: what matters is the line.
	kind := prefetch.KindOf(strings.Join(append([]string{cmd}, args...), " "))
	if name := path.Base(cmd); name == "bash" || name == "sh" {
		kind = name
		for i, a := range args {
			if strings.HasPrefix(a, "-") && !strings.HasPrefix(a, "--") && strings.HasSuffix(a, "c") && i+1 < len(args) {
				kind = cmp.Or(prefetch.KindOf(args[i+1]), name)
				break
			}
		}
	}
	kind = strings.ToValidUTF8(kind, "?")
	return kind[:min(len(kind), maxKind)]
}
