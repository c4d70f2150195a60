/* SPDX-License-Identifier: Apache-2.0 */
/* Launches that are timed with the driver's events: what they took is learned and settled (limit/settle.h), and their end shows how much is
 * still in flight.
 *
 * All launches that are not known are timed, and some of the others. The events are queried, made and destroyed under a latch, and not
 * touched while a call may end their context. */
#ifndef AQ_INTERPOSE_SAMPLE_H
#define AQ_INTERPOSE_SAMPLE_H

#include "interpose/latch.h"
#include "interpose/life_cycle.h"
#include "interpose/pacer.h"
#include "interpose/work.h"
#include "limit/cost.h"

/* What one launch pays. */
struct aq_launch_price {
	enum aq_price kind;
	int64_t ns;
};

struct aq_sample;

/* A launch inside a latch is not timed: if it begins there, it ends there. */
static inline bool aq_sample_is_wanted(int device, struct aq_cost_entry *cost, enum aq_price price)
{
	const struct aq_pacer *pacer = &aq_pacers[device];

	if (aq_latch_is_inside())
		return false;
	bool wanted = cost && aq_cost_wants_sample(cost);
	return wanted || price != AQ_PRICE_KNOWN ||
	       atomic_load_explicit(&pacer->flight.submitted_ns, memory_order_relaxed) -
			       atomic_load_explicit(&pacer->marked_ns, memory_order_relaxed) >=
		       atomic_load_explicit(&pacer->mark_every_ns, memory_order_relaxed);
}

/* Around the driver's launch. NULL = it cannot be timed. */
struct aq_sample *aq_sample_begin(int device, const struct aq_work *work, struct aq_cost_entry *cost, const struct aq_launch_price *price);
void aq_sample_end(int device, struct aq_sample *sample, const struct aq_work *work, CUresult launched);

/* Learn from what has finished, and settle it. Not from inside a latch. */
void aq_samples_look(int device);
/* On all devices: where the program may be about to end, or to rest. */
void aq_samples_look_all(void);
/* Is a timed launch in flight? */
bool aq_samples_pending(int device);

/* Around a call that may end a context: its events are not touched meanwhile, and if it ended they have ended too. */
void aq_samples_context_ending(const struct aq_ending *ending);
void aq_samples_context_ended(const struct aq_ending *ending, bool has_ended);
/* In a forked child. */
void aq_samples_forget(void);

#endif
