/* agentzip-shim.so: the only code of AgentZip inside a VMM process.
 *
 * Only a process itself can drop its own pages, and a userfaultfd must be opened
 * by the process whose memory it watches. So this library, preloaded into the
 * VMM, does these two things for its daemon and nothing else:
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
 *   daemon -> shim  struct drop  \  any number of times
 *   shim -> daemon  struct done  /
 *
 * The shim keeps its own userfaultfd until the process ends: were the last one
 * closed, missing pages would silently read as the template's. When its daemon is
 * dead it ends the process, because nobody would ever serve those pages again. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

enum {
	MAGIC = 0x48535a41, /* "AZSH" */
	VERSION = 1,
	OP_GO = 1,
	OP_DROP = 2,
	MAX_RANGES = 64,
	STACK = 64 << 10, /* bytes; the thread needs about 4 KiB */
	GUARD = 64 << 10, /* bytes, on both sides of the stack */
	EXIT_ORPHAN = 70, /* the daemon is gone */
	EXIT_SETUP = 71,  /* the handshake failed */
};

struct hello { uint32_t magic, version, pid, reserved; };
struct go { uint32_t op, reserved; };
struct serving { uint32_t magic, tid; };
struct range { uint64_t addr, len; };
struct drop { uint32_t op, n; struct range r[MAX_RANGES]; };
struct done { int32_t err; uint32_t done; };

static int sock = -1, uffd = -1, self = -1;

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
		if (madvise(v[i].iov_base, v[i].iov_len, MADV_DONTNEED) < 0)
			return (struct done){errno, i};
	return (struct done){0, m->n};
}

static void *serve(void *unused)
{
	(void)unused;
	struct serving s = {MAGIC, (uint32_t)syscall(SYS_gettid)};
	transmit(&s, sizeof s);
	for (;;) {
		struct drop m;
		size_t n = (size_t)receive(&m, sizeof m);
		struct done d = {EINVAL, 0};
		if (n >= 8 && m.op == OP_DROP && m.n >= 1 && m.n <= MAX_RANGES && n == 8 + m.n * sizeof(struct range))
			d = drop_ranges(&m);
		transmit(&d, sizeof d);
	}
	return NULL;
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
