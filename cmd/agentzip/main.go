// Command agentzip clones microVM sandboxes from templates, compresses their
// private pages while they wait, and restores them before anybody notices.
//
// A file per verb and no logic: a verb parses its flags, calls one package of
// internal/, prints what comes back. Logs go to stderr, results to stdout.
//
// Exit codes:
//
//	0    done
//	1    failed; one line on stderr says what, why and what to do
//	2    the command line is wrong
//	130  interrupted (SIGINT) and cleaned up; 143 for SIGTERM
//
// `agentzip run` exits with the code of the command it ran; its own failures
// are 125, so that the two can be told apart.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	os.Exit(realMain(os.Args[1:], os.Stdout, os.Stderr))
}

// realMain is main without os.Exit, so that deferred clean-up always happens
// and tests can call it.
func realMain(args []string, stdout, stderr io.Writer) int {
	ctx, stop := withSignals(context.Background())
	defer stop()
	root := newRootCmd()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	code := exitCode(ctx, err)
	if msg := errorLine(ctx, err); msg != "" {
		fmt.Fprintln(stderr, msg)
	}
	return code
}

// errInterrupted is the cause of a context that a signal cancelled.
type errInterrupted struct{ sig syscall.Signal }

func (e errInterrupted) Error() string { return "interrupted by " + e.sig.String() }

// withSignals returns a context that SIGINT and SIGTERM cancel. After the
// first signal the handler is gone: a second one kills at once, for a person
// who does not want to wait for the clean-up.
func withSignals(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case sig := <-ch:
			signal.Stop(ch)
			s, _ := sig.(syscall.Signal)
			cancel(errInterrupted{s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		cancel(nil)
		<-done
	}
}

// exitError gives an error an exit code of its own. A nil err says nothing on
// stderr: the command has already said it (`run` passing on a guest's code).
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError marks err as a mistake on the command line: exit code 2.
func usageError(err error) error { return &exitError{code: 2, err: err} }

// hintError adds what the user can do about an error.
type hintError struct {
	err  error
	hint string
}

func (e *hintError) Error() string { return e.err.Error() + ": " + e.hint }
func (e *hintError) Unwrap() error { return e.err }

// withHint adds what to do to a non-nil error; hint is an imperative clause.
func withHint(err error, hint string) error {
	if err == nil {
		return nil
	}
	return &hintError{err: err, hint: hint}
}

// exitCode maps the error of a verb to the exit code of the process.
func exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	ee, coded := errors.AsType[*exitError](err)
	if coded && ee.err == nil {
		return ee.code
	}
	if in, ok := errors.AsType[errInterrupted](context.Cause(ctx)); ok {
		return 128 + int(in.sig)
	}
	if coded {
		return ee.code
	}
	return 1
}

// errorLine returns the one line for stderr, or "" when there is nothing to say.
func errorLine(ctx context.Context, err error) string {
	if err == nil {
		return ""
	}
	if ee, ok := errors.AsType[*exitError](err); ok && ee.err == nil {
		return ""
	}
	if in, ok := errors.AsType[errInterrupted](context.Cause(ctx)); ok && errors.Is(err, context.Canceled) {
		return "agentzip: " + in.Error() + "; everything it had started is stopped"
	}
	return "agentzip: " + oneLine(err.Error())
}
