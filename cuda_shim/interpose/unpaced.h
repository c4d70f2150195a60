/* SPDX-License-Identifier: Apache-2.0 */
/* Launches that pass freely, at the price of one comparison and one decrement.
 *
 * While the watched word has the value seen, no limit restricts compute, and the launches of a thread pass: a number of them at a time,
 * counted together afterwards. gate.S does the same in assembly. */
#ifndef AQ_INTERPOSE_UNPACED_H
#define AQ_INTERPOSE_UNPACED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

extern const _Atomic uint64_t *_Atomic aq_unpaced_watched;
extern _Atomic uint64_t aq_unpaced_seen;
/* How many launches of this thread pass before the next one is counted, and how many there were when it came by. */
extern __thread int64_t aq_unpaced_left, aq_unpaced_given;

static inline bool aq_unpaced(void)
{
	const _Atomic uint64_t *watched = atomic_load_explicit(&aq_unpaced_watched, memory_order_relaxed);

	return __builtin_expect(atomic_load_explicit(watched, memory_order_relaxed) ==
					atomic_load_explicit(&aq_unpaced_seen, memory_order_relaxed),
				1) &&
	       __builtin_expect(--aq_unpaced_left >= 0, 1);
}

/* Has the thread launches that passed and are not counted? */
static inline bool aq_unpaced_has_passed(void)
{
	return aq_unpaced_left != aq_unpaced_given;
}

/* How many; the thread gets its number of free launches again. */
int64_t aq_unpaced_take(void);

/* From now on the word decides, and nothing passes before aq_unpaced_while. */
void aq_unpaced_watch(const _Atomic uint64_t *word);
/* Launches pass while the word has this value; or not at all. */
void aq_unpaced_while(uint64_t value);
void aq_unpaced_never(void);
/* Every launch passes, and this thread's are not counted. */
void aq_unpaced_always(void);

/* In a forked child. */
void aq_unpaced_forget(void);

#endif
