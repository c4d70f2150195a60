#include "region/node_page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SETTLE_FACTOR 20 /* a write is made up for in so many times what it took */
#define AHEAD_NS 1000000 /* so far ahead of that the next one may be: some usual ones in a row */

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void aq_node_page_open(struct aq_node_page *page, const char *path, uint64_t magic)
{
	/* Another tenant may hold a lease on the file, and an open that has to wait for it takes most of a minute. */
	int flags = O_CLOEXEC | O_NONBLOCK | O_NOCTTY, fd = open(path, O_RDWR | flags);

	page->writable = fd >= 0;
	if (fd < 0)
		fd = open(path, O_RDONLY | flags);
	page->fd = fd;
	page->magic = fd >= 0 ? magic : 0;
	atomic_store_explicit(&page->settled_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&page->owed_until_ns, 0, memory_order_relaxed);
}

/* Not libc's pread and pwrite: a launch is no place at which a thread can be cancelled. */
static bool read_at(const struct aq_node_page *page, size_t offset, void *into, size_t bytes)
{
	return syscall(SYS_pread64, page->fd, into, bytes, (off_t)offset) == (long)bytes;
}

static bool is_there(const struct aq_node_page *page)
{
	uint64_t magic;

	return page->magic && read_at(page, 0, &magic, sizeof(magic)) && magic == page->magic;
}

void aq_node_page_close(struct aq_node_page *page)
{
	if (is_there(page))
		close(page->fd);
	page->magic = 0;
}

bool aq_node_page_read(const struct aq_node_page *page, size_t offset, void *into, size_t bytes)
{
	int of_the_application = errno;
	bool whole = is_there(page) && read_at(page, offset, into, bytes);

	errno = of_the_application;
	return whole;
}

/* A write beyond the program's limit would be answered with SIGXFSZ. */
static bool may_write_to(size_t end)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= end;
}

static int64_t later(int64_t one_ns, int64_t other_ns)
{
	return one_ns > other_ns ? one_ns : other_ns;
}

void aq_node_page_took(struct aq_node_page *page, int64_t begin_ns, int64_t end_ns)
{
	int64_t owed_until = atomic_load_explicit(&page->owed_until_ns, memory_order_relaxed);
	int64_t settled = atomic_load_explicit(&page->settled_ns, memory_order_relaxed), owed = (end_ns - begin_ns) * SETTLE_FACTOR;
	/* Only a slow one leaves so much to make up for: it was forgiven, and this is the next. */
	bool again = owed > AHEAD_NS && owed_until > begin_ns + AHEAD_NS;

	owed_until = later(owed_until, begin_ns) + owed;
	settled = again ? owed_until : later(settled, begin_ns) + (owed < AHEAD_NS ? owed : AHEAD_NS);
	atomic_store_explicit(&page->owed_until_ns, owed_until, memory_order_relaxed);
	atomic_store_explicit(&page->settled_ns, settled, memory_order_relaxed);
}

bool aq_node_page_write(struct aq_node_page *page, size_t offset, const void *from, size_t bytes)
{
	int of_the_application = errno;
	int64_t begin = now_ns(), settled = atomic_load_explicit(&page->settled_ns, memory_order_relaxed);

	if (settled > begin + AHEAD_NS || !may_write_to(offset + bytes))
		return false;
	bool whole = syscall(SYS_pwrite64, page->fd, from, bytes, (off_t)offset) == (long)bytes;
	aq_node_page_took(page, begin, now_ns());
	errno = of_the_application;
	return whole;
}
