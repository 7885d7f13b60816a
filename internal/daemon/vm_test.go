package daemon

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentzip/agentzip/internal/guestlink"
	"github.com/agentzip/agentzip/internal/sandbox"
	"github.com/agentzip/agentzip/internal/template"
	"github.com/agentzip/agentzip/internal/units"
)

// vmTemplate is what `agentzip setup` builds; the tests here clone it.
const vmTemplate = "tornado"

// openDaemon opens a daemon on this host's store. Without root, binaries or
// template a test cannot run: under `make test`, which provides them and names
// the folder of the binaries, that is a failure, elsewhere a skip.
func openDaemon(t *testing.T, limit units.Bytes) *Daemon {
	t.Helper()
	lib := os.Getenv("AGENTZIP_LIBDIR")
	if lib == "" {
		t.Skip("AGENTZIP_LIBDIR is not set: run `make test`")
	}
	d, err := Open(Options{LibDir: lib, PoolLimit: limit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close daemon: %v", err)
		}
	})
	return d
}

// cloneOne starts a compressed sandbox in a cohort of its own.
func cloneOne(t *testing.T, d *Daemon) *sandbox.Sandbox {
	t.Helper()
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close cohort: %v", err)
		}
	})
	return cloneInto(t, d, c)
}

func cloneInto(t *testing.T, d *Daemon, c *Cohort) *sandbox.Sandbox {
	t.Helper()
	s, err := d.Clone(t.Context(), CloneOptions{Template: vmTemplate, Cohort: c})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close sandbox: %v", err)
		}
	})
	return s
}

// sh runs a shell line and returns its standard output.
func sh(t *testing.T, s *sandbox.Sandbox, user, line string) (string, guestlink.Exit) {
	t.Helper()
	var out, errs bytes.Buffer
	call, err := s.Run(t.Context(), guestlink.Command{Shell: line, User: user, Timeout: 2 * time.Minute}, &out, &errs)
	if err != nil {
		t.Fatalf("run %q: %v\nconsole: %s", line, err, s.Console())
	}
	if errs.Len() > 0 {
		t.Logf("%q on stderr: %s", line, errs.String())
	}
	return strings.TrimSpace(out.String()), call.Exit
}

// checksumLoop keeps 8 MiB whose every page differs and is known, and counts
// rounds in which each byte was as it should be. Between two rounds it changes
// one page in eight and sleeps.
const checksumLoop = `
import hashlib, sys, time
N = 2048
def page(i, gen): return ((b"page %08d generation %06d of a working set; " % (i, gen)) * 100)[:4096]
gens = [0] * N
mem = [bytearray(page(i, 0)) for i in range(N)]
for rnd in range(1, 100000):
    for i in range(N):
        if mem[i] != page(i, gens[i]):
            print("WRONG page", i, "round", rnd, flush=True); sys.exit(7)
    for i in range(rnd % 8, N, 8):
        gens[i] = rnd; mem[i][:] = page(i, rnd)
    open("/tmp/round", "w").write(str(rnd))
    if len(sys.argv) > 1 and rnd >= int(sys.argv[1]): print("all right after", rnd, flush=True); sys.exit(0)
    time.sleep(0.5)
`

func TestAVMEvictedTwentyTimesComputesTheSameChecksums(t *testing.T) {
	s := cloneOne(t, openDaemon(t, 0))
	if err := uploadText(t.Context(), s, "/tmp/loop.py", checksumLoop); err != nil {
		t.Fatal(err)
	}
	sh(t, s, "user", "rm -f /tmp/round; setsid python3 /tmp/loop.py >/tmp/loop.out 2>&1 </dev/null & sleep 0.1")
	round := func() int {
		out, _ := sh(t, s, "user", "cat /tmp/round 2>/dev/null || echo 0") // empty for the moment of a write
		n, err := strconv.Atoi(cmp.Or(out, "0"))
		if err != nil {
			t.Fatalf("round: %v; loop says: %s", err, first(sh(t, s, "user", "cat /tmp/loop.out")))
		}
		return n
	}
	deadline := time.Now().Add(8 * time.Minute)
	for round() < 1 {
		if time.Now().After(deadline) {
			t.Fatalf("the loop did not start: %s", first(sh(t, s, "user", "cat /tmp/loop.out")))
		}
		time.Sleep(200 * time.Millisecond)
	}
	for i := range 20 {
		before := resident(t, s)
		lowest := before
		for tries := 0; lowest*20 >= before && time.Now().Before(deadline); tries++ {
			if _, err := s.Compress(t.Context()); err != nil {
				t.Fatalf("pass %d: %v", i, err)
			}
			lowest = min(lowest, resident(t, s))
		}
		if lowest*20 >= before {
			t.Fatalf("pass %d: %v of %v stayed, want under 5 %%", i, lowest, before)
		}
		// And back: the loop looks at every page of its working set again.
		for start := round(); round() < start+2; {
			if time.Now().After(deadline) {
				t.Fatalf("the loop stands still after pass %d: %s", i, first(sh(t, s, "user", "cat /tmp/loop.out")))
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	if out, _ := sh(t, s, "user", "cat /tmp/loop.out"); strings.Contains(out, "WRONG") || out != "" {
		t.Errorf("the loop says: %s", out)
	}
	if out, _ := sh(t, s, "user", "pgrep -f loop.py >/dev/null && echo alive"); out != "alive" {
		t.Error("the loop has ended")
	}
	st, _ := s.Pager()
	t.Logf("blocking restores %d (p50 %v, p99 %v), prefetched %d, encoded %d, clean drops %d, cancelled %d",
		st.Blocking.Count, st.Blocking.P50(), st.Blocking.P99(), st.Prefetched.Count, st.Encoded, st.Clean, st.Cancelled)
}

func first(s string, _ guestlink.Exit) string { return s }

func resident(t *testing.T, s *sandbox.Sandbox) units.Bytes {
	t.Helper()
	u, err := s.Usage()
	if err != nil {
		t.Fatal(err)
	}
	return u.ResidentPrivate
}

// uploadText writes a file through the shell: the sandbox has no other door yet.
func uploadText(ctx context.Context, s *sandbox.Sandbox, path, text string) error {
	call, err := s.Run(ctx, guestlink.Command{Shell: "cat > " + path, Stdin: strings.NewReader(text)}, nil, nil)
	if err == nil && call.Exit.Code != 0 {
		err = fmt.Errorf("write %s: %+v", path, call.Exit)
	}
	return err
}

func TestSixteenClonesShareNoIdentity(t *testing.T) {
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	const clones = 16
	facts := []string{"urandom", "uuid", "hostname", "machine id", "boot id"}
	seen := map[string]map[string]int{}
	for _, f := range facts {
		seen[f] = map[string]int{}
	}
	var boxes []*sandbox.Sandbox
	for range clones {
		boxes = append(boxes, cloneInto(t, d, c))
	}
	for i, s := range boxes {
		sent := time.Now()
		out, _ := sh(t, s, "user", "date +%s.%N; head -c16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; "+
			"cat /proc/sys/kernel/random/uuid; hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id")
		back := time.Now()
		lines := strings.Split(out, "\n")
		if len(lines) != len(facts)+1 {
			t.Fatalf("clone %d answers %q", i, out)
		}
		secs, err := strconv.ParseFloat(lines[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		clock := time.UnixMicro(int64(secs * 1e6))
		if clock.Before(sent.Add(-500*time.Millisecond)) || clock.After(back.Add(500*time.Millisecond)) {
			t.Errorf("clone %d: its clock says %v, the host's between %v and %v", i, clock, sent, back)
		}
		for k, f := range facts {
			v := lines[k+1]
			if len(v) < 8 {
				t.Errorf("clone %d: %s is %q", i, f, v)
			}
			if j, twice := seen[f][v]; twice {
				t.Errorf("clones %d and %d share their %s %s", j, i, f, v)
			}
			seen[f][v] = i
		}
	}
}

func TestAGuestThatDiesNamesItsCauseAndLeavesNothing(t *testing.T) {
	d := openDaemon(t, 0)
	for _, c := range []struct{ name, line, want string }{
		{"powers off", "echo o | sudo tee /proc/sysrq-trigger", "guest powered off"},
		{"reboots", "echo b | sudo tee /proc/sysrq-trigger", "guest rebooted"},
		{"panics", "echo c | sudo tee /proc/sysrq-trigger", "guest panicked"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := cloneOne(t, d)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			_, err := s.Run(ctx, guestlink.Command{Shell: c.line + "; sleep 20"}, nil, nil)
			if !errors.Is(err, sandbox.ErrDead) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %v: %s", err, sandbox.ErrDead, c.want)
			}
			if _, err := s.Run(ctx, guestlink.Command{Shell: "true"}, nil, nil); !errors.Is(err, sandbox.ErrDead) {
				t.Errorf("a call after its death: got %v, want %v", err, sandbox.ErrDead)
			}
		})
	}
}

func TestAKilledVMMIsNamedAndSiblingsGoOn(t *testing.T) {
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	a, b := cloneInto(t, d, c), cloneInto(t, d, c)
	done := make(chan error, 1)
	go func() {
		_, err := a.Run(t.Context(), guestlink.Command{Shell: "sleep 60"}, nil, nil)
		done <- err
	}()
	time.Sleep(300 * time.Millisecond)
	p, err := os.FindProcess(a.PID())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, sandbox.ErrDead) || !strings.Contains(err.Error(), "VMM crashed") {
			t.Errorf("got %v, want a crashed VMM", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the call did not end with its VMM")
	}
	if out, _ := sh(t, b, "user", "echo $((6*7))"); out != "42" {
		t.Errorf("the sibling answers %q, want 42", out)
	}
}

func TestGreedyGuestsEndInAnErrorAndTheSandboxGoesOn(t *testing.T) {
	s := cloneOne(t, openDaemon(t, 0))
	t.Run("a full disk is the command's error", func(t *testing.T) {
		_, exit := sh(t, s, "user", "fallocate -l 100G /home/user/big")
		if exit.Code == 0 {
			t.Error("fallocate of 100 GiB succeeded")
		}
	})
	t.Run("a fork bomb is killed at its deadline", func(t *testing.T) {
		call, err := s.Run(t.Context(), guestlink.Command{
			Shell: "bomb() { bomb | bomb & }; bomb; sleep 30", Timeout: 4 * time.Second,
		}, nil, nil)
		if err != nil {
			t.Fatalf("run: %v", err)
		}
		if !call.Exit.TimedOut && call.Exit.Code == 0 {
			t.Errorf("got %+v, want a timeout or a failure", call.Exit)
		}
	})
	t.Run("a flood of output is bounded here", func(t *testing.T) {
		var slow countingWriter
		call, err := s.Run(t.Context(), guestlink.Command{Shell: "head -c 20000000 /dev/zero"}, &slow, nil)
		if err != nil || call.Exit.Code != 0 || slow.n != 20_000_000 {
			t.Errorf("got %d bytes, %+v, %v; want 20000000", slow.n, call.Exit, err)
		}
	})
	if out, _ := sh(t, s, "user", "echo $((6*7))"); out != "42" {
		t.Errorf("afterwards the sandbox answers %q, want 42", out)
	}
}

type countingWriter struct{ n int }

func (w *countingWriter) Write(p []byte) (int, error) {
	w.n += len(p)
	return len(p), nil
}

func TestAFullPoolStopsCompressionAndNothingElse(t *testing.T) {
	const limit = 384 * units.KiB
	d := openDaemon(t, limit)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	s := cloneInto(t, d, c)
	sh(t, s, "user", "cd /testbed && python3 -m pytest -q tornado/test/escape_test.py && cp -r tornado /tmp/copy && git -C /testbed status")
	for range 3 {
		_, _ = s.Compress(t.Context())
	}
	st, _ := s.Pager()
	if st.FullPasses == 0 {
		t.Error("the pool never was full: the test shows nothing")
	}
	if got := c.Stats().Pool.Footprint; got > limit {
		t.Errorf("the pool occupies %v, limit %v", got, limit)
	}
	if out, _ := sh(t, s, "user", "diff -r /testbed/tornado /tmp/copy | grep -v pycache; python3 -c 'print(6*7)'"); out != "42" {
		t.Errorf("got %q, want 42", out)
	}
}

func TestCallsThatComeWhileCompressingGetRightAnswers(t *testing.T) {
	d := openDaemon(t, 0)
	c, err := d.NewCohort(t.Context(), CohortOptions{Template: vmTemplate})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	var wg sync.WaitGroup
	for range 3 {
		s := cloneInto(t, d, c)
		wg.Go(func() {
			for i := range 12 {
				var out bytes.Buffer
				line := fmt.Sprintf("cd /testbed && git log --format=%%s -1 | cat && grep -c def tornado/web.py && python3 -c 'print(%d**3)'", i)
				if _, err := s.Run(t.Context(), guestlink.Command{Shell: line}, &out, nil); err != nil {
					t.Errorf("call %d: %v", i, err)
					return
				}
				if want := fmt.Sprintf("\n%d\n", i*i*i); !strings.HasSuffix(out.String(), want) {
					t.Errorf("call %d: got %q, want it to end in %q", i, out.String(), want)
				}
				time.Sleep(time.Duration(40+17*i) * time.Millisecond) // around the settle time: calls meet passes in all stages
			}
		})
	}
	wg.Wait()
}

func TestAWrongTemplateNameListsWhatThereIs(t *testing.T) {
	d := openDaemon(t, 0)
	_, err := d.Clone(t.Context(), CloneOptions{Template: "tornadoo"})
	if !errors.Is(err, template.ErrNotFound) || !strings.Contains(err.Error(), vmTemplate) {
		t.Errorf("got %v, want %v and the names there are", err, template.ErrNotFound)
	}
}
