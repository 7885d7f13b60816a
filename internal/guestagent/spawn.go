package guestagent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	pb "github.com/agentzip/agentzip/api/gen/process"
)

// launch is a command ready to be started.
type launch struct {
	config  *pb.ProcessConfig
	tag     *string
	account Account
	dir     string
	env     []string
	stdin   bool                           // a pipe instead of /dev/null
	window  *unix.Winsize                  // a terminal instead of pipes
	wrap    func(start func() error) error // runs the fork; see processes.fork
}

// environment is what a command sees: the agent's PATH, who the user is, the
// sandbox's variables, the command's own. Nothing else leaks.
func environment(a Account, global, own map[string]string) []string {
	vars := map[string]string{"PATH": os.Getenv("PATH"), "HOME": a.Home, "USER": a.Name, "LOGNAME": a.Name}
	for _, more := range []map[string]string{global, own} {
		maps.Copy(vars, more)
	}
	env := make([]string, 0, len(vars))
	for k, v := range vars {
		env = append(env, k+"="+v)
	}
	slices.Sort(env)
	return env
}

// start forks. The caller sends the start event and then calls run.
func (l launch) start() (*process, error) {
	p := &process{config: l.config, tag: l.tag, done: make(chan struct{})}
	attr := &os.ProcAttr{Dir: l.dir, Env: l.env, Sys: &syscall.SysProcAttr{Setsid: true}}
	if !l.account.Own {
		attr.Sys.Credential = &syscall.Credential{Uid: l.account.UID, Gid: l.account.GID, Groups: l.account.Groups}
	}
	var theirs []*os.File // the child's ends
	var err error
	if l.window != nil {
		theirs, err = l.openTerminal(p, attr)
	} else {
		theirs, err = l.openPipes(p)
	}
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	if err == nil {
		attr.Files = theirs
		if l.window != nil {
			attr.Files = []*os.File{theirs[0], theirs[0], theirs[0]}
		}
		err = l.wrap(func() error {
			p.handle, err = startProcess(l.config.GetCmd(), l.config.GetArgs(), attr)
			return err
		})
	}
	if err != nil {
		for _, o := range p.outputs {
			o.file.Close()
		}
		if p.input != nil {
			p.input.close()
		}
		return nil, err
	}
	p.pid = uint32(p.handle.Pid)
	return p, nil
}

// openPipes returns the child's stdin, stdout and stderr.
func (l launch) openPipes(p *process) (theirs []*os.File, err error) {
	if l.stdin {
		r, w, err := os.Pipe()
		if err != nil {
			return theirs, fmt.Errorf("make stdin: %w", err)
		}
		theirs = append(theirs, r)
		p.input = &input{file: w}
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return theirs, fmt.Errorf("open stdin: %w", err)
		}
		theirs = append(theirs, null)
	}
	for _, wrap := range []func([]byte) *pb.ProcessEvent_DataEvent{stdoutEvent, stderrEvent} {
		r, w, err := os.Pipe()
		if err != nil {
			return theirs, fmt.Errorf("make output pipe: %w", err)
		}
		theirs = append(theirs, w)
		p.outputs = append(p.outputs, output{file: r, wrap: wrap})
	}
	return theirs, nil
}

// openTerminal returns the child's end of a new pseudo-terminal.
func (l launch) openTerminal(p *process, attr *os.ProcAttr) ([]*os.File, error) {
	ours, theirs, err := openPTY(l.window)
	if err != nil {
		return nil, err
	}
	attr.Sys.Setctty = true
	attr.Sys.Ctty = 0
	p.outputs = []output{{file: ours, wrap: ptyEvent}}
	p.input = &input{file: ours}
	return []*os.File{theirs}, nil
}

// startProcess runs cmd as execvp(3) would with the command's own PATH. What
// cannot be executed goes through the shell, so that it ends as it would
// anywhere: a message on stderr and exit code 126 or 127.
func startProcess(cmd string, args []string, attr *os.ProcAttr) (*os.Process, error) {
	path := searchCommand(cmd, attr.Env, attr.Dir)
	var err error
	if path != "" {
		var handle *os.Process
		handle, err = os.StartProcess(path, append([]string{cmd}, args...), attr)
		if err == nil {
			return handle, nil
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.ENOEXEC) && !errors.Is(err, unix.ENOTDIR) {
			return nil, fmt.Errorf("start %q: %w", cmd, err)
		}
	}
	handle, shellErr := os.StartProcess("/bin/sh", append([]string{"sh", "-c", `exec "$0" "$@"`, cmd}, args...), attr)
	if shellErr != nil {
		return nil, fmt.Errorf("start %q: %w", cmd, errors.Join(err, shellErr))
	}
	return handle, nil
}

// searchCommand looks cmd up in the PATH of env; "" if it is nowhere.
func searchCommand(cmd string, env []string, dir string) string {
	if strings.Contains(cmd, "/") {
		return cmd
	}
	path := ""
	for _, e := range env {
		if value, found := strings.CutPrefix(e, "PATH="); found {
			path = value
		}
	}
	for _, d := range filepath.SplitList(path) {
		candidate := filepath.Join(d, cmd)
		if !filepath.IsAbs(candidate) {
			candidate = filepath.Join(dir, candidate)
		}
		if st, err := os.Stat(candidate); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return candidate
		}
	}
	return ""
}
