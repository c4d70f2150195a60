/* SPDX-License-Identifier: Apache-2.0 */
#include "region/node_page.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SETTLE_FACTOR 20 /* a write is made up for in so many times what it took */
#define AGAIN_NS 1000000000ll /* between two opens of a file with a lease */
#define AHEAD_NS 1000000 /* so far ahead of that the next one may be: some usual ones in a row */

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Open the file for writing, or for reading where nothing else is possible. Return whether a lease refused the better of the two. */
static bool is_leased(struct aq_node_page *page)
{
	int flags = O_CLOEXEC | O_NONBLOCK | O_NOCTTY, fd = open(page->path, O_RDWR | flags);
	int before = atomic_load_explicit(&page->fd, memory_order_relaxed);
	bool leased = fd < 0 && errno == EWOULDBLOCK;

	atomic_store_explicit(&page->writable, fd >= 0 || leased, memory_order_relaxed);
	if (fd < 0 && before < 0)
		fd = open(page->path, O_RDONLY | flags);
	if (fd < 0)
		return leased || errno == EWOULDBLOCK;
	page->former_fd = before; /* not closed: another thread may be reading from it */
	atomic_store_explicit(&page->fd, fd, memory_order_release);
	return leased;
}

void aq_node_page_open(struct aq_node_page *page, const char *path, uint64_t magic)
{
	snprintf(page->path, sizeof(page->path), "%s", path);
	page->former_fd = -1;
	atomic_store_explicit(&page->fd, -1, memory_order_relaxed);
	bool leased = is_leased(page);
	atomic_store_explicit(&page->due_ns, leased ? now_ns() + AGAIN_NS : 0, memory_order_relaxed);
	page->magic = leased || page->fd >= 0 ? magic : 0;
	atomic_store_explicit(&page->settled_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&page->owed_until_ns, 0, memory_order_relaxed);
}

/* Repeat an open that a lease has refused, in one thread at a time. */
static void open_again(struct aq_node_page *page)
{
	int64_t due = atomic_load_explicit(&page->due_ns, memory_order_relaxed), now = due ? now_ns() : 0;

	if (!due || now < due || !atomic_compare_exchange_strong(&page->due_ns, &due, INT64_MAX))
		return;
	atomic_store_explicit(&page->due_ns, is_leased(page) ? now + AGAIN_NS : 0, memory_order_release);
}

/* Not libc's pread and pwrite: a launch is no place at which a thread can be cancelled. */
static bool read_at(const struct aq_node_page *page, size_t offset, void *into, size_t bytes)
{
	int fd = atomic_load_explicit(&page->fd, memory_order_acquire);

	return syscall(SYS_pread64, fd, into, bytes, (off_t)offset) == (long)bytes;
}

static bool is_there(const struct aq_node_page *page)
{
	uint64_t magic;

	return page->magic && read_at(page, 0, &magic, sizeof(magic)) && magic == page->magic;
}

void aq_node_page_close(struct aq_node_page *page)
{
	if (is_there(page)) {
		close(page->fd);
		if (page->former_fd >= 0)
			close(page->former_fd);
	}
	page->magic = 0;
}

bool aq_node_page_read(struct aq_node_page *page, size_t offset, void *into, size_t bytes)
{
	int saved_errno = errno;

	open_again(page);
	bool whole = is_there(page) && read_at(page, offset, into, bytes);

	errno = saved_errno;
	return whole;
}

/* A write beyond the program's file-size limit would raise SIGXFSZ. */
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
	int saved_errno = errno;
	int64_t begin = now_ns(), settled = atomic_load_explicit(&page->settled_ns, memory_order_relaxed);

	if (settled > begin + AHEAD_NS || !may_write_to(offset + bytes))
		return false;
	int fd = atomic_load_explicit(&page->fd, memory_order_acquire);
	bool whole = syscall(SYS_pwrite64, fd, from, bytes, (off_t)offset) == (long)bytes;
	aq_node_page_took(page, begin, now_ns());
	errno = saved_errno;
	return whole;
}
