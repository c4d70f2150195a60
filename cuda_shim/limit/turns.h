/* Turns on a device whose memory is oversubscribed, without anybody in the middle.
 *
 * Containers that hold memory beyond what they are guaranteed share one page per node, one line per device. Each says on it how much it holds there
 * and that it is at work. While all that those at work hold fits the device together, nothing happens. When it does not, they would
 * evict each other's pages with every kernel; so they take turns of a few seconds, long against the time in which what does not fit changes
 * places. A container that stops launching is passed over soon, one that was killed as well. With its turn the memory
 * that a container had to leave to others is sent for in one piece (interpose/prefetch.h).
 *
 * Containers without such memory take no part. What they hold cannot leave the device, so their kernels make nobody lose pages, and they lose
 * none to others: they have nothing to wait for. But the room that their memory takes is not known here, nor is that of containers at rest:
 * those who take turns compare their demand with the whole device, and where others hold much of it they may still run together and thrash.
 *
 * The page is writable for all of them, and each may write what it likes, or cut it off. What one can spoil by that is the turns of others,
 * never their right to run: every wait has an end (`patience_ns`), after which a container runs without a turn, and thrashing is back. And
 * because one can cut it off, nobody maps it (region/node_page.h): a container reads a copy of the line, asks, and writes back what the
 * question changed, its own slot and perhaps the turn. There is no compare-and-exchange between files, and none is needed:
 *
 * - Two who both find the turn free both write that they took it. The last one has it: the other sees that when it reads the line again, at once or
 *   at its next question, one batch of launches later, and waits. Until then both run, as before there were turns; at worst pages moved in vain
 *   once. It is rare, because after the end of a turn only the next in line may take it, and others only when that one
 *   has not for 20 ms.
 * - Two who claim the same slot: the last one has it, the other does not find itself in the line next time and claims another.
 * - Processes of one container write the same slot: the last word is as good as the one before.
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
#define AQ_TURNS_IDLE_NS 500000000ll      /* who did not launch for half a second is not at work: others need not wait for it */
#define AQ_TURNS_SAY_NS 10000000ll        /* one at work says so no more often than this */
#define AQ_TURNS_LEAST_NS 2000000000ll
#define AQ_TURNS_MOST_NS 60000000000ll
#define AQ_TURNS_SWAPS 10                 /* a turn lasts this many times as long as its change of memory … */
#define AQ_TURNS_BYTES_PER_NS 25          /* … at what moves over the bus */

/* One container on one device. */
struct aq_turns_slot {
	uint64_t owner;       /* 0 = never used; who is not at work for long may lose its place to another */
	uint64_t demand_bytes;
	int64_t seen_ns;      /* when it last launched or waited for its turn */
	uint64_t reserved;
};

struct aq_turns_line {
	_Alignas(64) uint64_t turn; /* whose it is (slot + 1) in the low byte, above it until when in microseconds; 0 = nobody's */
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

/* Who asks. */
struct aq_turns_party {
	uint64_t owner;          /* the same for all processes of a container; never 0 */
	uint64_t demand_bytes;   /* what the container holds on the device, the part of it in host memory included */
	uint64_t capacity_bytes; /* of the device */
};

struct aq_turns_answer {
	bool may_run;
	uint64_t turn;       /* then: which one it is, never the same again; 0 = nobody else is at work, or all fits */
	int64_t again_ns;    /* else: when to ask again, from now; asking also keeps the place in the queue */
	int64_t patience_ns; /* and how long to wait in all, before running without a turn */
};

/* May the container launch now? Asked before launches by all that hold memory beyond their guarantee. What changes in `line` is to be told to
 * the others. */
struct aq_turns_answer aq_turns_ask(struct aq_turns_line *line, const struct aq_turns_party *party, int64_t now_ns);

#endif
