/* SPDX-License-Identifier: Apache-2.0 */
/* Managed memory that may lie on other devices than the one that was charged when it was made.
 *
 * Pages move when the program prefetches them or advises the driver where to keep them. The device they go to is charged before the call,
 * by pages; the devices they leave are uncharged when the stream has passed. So a page is charged on every device where it may lie. Pages
 * that a kernel's faults move have no call that could be charged: the agent's audit finds them. */
#ifndef AQ_INTERPOSE_SPREAD_H
#define AQ_INTERPOSE_SPREAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "account/map.h"
#include "cuda_abi.h"

/* The block that a range lies in. The charge of its entry in the map of allocations is taken over. Without such an entry the memory is a
 * pool's or a module's, and its charge stays what it is. */
struct aq_spread_block {
	uint64_t base, bytes;
	struct aq_map *allocations;
};

struct aq_spread_move {
	struct aq_spread *spread;
	uint64_t first, last;       /* pages … */
	uint64_t whole_first, whole_last; /* … and those of them that move as a whole */
	int device;
	uint64_t *added;            /* those that were not there before */
	uint64_t added_bytes;
	uint64_t change;            /* number of the spread's last change */
};

extern _Atomic unsigned aq_spread_count;

/* Charge `device` for the pages of a range that are not charged there yet. False when they do not fit: nothing is charged. */
bool aq_spread_begin(struct aq_spread_move *move, const struct aq_spread_block *block, uint64_t address, uint64_t bytes, int device);
/* After the call. If it `leaves` the other devices, they are uncharged when the stream has passed. */
void aq_spread_end(struct aq_spread_move *move, bool made, bool leaves, CUstream stream, bool per_thread);
/* Does the address lie in a block that is known here? Walks all of them. */
bool aq_spread_contains(uint64_t address);
/* From now on, pages may return to where they were without a call: no device is uncharged before the end. False without memory. */
bool aq_spread_keep(const struct aq_spread_block *block);

/* Around a call that frees the block: take its record, then uncharge it, at once or when the stream has passed; or put it back. */
struct aq_spread *aq_spread_ending(uint64_t base);
void aq_spread_ended(struct aq_spread *spread, bool freed);
void aq_spread_ended_in_stream(struct aq_spread *spread, bool freed, CUstream stream, bool per_thread);
static inline struct aq_spread *aq_spread_of(uint64_t base)
{
	return __builtin_expect(atomic_load_explicit(&aq_spread_count, memory_order_relaxed) != 0, 0) ? aq_spread_ending(base) : NULL;
}

/* A context has ended, with the managed memory that was made in it. */
void aq_spread_context_gone(int device, uint64_t owner);
/* In a forked child. */
void aq_spread_forget(void);

#endif
