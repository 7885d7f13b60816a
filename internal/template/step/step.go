// Package step carries progress from long work to whoever shows it.
//
// The work calls a [Func] with one [Event] whenever something a person would
// like to know has changed, at the latest every two seconds while it waits.
// A Func may be called from several goroutines, one call at a time is not
// promised: a receiver that draws locks for itself. It must not block for long,
// the work waits for it.
package step

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Event is one line of progress.
type Event struct {
	// Step names the piece of work in a few words ("root image", "boot"). All
	// events of one piece carry the same name.
	Step string
	// Done and Total count whatever the step counts (bytes, packages, commands).
	// Total is 0 while it is not known.
	Done, Total int64
	// Message says what is happening now, or what the step came to.
	Message string
	// Finished is true in the last event of a step.
	Finished bool
}

// Func receives events. A nil Func drops them.
type Func func(Event)

// Emit calls f unless it is nil.
func (f Func) Emit(e Event) {
	if f != nil {
		f(e)
	}
}

// Say emits a message of a step.
func (f Func) Say(step, format string, args ...any) {
	f.Emit(Event{Step: step, Message: fmt.Sprintf(format, args...)})
}

// Done emits the last event of a step.
func (f Func) Done(step, format string, args ...any) {
	f.Emit(Event{Step: step, Message: fmt.Sprintf(format, args...), Finished: true})
}

// beat is how long a step may be silent. Doubled, a person wonders whether it hangs.
const beat = 2 * time.Second

// Heartbeat repeats a message with the time that has passed, every two seconds,
// until the returned function is called or ctx ends. The function waits for the
// last event: none comes after it.
func (f Func) Heartbeat(ctx context.Context, step, message string) (stop func()) {
	if f == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	begin := time.Now()
	wg.Go(func() {
		t := time.NewTicker(beat)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				f.Say(step, "%s (%d s)", message, int(time.Since(begin).Seconds()))
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}
