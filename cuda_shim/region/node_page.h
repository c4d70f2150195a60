/* SPDX-License-Identifier: Apache-2.0 */
/* A file that containers of one node share: a magic number in front, then a line for each device.
 *
 * It is never mapped. A tenant that may write a file may also truncate it, and a process that touches a mapping past the end is killed: one
 * tenant could end all others. So lines are read and written by system calls, which return short instead. Each read checks the magic number
 * first: a truncated or overwritten page counts as missing until the agent has repaired it in place (agent/adapters/node_files.py). The
 * same holds for a descriptor that the program closed and that now belongs to another file.
 *
 * Lines are copied without a lock. A word that is being written may be read torn; a reader has to expect any value in any case.
 */
#ifndef AQ_REGION_NODE_PAGE_H
#define AQ_REGION_NODE_PAGE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AQ_NODE_PAGE_PATH_BYTES (PATH_MAX + 64)

struct aq_node_page {
	uint64_t magic;         /* its first word while it is valid; 0 = the agent mounts no such page */
	_Atomic int fd;         /* -1 = a lease has refused every open so far */
	_Atomic bool writable;  /* it is mounted writable; a lease may keep it from being opened so */
	int former_fd;          /* the one that could only read, before another tenant's lease ended; else -1 */
	_Atomic int64_t due_ns; /* when to try again an open that a lease has refused; 0 = none was */
	char path[AQ_NODE_PAGE_PATH_BYTES];
	_Atomic int64_t settled_ns;    /* until when it is not written; see aq_node_page_write */
	_Atomic int64_t owed_until_ns; /* when all that its writes took is made up for, with one that was forgiven */
};

/* Open `path`, for writing where it is mounted writable. A page that is damaged now may be repaired later: each read checks again. Another
 * tenant may hold a lease on the file, and an open that waits for its end takes most of a minute. So no open waits, and one that a
 * lease has refused is repeated once a second, by the reads and writes below. */
void aq_node_page_open(struct aq_node_page *page, const char *path, uint64_t magic);

/* Also in a forked child: its parent may have closed the descriptor and opened another file under its number. */
void aq_node_page_close(struct aq_node_page *page);

/* False = there is no such page now. errno stays the application's, here and below. */
bool aq_node_page_read(struct aq_node_page *page, size_t offset, void *into, size_t bytes);

/* Only after a successful read. Writers of one file wait for each other, and another tenant's write may be gigabytes long. So this process
 * spends at most a twentieth of its time on writing: after a write that took long it writes nothing for twenty times as long, and returns
 * false. One long write is excused, because a thread that lost its processor looks the same; the next long one within that period is
 * counted together with it. */
bool aq_node_page_write(struct aq_node_page *page, size_t offset, const void *from, size_t bytes);

/* What a write that took so long means for the next ones. Of aq_node_page_write; here for the tests, with the time as an argument. */
void aq_node_page_took(struct aq_node_page *page, int64_t begin_ns, int64_t end_ns);

#endif
