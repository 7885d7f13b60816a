package dictionary

import (
	"context"
	"runtime"
	"sync"

	"github.com/agentzip/agentzip/internal/hostmem"
)

// trainingNice is the niceness of the training thread. Twice that would starve it
// on a busy host; at 0 it would take a core from guests and fault threads.
const trainingNice = 10

// Run trains whenever the reservoir is full, until ctx ends; then it waits for
// the training in hand (below a second) and returns nil. What a training says
// is in Stats: not to find a better dictionary is no failure of Run.
func (d *Set) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.samples.full:
		}
		var training sync.WaitGroup
		training.Go(func() {
			// Never unlocked: the thread ends with this goroutine, and its
			// niceness with it.
			runtime.LockOSThread()
			// A thread that could not be made nicer still has to train.
			_ = hostmem.SetNice(0, trainingNice)
			_ = d.Train(ctx) // counted in Stats; the old dictionary stays
		})
		training.Wait()
	}
}

// TrainIfDue does what Run does when the reservoir is full, on the caller's goroutine, for
// those who replay page sets and want it at the same place each time. It reports
// whether a dictionary was adopted.
func (d *Set) TrainIfDue(ctx context.Context) bool {
	select {
	case <-d.samples.full:
		return d.Train(ctx) == nil
	default:
		return false
	}
}
