package pager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/guestmem"
	"github.com/agentzip/agentzip/internal/hostmem"
	"github.com/agentzip/agentzip/internal/uffd"
	"github.com/agentzip/agentzip/internal/units"
)

// faultsAtOnce is how many faults of one sandbox a thread reads before it lets other
// sandboxes go first.
const faultsAtOnce = 16

// faultPriority is the real-time priority (SCHED_FIFO) of fault threads: a guest's thread
// waits for each fault, and a waking thread of the fair class queues behind busy vCPUs for
// 0.1-4 ms even at nice -20, ten times the service itself. The lowest suffices: nothing else
// here is real-time. A thread works for some 30 us at a time and then blocks.
const faultPriority = 1

// faultNice is their niceness where real-time priorities are not allowed.
const faultNice = -10

// ServerOptions of a Server. The zero value is ready for use.
type ServerOptions struct {
	Threads int // 0: cores + 1, at least 2
}

// A Server serves the faults, and the reports of free pages, of all sandboxes of a host on its
// own operating system threads: a guest waits for either. A thread serves one sandbox at a time, and one sandbox is served by one thread
// at a time (its pager's mutex would allow no more).
//
//	added --fault--> armed off, a thread serves up to 16 faults --> armed again
//	      --report--> armed off, a thread serves it --> armed again
//	added --Remove--> gone, once the thread that serves it is done
//
// Safe for concurrent use.
type Server struct {
	threads int // immutable
	epoll   int // immutable until Run ends
	stop    int // eventfd: readable once Run must end

	mu      sync.RWMutex
	nextID  uint64             // guarded by mu; 0 is the eventfd
	pagers  map[uint64]*served // guarded by mu
	ids     map[*Pager]uint64  // guarded by mu
	stopped bool               // guarded by mu
	failed  error              // immutable; NewServer could not set up, Run says so
}

// served is one source of events of a pager in a Server. A pager has two, under neighbouring
// ids, so that another thread can serve its faults during a report.
type served struct {
	pager *Pager                               // immutable
	fd    int                                  // immutable
	serve func(*Pager, *faultWorker) (ok bool) // immutable; not ok: never armed again

	mu      sync.Mutex // held while a thread serves it
	removed bool       // guarded by mu
}

// faultWorker is the scratch of a fault thread.
type faultWorker struct {
	codec   *cohort.Worker // loads only
	page    units.Page
	faults  [faultsAtOnce]guestmem.Fault
	events  [faultsAtOnce]uffd.Event
	ready   [1]unix.EpollEvent // one sandbox at a time: another thread takes the next
	discard discarder

	restored  [faultsAtOnce]units.Frame // evicted pages that this turn brought back
	nrestored int
}

// NewServer returns a server without pagers. Run starts its threads and ends it.
func NewServer(o ServerOptions) *Server {
	s := &Server{threads: o.Threads, epoll: -1, stop: -1, pagers: map[uint64]*served{}, ids: map[*Pager]uint64{}}
	if s.threads <= 0 {
		s.threads = max(2, runtime.NumCPU()+1)
	}
	var err error
	if s.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		s.failed = fmt.Errorf("create fault server: %w", err)
		return s
	}
	if s.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		s.failed = fmt.Errorf("create fault server: %w", err)
		return s
	}
	if err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, s.stop, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		s.failed = fmt.Errorf("create fault server: %w", err)
	}
	return s
}

// eventFor packs an id into the data of an epoll event.
func eventFor(id uint64) unix.EpollEvent {
	return unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
}

func idOf(e *unix.EpollEvent) uint64 { return uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32 }

// Add begins to serve the faults of p, those that wait already included. Faults of pagers
// that were added before Run wait for it.
func (s *Server) Add(p *Pager) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.failed != nil:
		return s.failed
	case s.stopped:
		return fmt.Errorf("serve faults of sandbox %s: the server has ended", p.name)
	case s.ids[p] != 0:
		return fmt.Errorf("serve faults of sandbox %s: it is served already", p.name)
	}
	id := s.nextID + 1
	s.nextID += 2
	sources := [2]*served{{pager: p, fd: p.mem.PollFD(), serve: serveFaults}, {pager: p, fd: p.mem.ReportFD(), serve: serveReports}}
	for i, sv := range sources {
		ev := eventFor(id + uint64(i))
		if err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_ADD, sv.fd, &ev); err != nil {
			if i > 0 {
				_ = unix.EpollCtl(s.epoll, unix.EPOLL_CTL_DEL, sources[0].fd, nil)
			}
			return fmt.Errorf("serve faults of sandbox %s: %w", p.name, err)
		}
	}
	s.pagers[id], s.pagers[id+1] = sources[0], sources[1]
	s.ids[p] = id
	return nil
}

// Remove ends the service of p and waits until no thread works on it. Do it when its VMM
// is dead and before its Guest and Pager are closed. Not serving p is no error.
func (s *Server) Remove(p *Pager) {
	s.mu.Lock()
	id := s.ids[p]
	sources := [2]*served{s.pagers[id], s.pagers[id+1]}
	if id == 0 {
		s.mu.Unlock()
		return
	}
	delete(s.pagers, id)
	delete(s.pagers, id+1)
	delete(s.ids, p)
	s.mu.Unlock()
	for _, sv := range sources {
		s.remove(sv)
	}
}

func (s *Server) remove(sv *served) {
	sv.mu.Lock()
	defer sv.mu.Unlock()
	sv.removed = true
	s.mu.RLock()
	defer s.mu.RUnlock()
	if !s.stopped {
		_ = unix.EpollCtl(s.epoll, unix.EPOLL_CTL_DEL, sv.fd, nil)
	}
}

// Run serves faults until ctx ends. Pagers that are still there then are no longer served:
// their guests wait.
//
// It raises GOMAXPROCS to the cores plus its threads, so that a thread that comes back
// from the kernel with a fault always finds a processor of the Go scheduler free, however
// busy the encoders are; otherwise it would queue behind them for up to 10 ms.
func (s *Server) Run(ctx context.Context) error {
	if s.failed != nil {
		return s.failed
	}
	if want := runtime.NumCPU() + s.threads; runtime.GOMAXPROCS(0) < want {
		runtime.GOMAXPROCS(want)
	}
	var threads sync.WaitGroup
	for range s.threads {
		threads.Go(s.thread)
	}
	<-ctx.Done()
	var one [8]byte
	one[0] = 1
	_, werr := unix.Write(s.stop, one[:])
	threads.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	err := errors.Join(werr, unix.Close(s.epoll), unix.Close(s.stop))
	if err != nil {
		return fmt.Errorf("end fault server: %w", err)
	}
	return nil
}

// thread serves what is ready until the stop descriptor is.
func (s *Server) thread() {
	runtime.LockOSThread() // never unlocked: the thread and its niceness die with the goroutine
	if hostmem.SetRealtime(faultPriority) != nil {
		_ = hostmem.SetNice(0, faultNice)
	}
	w := &faultWorker{codec: cohort.NewLoader()}
	defer w.codec.Close()
	for {
		n, err := unix.EpollWait(s.epoll, w.ready[:], -1)
		if err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			panic(os.NewSyscallError("epoll_wait", err)) // the descriptor is ours and open
		}
		for i := range w.ready[:n] {
			id := idOf(&w.ready[i])
			if id == 0 {
				return
			}
			s.serveReady(id, w)
		}
	}
}

// serveReady serves what waits at one source, at most faultsAtOnce faults, and arms it again.
func (s *Server) serveReady(id uint64, w *faultWorker) {
	s.mu.RLock()
	sv := s.pagers[id]
	s.mu.RUnlock()
	if sv == nil {
		return
	}
	sv.mu.Lock()
	defer sv.mu.Unlock()
	if sv.removed {
		return
	}
	if !sv.serve(sv.pager, w) {
		return // not armed again: nobody can serve it any more
	}
	ev := eventFor(id)
	if err := unix.EpollCtl(s.epoll, unix.EPOLL_CTL_MOD, sv.fd, &ev); err != nil {
		sv.pager.abort(fmt.Errorf("arm userfaultfd or report socket: %w", err))
	}
}

// serveFaults reads and handles faults. A panic is a bug of ours that costs this sandbox
// its life, not its siblings theirs.
func serveFaults(p *Pager, w *faultWorker) (ok bool) {
	defer func() {
		if r := recover(); r != nil {
			p.abort(fmt.Errorf("panic while serving a fault: %v\n%s", r, debug.Stack()))
			ok = false
		}
	}()
	if _, ok := p.serveWaiting(w); !ok {
		return false
	}
	return p.bringNeighbours(w)
}

// serveWaiting handles the faults that wait now, at most faultsAtOnce; not ok: the sandbox
// has failed.
func (p *Pager) serveWaiting(w *faultWorker) (n int, ok bool) {
	n, err := p.mem.Faults(w.faults[:], w.events[:])
	if err != nil {
		p.abort(fmt.Errorf("read faults: %w", err))
		return 0, false
	}
	since := time.Now()
	for i := range n {
		p.handle(w.faults[i], w, since)
	}
	return n, true
}

// abort is fail for callers that do not hold mu.
func (p *Pager) abort(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.fail(err)
}
