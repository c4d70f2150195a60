/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/unpaced.h"

#define FREE_LAUNCHES 1024 /* that a thread makes uncounted, unless it waits for the device before */
#define NEVER 1u           /* no page has this generation: it is odd and they start at 2 */

static const _Atomic uint64_t nothing_to_watch;
const _Atomic uint64_t *_Atomic aq_unpaced_watched = &nothing_to_watch;
_Atomic uint64_t aq_unpaced_seen = NEVER;

__thread int64_t aq_unpaced_left, aq_unpaced_given; /* 0 at the start: the first launch is counted at once */

int64_t aq_unpaced_take(void)
{
	int64_t passed = aq_unpaced_given - aq_unpaced_left;

	aq_unpaced_given = aq_unpaced_left = FREE_LAUNCHES;
	return passed;
}

void aq_unpaced_watch(const _Atomic uint64_t *word)
{
	atomic_store_explicit(&aq_unpaced_seen, NEVER, memory_order_relaxed);
	atomic_store_explicit(&aq_unpaced_watched, word, memory_order_release);
}

void aq_unpaced_while(uint64_t value)
{
	atomic_store_explicit(&aq_unpaced_seen, value, memory_order_relaxed);
}

void aq_unpaced_never(void)
{
	aq_unpaced_while(NEVER);
}

void aq_unpaced_always(void)
{
	atomic_store_explicit(&aq_unpaced_seen, 0, memory_order_relaxed);
	atomic_store_explicit(&aq_unpaced_watched, &nothing_to_watch, memory_order_relaxed);
	aq_unpaced_given = aq_unpaced_left = INT64_MAX; /* there is no counter to count in */
}

void aq_unpaced_forget(void)
{
	atomic_store(&aq_unpaced_seen, NEVER);
	atomic_store(&aq_unpaced_watched, &nothing_to_watch);
	aq_unpaced_given = aq_unpaced_left = 0;
}
