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

// A Pulse keeps a step from being silent: it repeats the step's latest event, with
// the seconds that have passed, whenever two seconds went by without one.
type Pulse struct {
	f      Func
	begin  time.Time
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu   sync.Mutex
	last Event     // guarded by mu
	sent time.Time // guarded by mu
}

// Heartbeat starts a Pulse with a message, which is not emitted at once. It beats until
// Stop or the end of ctx.
func (f Func) Heartbeat(ctx context.Context, step, message string) *Pulse {
	ctx, cancel := context.WithCancel(ctx)
	p := &Pulse{f: f, begin: time.Now(), cancel: cancel, last: Event{Step: step, Message: message}, sent: time.Now()}
	if f != nil {
		p.done.Go(func() { p.run(ctx) })
	}
	return p
}

func (p *Pulse) run(ctx context.Context) {
	t := time.NewTicker(beat / 4)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			p.mu.Lock()
			e, silent := p.last, now.Sub(p.sent) >= beat-beat/8
			if silent {
				p.sent = now
			}
			p.mu.Unlock()
			if silent {
				e.Message = fmt.Sprintf("%s (%d s)", e.Message, int(now.Sub(p.begin).Seconds()))
				p.f.Emit(e)
			}
		}
	}
}

// Set emits an event of the step; it is the one that is repeated from now on.
func (p *Pulse) Set(done, total int64, format string, args ...any) {
	p.mu.Lock()
	p.last.Done, p.last.Total, p.last.Message = done, total, fmt.Sprintf(format, args...)
	p.sent = time.Now()
	e := p.last
	p.mu.Unlock()
	p.f.Emit(e)
}

// Stop ends the beats and waits for the last one: no event of the Pulse comes after it.
func (p *Pulse) Stop() {
	p.cancel()
	p.done.Wait()
}
