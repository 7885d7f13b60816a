package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	pb "github.com/agentzip/agentzip/api/gen/process"
	"github.com/agentzip/agentzip/api/gen/process/processconnect"
	"github.com/agentzip/agentzip/internal/gateway/lifecycle"
	"github.com/agentzip/agentzip/internal/gateway/store"
)

const (
	// startGrace is what a start command without a ready command gets, as at E2B.
	startGrace = 20 * time.Second
	// readyLimit bounds the wait for a ready command, readyPause its repetition.
	readyLimit = 10 * time.Minute
	readyPause = 2 * time.Second
	// tailLines of a failed command are part of the reason.
	tailLines = 20
)

// A run is one build under way. Owned by its goroutine.
type run struct {
	builder *Builder
	build   *Build
	plan    Plan
	step    string // named in errors and log lines
	digest  []byte // of everything done so far
	sandbox lifecycle.Sandbox
	key     string // under which the present state is cached; "" if it is not
}

func (b *Builder) check(p Plan) error {
	if len(p.Steps) > maxSteps {
		return fmt.Errorf("%w: more than %d steps", ErrBad, maxSteps)
	}
	for i, s := range p.Steps {
		bad := ""
		switch s.Type {
		case "RUN":
			if len(s.Args) < 1 {
				bad = "RUN needs a command"
			}
		case "COPY":
			if len(s.Args) < 2 || s.FilesHash == "" {
				bad = "COPY needs source, destination and filesHash"
			} else if src := path.Clean(s.Args[0]); src == ".." || strings.HasPrefix(src, "../") || path.IsAbs(src) {
				bad = "COPY: the source must be inside the context"
			} else if !b.HasUpload(s.FilesHash) {
				bad = "COPY: its files were not uploaded"
			}
		case "ENV":
			if len(s.Args) == 0 || len(s.Args)%2 != 0 {
				bad = "ENV needs names and values"
			}
		case "WORKDIR", "USER":
			if len(s.Args) < 1 || s.Args[0] == "" {
				bad = s.Type + " needs an argument"
			}
		default:
			bad = fmt.Sprintf("%q is not supported", s.Type)
		}
		for _, a := range s.Args {
			if strings.Contains(a, "\x00") {
				bad = "an argument holds a NUL"
			}
		}
		if bad != "" {
			return fmt.Errorf("%w: step %d: %s", ErrBad, i+1, bad)
		}
	}
	return nil
}

// do runs the build.
func (r *run) do(ctx context.Context) (err error) {
	r.step = "base"
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.plan.Image != "" {
		r.build.say("info", r.step, "importing "+r.plan.Image)
		facts, err := r.builder.opts.Backend.Import(ctx, r.plan.Image, func(text string) { r.build.say("debug", r.step, text) })
		if err != nil {
			return err
		}
		r.plan.Base = store.Sandbox{Template: facts.Name, CPUs: facts.CPUs, MemoryMB: facts.MemoryMB, DiskMB: facts.DiskMB}
	}
	r.plan.Env = maps.Clone(r.plan.Env)
	if r.plan.Env == nil {
		r.plan.Env = map[string]string{}
	}
	r.extend("base", r.plan.Base.Template, r.plan.Base.Snapshot)
	first, err := r.resume(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.sandbox.Kill()) }()
	for i, s := range r.plan.Steps[first:] {
		if err := r.one(ctx, first+i, s); err != nil {
			return err
		}
	}
	if err := r.start(ctx); err != nil {
		return err
	}
	return r.finish(ctx)
}

// extend adds to the digest of what was done.
func (r *run) extend(parts ...string) {
	raw, err := json.Marshal(parts)
	if err != nil { // strings: cannot be
		panic(err)
	}
	sum := sha256.Sum256(append(r.digest, raw...))
	r.digest = sum[:]
}

// apply takes over what a step changes in the builder itself.
func (r *run) apply(s Step) {
	r.extend(append([]string{s.Type, s.FilesHash}, s.Args...)...)
	switch s.Type {
	case "ENV":
		for i := 0; i+1 < len(s.Args); i += 2 {
			r.plan.Env[s.Args[i]] = s.Args[i+1]
		}
	case "WORKDIR":
		r.plan.Workdir = r.dir(s.Args[0])
	case "USER":
		r.plan.User = s.Args[0]
	}
}

func (r *run) dir(p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	base := r.plan.Workdir
	if base == "" {
		base = "/home/user"
	}
	return path.Join(base, p)
}

// A cached snapshot of a step.
type cached struct {
	Key  string    `json:"key"`
	Used time.Time `json:"used"`
}

// resume starts the sandbox behind the longest beginning that is cached, and
// returns the number of steps that are done.
func (r *run) resume(ctx context.Context) (int, error) {
	best, bestKey := 0, ""
	saved := *r
	saved.plan.Env = maps.Clone(r.plan.Env)
	var after run
	probe := saved
	probe.plan.Env = maps.Clone(r.plan.Env)
	for i, s := range r.plan.Steps {
		if r.plan.Force || s.Force {
			break
		}
		probe.apply(s)
		var c cached
		ok, err := r.builder.opts.Store.Get(store.Steps, probe.cacheID(), &c)
		if err != nil {
			return 0, err
		}
		if ok {
			best, bestKey, after = i+1, c.Key, probe
			after.plan.Env = maps.Clone(probe.plan.Env)
		}
	}
	spec := lifecycle.Spec{
		ID: lifecycle.NewID(), Template: r.plan.Base.Template, Snapshot: r.plan.Base.Snapshot,
		Requested: r.build.Name, Cohort: r.build.Team + "/build", Env: r.plan.Env,
	}
	if bestKey != "" {
		spec.Snapshot = bestKey
		sb, err := r.builder.opts.Backend.Start(ctx, spec)
		if err == nil {
			for i := range best {
				r.build.say("info", r.name(i), "CACHED "+r.text(i))
			}
			r.plan.Env, r.plan.User, r.plan.Workdir, r.digest, r.key = after.plan.Env, after.plan.User, after.plan.Workdir, after.digest, bestKey
			r.sandbox = sb
			return best, nil
		}
		r.build.say("warn", "base", "the cached state does not start: "+err.Error())
		spec.Snapshot = r.plan.Base.Snapshot
	}
	sb, err := r.builder.opts.Backend.Start(ctx, spec)
	if err != nil {
		return 0, err
	}
	r.sandbox = sb
	return 0, nil
}

func (r *run) cacheID() string { return r.build.Team + "|" + hex.EncodeToString(r.digest) }

func (r *run) name(i int) string { return strconv.Itoa(i + 1) }

func (r *run) text(i int) string {
	s := r.plan.Steps[i]
	return fmt.Sprintf("[%d/%d] %s %s", i+1, len(r.plan.Steps), s.Type, strings.Join(s.Args, " "))
}

// one runs a step.
func (r *run) one(ctx context.Context, i int, s Step) error {
	r.step = r.name(i)
	r.build.say("info", r.step, r.text(i))
	var err error
	switch s.Type {
	case "RUN":
		user := r.plan.User
		if len(s.Args) > 1 && s.Args[1] != "" {
			user = s.Args[1]
		}
		err = r.command(ctx, s.Args[0], user, r.plan.Workdir, nil)
	case "COPY":
		err = r.copy(ctx, s)
	case "WORKDIR":
		err = r.command(ctx, "mkdir -p "+quote(r.dir(s.Args[0]))+" && chown \"$OWNER\" "+quote(r.dir(s.Args[0])), "root", "/", map[string]string{"OWNER": r.owner()})
	case "USER":
		err = r.command(ctx, "id -u "+quote(s.Args[0])+" >/dev/null", "root", "/", nil)
	}
	if err != nil {
		return err
	}
	r.apply(s)
	r.key = ""
	if s.Type == "RUN" || s.Type == "COPY" {
		return r.cache(ctx)
	}
	return nil
}

func (r *run) owner() string {
	if r.plan.User == "" {
		return "user"
	}
	return r.plan.User
}

// cache keeps the present state under its digest.
func (r *run) cache(ctx context.Context) error {
	key := newID("c")
	if err := r.sandbox.Snapshot(ctx, key); err != nil {
		if errors.Is(err, lifecycle.ErrUnchanged) {
			r.build.say("debug", r.step, "not cached: "+err.Error())
			return nil
		}
		return err
	}
	if err := r.builder.opts.Store.Put(store.Steps, r.cacheID(), cached{Key: key, Used: time.Now()}); err != nil {
		return errors.Join(err, r.builder.opts.Backend.Forget(key))
	}
	r.key = key
	return r.builder.trim()
}

// trim forgets the oldest cached steps.
func (b *Builder) trim() error {
	type entry struct {
		id string
		cached
	}
	var all []entry
	if err := store.Each(b.opts.Store, store.Steps, func(id string, c cached) { all = append(all, entry{id, c}) }); err != nil {
		return err
	}
	slices.SortFunc(all, func(x, y entry) int { return x.Used.Compare(y.Used) })
	var errs []error
	for len(all) > maxCached {
		errs = append(errs, b.opts.Store.Delete(store.Steps, all[0].id), b.opts.Backend.Forget(all[0].Key))
		all = all[1:]
	}
	return errors.Join(errs...)
}

// start runs the start command in the background and waits until it is ready.
func (r *run) start(ctx context.Context) error {
	r.step = "start"
	if r.plan.Start != "" {
		r.build.say("info", r.step, "start: "+r.plan.Start)
		// Its own session, and nothing of ours held open: it lives on in the snapshot.
		line := "nohup setsid /bin/bash -l -c " + quote(r.plan.Start) + " >/tmp/.start.log 2>&1 </dev/null &"
		if err := r.command(ctx, line, r.plan.User, r.plan.Workdir, nil); err != nil {
			return err
		}
		if r.plan.Ready == "" {
			select {
			case <-time.After(startGrace):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	if r.plan.Ready == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	for {
		err := r.command(ctx, r.plan.Ready, r.plan.User, r.plan.Workdir, nil)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(readyPause):
		case <-ctx.Done():
			return fmt.Errorf("the ready command did not succeed: %w", err)
		}
	}
}

// finish snapshots what the sandbox has become and makes it the template.
func (r *run) finish(ctx context.Context) error {
	r.step = "finalize"
	key := newID("s")
	r.build.say("info", r.step, "keeping the template")
	if err := r.sandbox.Snapshot(ctx, key); err != nil {
		return err
	}
	base := r.plan.Base
	err := r.builder.opts.Keep(store.Snapshot{
		Key: key, ID: r.build.Name, Names: []string{r.build.Name}, Team: r.build.Team, Template: base.Template, Built: true,
		Created: time.Now(), CPUs: base.CPUs, MemoryMB: base.MemoryMB, DiskMB: base.DiskMB,
		Env: r.plan.Env, User: r.plan.User, Workdir: r.plan.Workdir,
	})
	if err != nil {
		return errors.Join(err, r.builder.opts.Backend.Forget(key))
	}
	return nil
}

// quote makes one word of s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// command runs a shell line in the sandbox; its output goes to the log.
func (r *run) command(ctx context.Context, line, user, dir string, env map[string]string) error {
	end, err := r.sandbox.BeginCall(ctx, "build")
	if err != nil {
		return err
	}
	defer end()
	client := processconnect.NewProcessClient(&http.Client{Transport: r.sandbox.Agent()}, "http://guest",
		connect.WithProtoJSON(), connect.WithAcceptCompression("gzip", nil, nil)) // as the SDKs speak; a guest may not send bombs
	all := maps.Clone(r.plan.Env)
	maps.Copy(all, env)
	no := false
	start := &pb.StartRequest{
		Process: &pb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", line}, Envs: all}, Stdin: &no,
	}
	if dir != "" {
		start.Process.Cwd = &dir
	}
	req := connect.NewRequest(start)
	if user != "" {
		(&http.Request{Header: req.Header()}).SetBasicAuth(user, "")
	}
	stream, err := client.Start(ctx, req)
	if err != nil {
		return fmt.Errorf("run %q: %w", line, err)
	}
	defer stream.Close()
	out := &lines{run: r}
	code, ended := int32(0), false
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().GetEvent().(type) {
		case *pb.ProcessEvent_Data:
			out.write(e.Data.GetStdout())
			out.write(e.Data.GetStderr())
		case *pb.ProcessEvent_End:
			code, ended = e.End.GetExitCode(), true
		}
	}
	out.flush()
	switch {
	case stream.Err() != nil:
		return fmt.Errorf("run %q: %w", line, stream.Err())
	case !ended:
		return fmt.Errorf("run %q: it did not end", line)
	case code != 0:
		return fmt.Errorf("%q ended with exit status %d:\n%s", line, code, strings.Join(out.tail, "\n"))
	}
	return nil
}

// lines cuts output into lines of the log.
type lines struct {
	run  *run
	rest []byte
	tail []string
}

// maxLine bounds one line.
const maxLine = 4096

func (l *lines) write(p []byte) {
	l.rest = append(l.rest, p...)
	for {
		i := bytes.IndexByte(l.rest, '\n')
		if i < 0 && len(l.rest) > maxLine {
			i = maxLine
		}
		if i < 0 {
			return
		}
		l.line(l.rest[:i])
		l.rest = bytes.TrimPrefix(l.rest[i:], []byte("\n"))
	}
}

func (l *lines) line(raw []byte) {
	text := strings.ToValidUTF8(strings.TrimRight(string(raw), "\r"), "?")
	l.run.build.say("info", l.run.step, text)
	l.tail = append(l.tail, text)
	l.tail = l.tail[max(0, len(l.tail)-tailLines):]
}

func (l *lines) flush() {
	if len(l.rest) > 0 {
		l.line(l.rest)
	}
	l.rest = nil
}
