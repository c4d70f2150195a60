/* SPDX-License-Identifier: Apache-2.0 */
/* Time slots on a device with oversubscribed memory, without a coordinator.
 *
 * Containers that hold memory beyond their guarantee share one page per node, one line per device. Each writes there how much it holds and
 * that it is active. While everything that active containers hold fits the device, nothing happens. When it does not, they would evict each
 * other's pages with every kernel. So they take time slots of a few seconds, long against the time in which the memory that does not fit
 * changes places. A container that stops launching, or is killed, soon loses its place in the order. At the start of its time slot a
 * container brings its evicted memory back in one piece (interpose/prefetch.h).
 *
 * Containers without such memory take no part. Their memory cannot leave the device, so their kernels evict no pages of others and lose
 * no pages: they need not wait. But the room that their memory takes is not known here, and that of inactive containers is not known
 * either: those that take time slots compare their demand with the whole device, and where others hold much of it they may still run
 * together and thrash.
 *
 * The page is writable for all of them, and each may write anything, or truncate it. That can spoil the order of the time slots, never the
 * right to run: every wait has an end (`patience_ns`), after which a container runs without a time slot, and thrashing returns. Because a
 * container may truncate it, no process maps it (region/node_page.h): a container reads a copy of the line, decides, and writes back what
 * changed, its own place and perhaps the time slot. Files have no compare-and-exchange, and this does not need one:
 *
 * - Two containers that both find the time slot free both write that they took it. The last writer has it: the other sees that when it
 *   reads the line again, at once or at its next query, one batch of launches later, and waits. Until then both run, as without time slots;
 *   at worst pages moved once without use. This is rare, because at the end of a time slot only the next container in the order may take
 *   it, and others only when that one has not for 20 ms.
 * - Two containers that claim the same place: the last writer has it, the other does not find itself there next time and claims another.
 * - Processes of one container write the same place: each value is as good as the one before.
 *
 * Pure: the line, the time (CLOCK_MONOTONIC, which containers of one node share) and all sizes are arguments.
 */
#ifndef AQ_LIMIT_TURNS_H
#define AQ_LIMIT_TURNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AQ_TURNS_MAGIC 0x314e525451414c41ull /* "ALAQTRN1" */
#define AQ_TURNS_LINES 63u
#define AQ_TURNS_SLOTS 30u
#define AQ_TURNS_IDLE_NS 500000000ll      /* a container that did not launch for half a second is inactive: others need not wait for it */
#define AQ_TURNS_WRITE_NS 10000000ll        /* an active container writes this no more often */
#define AQ_TURNS_LEAST_NS 2000000000ll
#define AQ_TURNS_MOST_NS 60000000000ll
#define AQ_TURNS_SWAPS 10                 /* a time slot lasts this many times as long as its change of memory … */
#define AQ_TURNS_BYTES_PER_NS 25          /* … at what moves over the bus */

/* One container on one device. */
struct aq_turns_slot {
	uint64_t owner;       /* 0 = never used; a container that is inactive for long may lose its place to another */
	uint64_t demand_bytes;
	int64_t seen_ns;      /* when it last launched or waited for its time slot */
	uint64_t reserved;
};

struct aq_turns_line {
	_Alignas(64) uint64_t turn; /* the holder (place + 1) in the low byte, above it the end in microseconds; 0 = no holder */
	uint64_t reserved[7];
	struct aq_turns_slot slot[AQ_TURNS_SLOTS];
};

struct aq_turns_page {
	uint64_t magic;
	uint64_t reserved[127];
	struct aq_turns_line line[AQ_TURNS_LINES];
};
_Static_assert(sizeof(struct aq_turns_line) == 1024, "turns ABI v1");
_Static_assert(offsetof(struct aq_turns_page, line) == 1024, "turns ABI v1");
_Static_assert(sizeof(struct aq_turns_page) == 65536, "turns ABI v1: sixteen pages");

/* The container that queries. */
struct aq_turns_party {
	uint64_t owner;          /* the same for all processes of a container; never 0 */
	uint64_t demand_bytes;   /* what the container holds on the device, the part of it in host memory included */
	uint64_t capacity_bytes; /* of the device */
};

struct aq_turns_reply {
	bool may_run;
	uint64_t turn; /* then: the number of the time slot, never used twice; 0 = no other container is active, or everything fits */
	int64_t retry_ns; /* else: when to query again, from now; a query also keeps the place in the order */
	int64_t patience_ns; /* and how long to wait in all, before running without a time slot */
};

/* May the container launch now? Called before launches by all that hold memory beyond their guarantee. The caller writes what changes in
 * `line`. */
struct aq_turns_reply aq_turns_query(struct aq_turns_line *line, const struct aq_turns_party *party, int64_t now_ns);

#endif
