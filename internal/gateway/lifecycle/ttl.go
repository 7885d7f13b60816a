package lifecycle

import (
	"errors"
	"time"
)

// pauseRetry is how long an automatic pause that could not be done now waits for
// its next attempt. Longer: an expired sandbox stays longer; shorter: a full disk is asked more often.
const pauseRetry = 2 * time.Second

// arm sets the timer to the end of the time to live. Caller holds mu.
func (b *Box) arm() {
	wait := max(0, b.rec.End.Sub(b.fleet.now()))
	if b.timer == nil {
		b.timer = time.AfterFunc(wait, b.expire)
		return
	}
	b.timer.Reset(wait)
}

func (b *Box) stopTimer() {
	if b.timer != nil {
		b.timer.Stop()
	}
}

// extend moves the end of the time to live, later only. Caller holds mu.
func (b *Box) extend(timeout time.Duration) {
	if end := b.fleet.now().Add(timeout); end.After(b.rec.End) {
		b.rec.End = end
		b.arm()
		b.save()
	}
}

// SetTimeout moves the end of the time to live to timeout from now. With
// onlyLater it never comes nearer.
func (b *Box) SetTimeout(timeout time.Duration, onlyLater bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.absent(); err != nil {
		return err
	}
	if b.state != Running && b.state != Copying {
		return ErrNotReady
	}
	if onlyLater {
		b.extend(timeout)
		return nil
	}
	b.rec.End = b.fleet.now().Add(max(0, timeout))
	b.arm()
	b.save()
	return nil
}

// expire is the timer: the time to live may be over.
func (b *Box) expire() {
	b.mu.Lock()
	if b.state == Copying { // soon over; the copy shall not lose its source
		b.timer.Reset(50 * time.Millisecond)
		b.mu.Unlock()
		return
	}
	if b.state != Running {
		b.mu.Unlock()
		return
	}
	if b.rec.End.After(b.fleet.now()) {
		b.arm()
		b.mu.Unlock()
		return
	}
	if !b.rec.AutoPause {
		b.mu.Unlock()
		if err := b.Kill(CauseTimeout); err != nil && !errors.Is(err, ErrNotFound) {
			b.fleet.log.Error("kill expired sandbox", "sandbox", b.id, "err", err)
		}
		return
	}
	err := b.pause(b.rec.AutoMemory)
	if err == nil || errors.Is(err, ErrNotFound) || errors.Is(err, ErrPaused) {
		return
	}
	b.fleet.log.Error("pause expired sandbox", "sandbox", b.id, "err", err)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == Running {
		b.timer.Reset(pauseRetry)
	}
}
