package proxy

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"path"
	"strings"

	"google.golang.org/protobuf/proto"

	pb "github.com/agentzip/agentzip/api/gen/process"
)

// startRoute is the one call whose message says what will run.
const startRoute = "/process.Process/Start"

// peekLimit bounds what is read ahead of a start message. A longer command line
// runs as well; its kind is just not known.
const peekLimit = 32 << 10

// maxKind bounds the name of a command.
const maxKind = 64

// kindOf reads the command's name out of the first envelope of a start request
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

// commandKind names the command of a start message.
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
	// bash -l -c LINE: what matters is the first word of the line.
	if name := path.Base(cmd); name == "bash" || name == "sh" {
		for i, a := range args {
			if strings.HasPrefix(a, "-") && !strings.HasPrefix(a, "--") && strings.HasSuffix(a, "c") && i+1 < len(args) {
				if line := shellCommand(args[i+1]); line != "" {
					cmd = line
				}
				break
			}
		}
	}
	if cmd == "" {
		return ""
	}
	kind := strings.ToValidUTF8(path.Base(cmd), "?")
	return kind[:min(len(kind), maxKind)]
}

// shellCommand returns the first word of a line that is a command: behind cd
// and assignments.
func shellCommand(line string) string {
	for part := range strings.FieldsFuncSeq(line, func(r rune) bool { return r == ';' || r == '&' || r == '|' || r == '\n' }) {
		for word := range strings.FieldsSeq(part) {
			if strings.Contains(word, "=") && !strings.HasPrefix(word, "=") {
				continue
			}
			if word == "cd" || word == "set" || word == "export" || word == "source" || word == "." {
				break
			}
			return word
		}
	}
	return ""
}
