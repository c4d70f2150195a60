/* A file that containers of one node share: a magic number in front, then a line for each device.
 *
 * It is never mapped. Whoever may write a file may also truncate it, and a mapping of what is gone ends the process that touches it: one tenant
 * could end all others. So lines are read and written by system calls, which then come back short. Each read looks at the
 * magic number first: a page that was cut off or scribbled on counts as none until the agent has mended it, in place
 * (agent/adapters/node_files.py), and so does a descriptor that the program closed and whose number now is another file's.
 *
 * Lines are copied without a lock. A word that its writer is just changing may come out torn, which is one more kind of nonsense that
 * whoever reads a line has to expect anyway.
 */
#ifndef AQ_REGION_NODE_PAGE_H
#define AQ_REGION_NODE_PAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct aq_node_page {
	uint64_t magic; /* what it begins with when it is whole; 0 = the agent mounts none */
	int fd;
	bool writable;
	_Atomic int64_t settled_ns;    /* until when it is not written; see aq_node_page_write */
	_Atomic int64_t owed_until_ns; /* when all that its writes took is made up for, with one that was forgiven */
};

/* Open `path`, for writing where it is mounted so. A page that is damaged now may be mended later: that is seen at each read. */
void aq_node_page_open(struct aq_node_page *page, const char *path, uint64_t magic);

/* Also in a forked child, whose parent may have lost the descriptor to another file. */
void aq_node_page_close(struct aq_node_page *page);

/* False = there is no such page now. errno stays the application's, here and below. */
bool aq_node_page_read(const struct aq_node_page *page, size_t offset, void *into, size_t bytes);

/* Only after a read that went well. Writers of one file wait for each other, and another tenant's write may be gigabytes long. So this process
 * gives writing a twentieth of its time and no more: after one that took long it writes nothing for twenty times as long, and returns false.
 * One is forgiven, for a thread that lost its processor meanwhile looks the same; the next one that takes long within those twenty times is
 * made up for together with it. */
bool aq_node_page_write(struct aq_node_page *page, size_t offset, const void *from, size_t bytes);

/* What a write that took so long means for the next ones. Of aq_node_page_write; here for the tests, with the time as an argument. */
void aq_node_page_took(struct aq_node_page *page, int64_t begin_ns, int64_t end_ns);

#endif
