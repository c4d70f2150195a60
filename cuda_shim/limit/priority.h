/* SPDX-License-Identifier: Apache-2.0 */
/* Priority between containers that share a device, without a coordinator.
 *
 * One page per node, one line per device. Containers of high priority have it writable: they write until when their launched work will keep
 * the device. Containers of low priority have it read-only: until shortly after that time they draw only a trickle from their compute
 * bucket. So high priority waits only for what low priority has in flight, low priority never starves, and no daemon has to be quick. The
 * worst that a high-priority container can do with its writes is to keep the others at the trickle, or to stop priority from working: it
 * may truncate the page, so no process maps it (region/node_page.h), and while it is damaged there is no priority.
 *
 * A write is a system call, and launches are many. So a process keeps its own account of when its work will be done, and writes only when
 * the page is AQ_PRIORITY_LATE_NS behind it: the first launch after a pause at once, a stream of short ones at most four thousand times a
 * second. That is short against the time for which a mark stays valid.
 *
 * Pure: the content of the page and the time (CLOCK_MONOTONIC, which containers of one node share) are arguments.
 */
#ifndef AQ_LIMIT_PRIORITY_H
#define AQ_LIMIT_PRIORITY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_PRIORITY_MAGIC 0x3149525051414c41ull /* "ALAQPRI1" */
#define AQ_PRIORITY_LINES 63u
#define AQ_PRIORITY_LINGER_NS 10000000ll        /* a device counts as wanted for 10 ms after the work is thought done */
#define AQ_PRIORITY_LATE_NS 250000ll            /* by so much the page may be behind what is launched */
#define AQ_PRIORITY_HORIZON_NS 1000000000ll     /* no launch keeps a device for more than a second ahead; a later time is invalid */
#define AQ_PRIORITY_TRICKLE_PERCENT 5u

struct aq_priority_line {
	_Alignas(64) int64_t wanted_until_ns; /* by the high-priority containers together; 0 = never wanted */
	uint64_t reserved[7];
};

struct aq_priority_page {
	uint64_t magic;
	uint64_t reserved[7];
	struct aq_priority_line line[AQ_PRIORITY_LINES];
};
_Static_assert(sizeof(struct aq_priority_page) == 4096, "priority ABI v1: one page");

/* One process of high priority on one device. Zero at the start. */
struct aq_priority_own {
	_Atomic int64_t until_ns; /* when the work it has launched will be done */
	_Atomic int64_t written_ns;  /* when the others think so */
};

/* A process of high priority launches work of this cost. True when it has to write to the page. */
bool aq_priority_want(struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns);

/* What to write in place of `line_ns`, the line's present value for all of high priority together; 0 = write nothing. */
int64_t aq_priority_update(struct aq_priority_own *own, int64_t line_ns, int64_t now_ns);

/* The share of the device a low-priority container may use now: its own ceiling, or the trickle. 0 as `percent` means no ceiling. */
uint32_t aq_priority_percent(int64_t line_ns, int64_t now_ns, uint32_t percent);

#endif
