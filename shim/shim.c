/* agentzip-shim.so: the only code of AgentZip inside a VMM process.
 *
 * Only a process itself can drop its own pages, and a userfaultfd must be opened
 * by the process whose memory it watches. So this library, preloaded into the
 * VMM, does these two things for its daemon; a third follows from them: nobody else
 * in the process may drop a page of the guest.
 *
 *   loaded --userfaultfd, hello--> waiting --"go"--> serving --socket closed--> exit(70)
 *
 * Inherited: AZ_SHIM_FD, a SOCK_SEQPACKET Unix socket to the daemon; AZ_UFFD_FD, an
 * open /dev/userfaultfd (optional: an unprivileged process may not call userfaultfd(2)
 * for faults of the kernel). Without AZ_SHIM_FD it does nothing. Messages are in
 * host byte order and mirrored by internal/guestmem:
 *
 *   shim -> daemon  struct hello + the userfaultfd as SCM_RIGHTS
 *   daemon -> shim  struct go            (the VMM does not run before this)
 *   shim -> daemon  struct serving       (the id of the thread below)
 *   daemon -> shim  struct guard + two descriptors   (once, before the guest runs)
 *   shim -> daemon  struct done
 *   daemon -> shim  struct drop  \  any number of times
 *   shim -> daemon  struct done  /
 *
 * Reports. A guest that has free page reporting tells the VMM which pages it does not
 * use. QEMU answers by punching a hole into the file of the guest's memory, then by
 * dropping the pages (ram_block_discard_range in softmmu/physmem.c). The first would
 * damage the template if its seal did not refuse it, the second would unmap pages behind
 * the daemon's back. So fallocate and madvise are taken over here, for the memory that
 * "guard" names. The thread that asked for the hole waits while the daemon drops the
 * pages by its own rules, because the guest may use them again once the VMM has answered:
 *
 *   idle --report sent--> offered --the daemon reads it--> taken --its answer--> idle
 *                         offered --nobody did for PATIENCE: read back--> idle
 *
 * The report is a message in the queue of a socket of which both ends are here as well as
 * the daemon's end there. Whoever reads it has it, so a report that was given up cannot
 * be acted upon later, when the guest may be using the pages. Whatever becomes of a report,
 * the VMM hears "done": the content of a page that the guest does not use is nobody's.
 *
 * The shim keeps its own userfaultfd until the process ends: were the last one
 * closed, missing pages would silently read as the template's. When its daemon is
 * dead it ends the process, because nobody would ever serve those pages again. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

enum {
	MAGIC = 0x48535a41, /* "AZSH" */
	VERSION = 2,
	OP_GO = 1,
	OP_DROP = 2,
	OP_GUARD = 3,
	MAX_RANGES = 64,
	STACK = 64 << 10, /* bytes; the thread needs about 4 KiB */
	GUARD = 64 << 10, /* bytes, on both sides of the stack */
	PATIENCE = 20,    /* ms until a report that nobody takes is given up. QEMU's big lock is
	                   * held meanwhile: doubled, a guest beside a daemon that hangs stands
	                   * still for twice as long; a busy one takes reports within 1 ms */
	QUIET = 1000,     /* ms for which reports are not even offered after that. A report of QEMU has
	                   * up to 32 ranges; halved, such a guest stands still for 4 % of the time */
	EXIT_ORPHAN = 70, /* the daemon is gone */
	EXIT_SETUP = 71,  /* the handshake failed */
};

struct hello { uint32_t magic, version, pid, reserved; };
struct go { uint32_t op, reserved; };
struct serving { uint32_t magic, tid; };
struct range { uint64_t addr, len; };
struct drop { uint32_t op, n; struct range r[MAX_RANGES]; };
struct done { int32_t err; uint32_t done; };
struct guard { uint32_t op, reserved; uint64_t addr, len, dev, ino; };
struct report { uint64_t offset, len; }; /* bytes, in the file of the guest's memory */

static int sock = -1, uffd = -1, self = -1;

/* What OP_GUARD said. Written once, before `guarded` is set. */
static uint64_t guest_addr, guest_len, guest_dev, guest_ino;
static int report_fd = -1;  /* our end */
static int offered_fd = -1; /* the daemon's end: what it has not read yet can be read back */
static int guarded;         /* atomic */
static pthread_mutex_t reporting = PTHREAD_MUTEX_INITIALIZER; /* one report at a time */

static void fail(const char *what)
{
	fprintf(stderr, "agentzip-shim: %s: %s\n", what, strerror(errno));
	_exit(EXIT_SETUP);
}

/* Reads one message; the process does not outlive its daemon. */
static ssize_t receive(void *buf, size_t len)
{
	for (;;) {
		ssize_t n = recv(sock, buf, len, 0);
		if (n > 0)
			return n;
		if (n < 0 && errno == EINTR)
			continue;
		_exit(EXIT_ORPHAN);
	}
}

static void transmit(const void *buf, size_t len)
{
	while (send(sock, buf, len, MSG_NOSIGNAL) < 0)
		if (errno != EINTR)
			_exit(EXIT_ORPHAN);
}

/* Frees the physical pages of all ranges. One vectored call flushes the TLB once
 * (64 scattered pages: 27 us instead of 360 us), but kernels before 6.13 refuse
 * it. Dropping a range a second time is harmless: the daemon serves no fault of
 * this guest before the answer. */
static struct done drop_ranges(const struct drop *m)
{
	struct iovec v[MAX_RANGES];
	size_t total = 0;
	for (uint32_t i = 0; i < m->n; i++) {
		v[i].iov_base = (void *)(uintptr_t)m->r[i].addr;
		v[i].iov_len = m->r[i].len;
		total += m->r[i].len;
	}
	if (self >= 0 && syscall(SYS_process_madvise, self, v, (size_t)m->n, MADV_DONTNEED, 0) == (long)total)
		return (struct done){0, m->n};
	for (uint32_t i = 0; i < m->n; i++)
		if (syscall(SYS_madvise, v[i].iov_base, v[i].iov_len, MADV_DONTNEED) < 0)
			return (struct done){errno, i};
	return (struct done){0, m->n};
}

/* Takes over the two descriptors of a guard message; from here on the memory it names is
 * the daemon's. */
static struct done start_guard(const struct guard *g, const int fds[2])
{
	if (guarded || fds[0] < 0)
		return (struct done){EINVAL, 0};
	guest_addr = g->addr;
	guest_len = g->len;
	guest_dev = g->dev;
	guest_ino = g->ino;
	report_fd = fds[0];
	offered_fd = fds[1];
	__atomic_store_n(&guarded, 1, __ATOMIC_RELEASE);
	return (struct done){0, 0};
}

/* Reads one request and the descriptors that came with it (-1: none). */
static size_t receive_request(void *buf, size_t len, int fds[2])
{
	union { struct cmsghdr align; char buf[CMSG_SPACE(2 * sizeof(int))]; } c;
	struct iovec v = {buf, len};
	fds[0] = fds[1] = -1;
	for (;;) {
		struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c.buf, .msg_controllen = sizeof c.buf};
		ssize_t n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			_exit(EXIT_ORPHAN);
		struct cmsghdr *cm = CMSG_FIRSTHDR(&m);
		if (cm && cm->cmsg_type == SCM_RIGHTS && cm->cmsg_len == CMSG_LEN(2 * sizeof(int)))
			memcpy(fds, CMSG_DATA(cm), 2 * sizeof(int));
		return (size_t)n;
	}
}

static void *serve(void *unused)
{
	(void)unused;
	struct serving s = {MAGIC, (uint32_t)syscall(SYS_gettid)};
	transmit(&s, sizeof s);
	for (;;) {
		union { struct drop drop; struct guard guard; } m;
		int fds[2];
		size_t n = receive_request(&m, sizeof m, fds);
		struct done d = {EINVAL, 0};
		if (n >= 8 && m.drop.op == OP_DROP && m.drop.n >= 1 && m.drop.n <= MAX_RANGES &&
		    n == 8 + m.drop.n * sizeof(struct range))
			d = drop_ranges(&m.drop);
		else if (n == sizeof m.guard && m.guard.op == OP_GUARD)
			d = start_guard(&m.guard, fds);
		transmit(&d, sizeof d);
	}
	return NULL;
}

static uint64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Lets the daemon drop a range of the guest's memory, as far as it wants to, and returns
 * when it cannot do so any more. */
static void report(uint64_t offset, uint64_t len)
{
	static uint64_t quiet_until; /* guarded by reporting */
	struct report r = {offset, len};
	struct done d;
	pthread_mutex_lock(&reporting);
	if (now_ms() >= quiet_until && send(report_fd, &r, sizeof r, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof r) {
		struct pollfd p = {report_fd, POLLIN, 0};
		int n;
		while ((n = poll(&p, 1, PATIENCE)) < 0 && errno == EINTR)
			;
		/* Not there to be read back: it was taken, and the answer will come. */
		if (n > 0 || recv(offered_fd, &r, sizeof r, MSG_DONTWAIT) < 0)
			while (recv(report_fd, &d, sizeof d, 0) < 0 && errno == EINTR)
				;
		else
			quiet_until = now_ms() + QUIET;
	}
	pthread_mutex_unlock(&reporting);
}

/* Holes in the file of the guest's memory are reports; everything else is the VMM's own. */
__attribute__((visibility("default"))) int fallocate64(int fd, int mode, off64_t offset, off64_t len)
{
	struct stat st;
	if (__atomic_load_n(&guarded, __ATOMIC_ACQUIRE) && (mode & FALLOC_FL_PUNCH_HOLE) && fstat(fd, &st) == 0 &&
	    st.st_dev == guest_dev && st.st_ino == guest_ino) {
		if (offset >= 0 && len > 0)
			report((uint64_t)offset, (uint64_t)len);
		return 0;
	}
	return (int)syscall(SYS_fallocate, fd, mode, offset, len);
}

__attribute__((visibility("default"))) int fallocate(int fd, int mode, off_t offset, off_t len)
{
	return fallocate64(fd, mode, offset, len);
}

/* Only drop_ranges, which does not come through here, may unmap a page of the guest. */
__attribute__((visibility("default"))) int madvise(void *addr, size_t len, int advice)
{
	uint64_t a = (uint64_t)(uintptr_t)addr;
	int destroys = advice == MADV_DONTNEED || advice == MADV_REMOVE || advice == MADV_FREE || advice == MADV_PAGEOUT;
	if (destroys && __atomic_load_n(&guarded, __ATOMIC_ACQUIRE) && a < guest_addr + guest_len && a + len > guest_addr)
		return 0;
	return (int)syscall(SYS_madvise, addr, len, advice);
}

/* The thread's stack is a shared mapping of its own, so that no later eviction of
 * the VMM's anonymous memory can make the thread wait for itself. */
static void start_thread(void)
{
	char *base = mmap(NULL, GUARD + STACK + GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int fd = memfd_create("agentzip-shim-stack", MFD_CLOEXEC);
	if (base == MAP_FAILED || fd < 0 || ftruncate(fd, STACK) < 0 ||
	    mmap(base + GUARD, STACK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		fail("map the thread's stack");
	close(fd);
	sigset_t all, old;
	pthread_attr_t attr;
	pthread_t thread;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	errno = pthread_attr_init(&attr);
	if (!errno)
		errno = pthread_attr_setstack(&attr, base + GUARD, STACK);
	if (!errno)
		errno = pthread_create(&thread, &attr, serve, NULL);
	if (errno)
		fail("start the thread");
	pthread_attr_destroy(&attr);
	pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void say_hello(void)
{
	struct hello h = {MAGIC, VERSION, (uint32_t)getpid(), 0};
	struct iovec v = {&h, sizeof h};
	union { struct cmsghdr align; char buf[CMSG_SPACE(sizeof(int))]; } c = {0};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c.buf, .msg_controllen = sizeof c.buf};
	struct cmsghdr *cm = CMSG_FIRSTHDR(&m);
	cm->cmsg_level = SOL_SOCKET;
	cm->cmsg_type = SCM_RIGHTS;
	cm->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(cm), &uffd, sizeof uffd);
	if (sendmsg(sock, &m, MSG_NOSIGNAL) < 0)
		fail("send hello");
}

__attribute__((constructor)) static void init(void)
{
	const char *s = getenv("AZ_SHIM_FD"), *d = getenv("AZ_UFFD_FD");
	if (!s)
		return;
	int dev = d ? atoi(d) : -1;
	sock = atoi(s);
	unsetenv("LD_PRELOAD"); /* children of the VMM, if there are any, are none of our business */
	unsetenv("AZ_SHIM_FD");
	unsetenv("AZ_UFFD_FD");
	if (fcntl(sock, F_SETFD, FD_CLOEXEC) < 0)
		fail("use AZ_SHIM_FD");
	uffd = dev >= 0 ? ioctl(dev, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK)
			: (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (uffd < 0)
		fail(dev >= 0 ? "open a userfaultfd from AZ_UFFD_FD" : "open a userfaultfd");
	if (dev >= 0)
		close(dev);
	self = (int)syscall(SYS_pidfd_open, getpid(), 0); /* -1 on kernels before 5.3: ranges are dropped one by one */
	say_hello();
	struct go g;
	if (receive(&g, sizeof g) != sizeof g || g.op != OP_GO) {
		errno = EPROTO;
		fail("wait for go");
	}
	start_thread();
}
