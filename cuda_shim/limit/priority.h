/* Priority between containers that share a device, without anybody in the middle.
 *
 * One page per node, one line per device. Containers of high priority have it writable and write until when the work they have launched will
 * keep the device; containers of low priority have it read-only and, until shortly after that time, draw no more than a trickle from
 * their compute bucket. So the high one waits for what low ones have in flight and no longer, low ones never starve, and no daemon has to be
 * quick. The worst a scribbling high-priority container can do is to keep low ones at the trickle.
 *
 * The time is CLOCK_MONOTONIC, which containers of one node share.
 */
#ifndef AQ_LIMIT_PRIORITY_H
#define AQ_LIMIT_PRIORITY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_PRIORITY_MAGIC 0x3149525051414c41ull /* "ALAQPRI1" */
#define AQ_PRIORITY_LINES 63u
#define AQ_PRIORITY_LINGER_NS 10000000ll        /* a device counts as wanted for 10 ms after the work is thought done */
#define AQ_PRIORITY_HORIZON_NS 1000000000ll     /* no launch keeps a device for more than a second ahead; what says so is nonsense */
#define AQ_PRIORITY_TRICKLE_PERCENT 5u

struct aq_priority_line {
	_Alignas(64) _Atomic int64_t wanted_until_ns; /* by the high-priority containers together; 0 = never wanted */
	uint64_t reserved[7];
};

struct aq_priority_page {
	uint64_t magic;
	uint64_t reserved[7];
	struct aq_priority_line line[AQ_PRIORITY_LINES];
};
_Static_assert(sizeof(struct aq_priority_page) == 4096, "priority ABI v1: one page");

/* A high-priority container launches work of this cost. */
void aq_priority_want(struct aq_priority_line *line, int64_t now_ns, int64_t cost_ns);

/* The share of the device a low-priority container may use now: its own ceiling, or the trickle. 0 as `percent` means no ceiling. */
uint32_t aq_priority_percent(const struct aq_priority_line *line, int64_t now_ns, uint32_t percent);

#endif
