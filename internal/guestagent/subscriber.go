package guestagent

import (
	"errors"
	"sync"
	"time"
)

// errNoReceiver says that a stream has ended.
var errNoReceiver = errors.New("the stream has ended")

// subscriber is one stream that receives events, and keepalives while there are none.
type subscriber[T any] struct {
	deliver func(T) error // immutable
	every   time.Duration // immutable: keepalive interval, 0 for none

	mu    sync.Mutex
	gone  bool        // guarded by mu: no more sends
	timer *time.Timer // guarded by mu: next keepalive
}

func newSubscriber[T any](every time.Duration, deliver func(T) error, keepalive T) *subscriber[T] {
	s := &subscriber[T]{deliver: deliver, every: every}
	if every > 0 {
		s.mu.Lock() // the timer may fire at once
		defer s.mu.Unlock()
		s.timer = time.AfterFunc(every, func() { _ = s.send(keepalive) })
	}
	return s
}

// send delivers event, waiting for the receiver. A failed receiver gets nothing more.
func (s *subscriber[T]) send(event T) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return errNoReceiver
	}
	err := s.deliver(event)
	s.gone = err != nil
	switch {
	case s.timer == nil:
	case s.gone:
		s.timer.Stop()
	default:
		s.timer.Reset(s.every)
	}
	return err
}

// stop ends the sends and waits for the one in progress.
func (s *subscriber[T]) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	if s.timer != nil {
		s.timer.Stop()
	}
}
