/* A stand-in for a VMM: it maps a memory file privately, as QEMU maps guest memory, and
 * lets threads read and write it on command. It knows nothing of userfaultfd; the shim is
 * preloaded into it. Usage: fakevmm MEMFD SIZE CHANNEL_FD... One thread serves each channel. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
#define WORDS (PAGE / 8)

enum { READ = 1, WRITE, POKE, READ_KERNEL, WRITE_KERNEL, HAMMER, TOUCH, DISCARD };

struct command { uint32_t op, frame; uint64_t a, b; };
struct answer { uint64_t count, bad, frame, nanos; };

static volatile unsigned char *mem;
static int memfd;

static void need(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "fakevmm: %s: %s\n", what, strerror(errno));
	_exit(3);
}

static void get(int fd, void *buf, size_t n)
{
	for (char *p = buf; n > 0;) {
		ssize_t k = recv(fd, p, n, 0);
		if (k <= 0)
			_exit(0); /* the test is over */
		p += k;
		n -= (size_t)k;
	}
}

static void put(int fd, const void *buf, size_t n)
{
	for (const char *p = buf; n > 0;) {
		ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
		if (k <= 0)
			_exit(0);
		p += k;
		n -= (size_t)k;
	}
}

static uint64_t mix(uint64_t x)
{
	x += 0x9E3779B97F4A7C15ull;
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
	x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
	return x ^ (x >> 31);
}

/* The image's page: Base in vm.go computes the same. Every fifth is a hole. */
static void base(uint64_t *w, uint64_t frame)
{
	for (uint64_t i = 0; i < WORDS; i++)
		w[i] = frame % 5 == 0 ? 0 : (mix(frame) & 0xffff) * 0x10001 + i / 3;
}

/* The content of a hammered page: every kind that an encoder or the pager treats apart. */
static void fill(uint64_t *w, uint64_t frame, uint64_t version)
{
	uint64_t h = mix(frame * 1000003 + version);
	if (version == 0 || h % 6 == 1 || h % 6 == 2)
		base(w, frame);
	if (version == 0)
		return;
	switch (h % 6) {
	case 0:
		memset(w, 0, PAGE);
		break;
	case 2:
		for (int i = 0; i < 3; i++)
			w[(h >> (8 * i)) % WORDS] = h + i;
		break;
	case 3:
		for (uint64_t i = 0; i < WORDS; i++)
			w[i] = version * 7 + (i & 7);
		break;
	case 4:
		for (uint64_t i = 0; i < WORDS; i++)
			w[i] = mix(h + i);
		break;
	case 5:
		for (uint64_t i = 0; i < WORDS; i++)
			w[i] = i < WORDS / 2 ? mix(h + i) & 0xff00ff : h;
		break;
	}
}

/* Reads and rewrites random pages of [frame, frame+a) for b nanoseconds and compares all
 * of each page with what this thread wrote there last. */
static struct answer hammer(uint32_t frame, uint64_t n, uint64_t nanos)
{
	struct answer r = {0};
	uint64_t *version = calloc(n, sizeof *version), want[WORDS], seed = frame + 1;
	struct timespec t;
	need(version != NULL, "allocate versions");
	clock_gettime(CLOCK_MONOTONIC, &t);
	uint64_t end = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + nanos;
	for (;; r.count++) {
		clock_gettime(CLOCK_MONOTONIC, &t);
		int last = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec >= end;
		seed = mix(seed);
		for (uint64_t i = last ? 0 : seed % n, stop = last ? n : i + 1; i < stop; i++) {
			uint64_t f = frame + i;
			volatile uint64_t *page = (volatile uint64_t *)(mem + f * PAGE);
			fill(want, f, version[i]);
			for (unsigned k = 0; k < WORDS; k++)
				if (page[k] != want[k]) {
					if (!r.bad++)
						r.frame = f;
					break;
				}
			if (last || (seed >> 40) % 3 == 0)
				continue; /* only read */
			fill(want, f, ++version[i]);
			for (unsigned k = 0; k < WORDS; k++)
				page[k] = want[k];
		}
		if (last)
			break;
	}
	free(version);
	return r;
}

static void *serve(void *arg)
{
	int fd = (int)(intptr_t)arg;
	unsigned char buf[PAGE];
	for (;;) {
		struct command c;
		struct answer r = {0};
		struct timespec t0, t1;
		get(fd, &c, sizeof c);
		unsigned char *page = (unsigned char *)mem + (uint64_t)c.frame * PAGE;
		switch (c.op) {
		case READ: /* an access of this thread in user mode */
			for (unsigned i = 0; i < PAGE; i += 8)
				*(uint64_t *)(buf + i) = *(volatile uint64_t *)(page + i);
			put(fd, buf, PAGE);
			continue;
		case READ_KERNEL: /* the kernel reads guest memory for us */
			put(fd, page, PAGE);
			continue;
		case WRITE:
			get(fd, buf, PAGE);
			for (unsigned i = 0; i < PAGE; i += 8)
				*(volatile uint64_t *)(page + i) = *(uint64_t *)(buf + i);
			break;
		case WRITE_KERNEL:
			get(fd, page, PAGE);
			break;
		case POKE:
			*(volatile uint64_t *)(page + c.a % PAGE) = c.b;
			break;
		case TOUCH: /* a load (b = 0) or store-of-the-same (b = 1) on `a` pages */
			clock_gettime(CLOCK_MONOTONIC, &t0);
			for (uint64_t i = 0; i < c.a; i++) {
				volatile uint64_t *p = (volatile uint64_t *)(page + i * PAGE);
				if (c.b)
					*p = *p + 1;
				else
					r.count += *p;
			}
			clock_gettime(CLOCK_MONOTONIC, &t1);
			r.nanos = (uint64_t)(t1.tv_sec - t0.tv_sec) * 1000000000u + (uint64_t)t1.tv_nsec - (uint64_t)t0.tv_nsec;
			break;
		case DISCARD: /* as QEMU's ram_block_discard_range: `a` pages */
			clock_gettime(CLOCK_MONOTONIC, &t0);
			if (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)c.frame * PAGE, (off_t)(c.a * PAGE)) < 0 ||
			    madvise(page, c.a * PAGE, MADV_DONTNEED) < 0)
				r.bad = (uint64_t)errno;
			clock_gettime(CLOCK_MONOTONIC, &t1);
			r.nanos = (uint64_t)(t1.tv_sec - t0.tv_sec) * 1000000000u + (uint64_t)t1.tv_nsec - (uint64_t)t0.tv_nsec;
			break;
		case HAMMER:
			r = hammer(c.frame, c.a, c.b);
			break;
		}
		put(fd, &r, sizeof r);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	need(argc > 3, "arguments");
	size_t size = strtoull(argv[2], NULL, 10);
	memfd = atoi(argv[1]);
	mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, memfd, 0);
	need(mem != MAP_FAILED, "map guest memory");
	if (getenv("FAKEVMM_MERGEABLE"))
		need(madvise((void *)mem, size, MADV_MERGEABLE) == 0, "make guest memory mergeable");
	const char *n = getenv("FAKEVMM_NICE"); /* a tight loop of ours leaves the cores to the pager */
	need(nice(n ? atoi(n) : 0) != -1, "become nice");
	for (int i = 3; i < argc; i++) {
		pthread_t t;
		int fd = atoi(argv[i]);
		put(fd, "!", 1);
		need(pthread_create(&t, NULL, serve, (void *)(intptr_t)fd) == 0, "start thread");
	}
	pause();
	return 0;
}
