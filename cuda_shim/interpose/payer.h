/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that launch: the credit that each has drawn, and what its launches cost.
 *
 * A thread draws credit in pieces, and pays its launches from it. Costs are in one table for each device (limit/cost.h); a thread keeps the
 * last ones that it looked up. */
#ifndef AQ_INTERPOSE_PAYER_H
#define AQ_INTERPOSE_PAYER_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"
#include "interpose/work.h"
#include "limit/cost.h"
#include "region/layout.h"

#define AQ_PAYER_CACHE 64u /* power of two */

/* One thread, on all devices. */
struct aq_payer {
	_Atomic pid_t owner; /* 0 = free; an ended thread's place is taken over when all are taken */
	int64_t credit_ns[AQ_MAX_DEVICES];
	uint64_t launches[AQ_MAX_DEVICES];
	struct aq_cached_cost {
		const void *function;
		uint64_t blocks;
		uint32_t threads;
		uint32_t device;
		struct aq_cost_entry *cost;
	} cache[AQ_PAYER_CACHE];
};

extern __thread struct aq_payer *aq_this_payer;

/* NULL when more threads launch than there are places: this one then pays each launch from the bucket. No hook on the end of a thread is
 * needed, nor the newer libc that has one. */
struct aq_payer *aq_payer_new(void);

static inline struct aq_payer *aq_payer_of_thread(void)
{
	return __builtin_expect(aq_this_payer != NULL, 1) ? aq_this_payer : aq_payer_new();
}

/* What such a launch costs; NULL where there is no memory for it. */
struct aq_cost_entry *aq_cost_of_work(int device, const struct aq_work *work);
struct aq_cost_entry *aq_payer_look_up(struct aq_cached_cost *cached, int device, const struct aq_work *work);

/* Where in its cache a thread looks. Handles are addresses; that two alternating launches share a place costs a look into the table each
 * time. */
static inline unsigned aq_payer_cache_index(const struct aq_work *work)
{
	uint64_t bits = (uint64_t)(uintptr_t)work->function >> 4 ^ work->blocks ^ (uint64_t)work->threads << 7;

	return (unsigned)(bits ^ bits >> 6 ^ bits >> 12) & (AQ_PAYER_CACHE - 1);
}

static inline struct aq_cost_entry *aq_payer_cost(struct aq_payer *payer, int device, const struct aq_work *work)
{
	struct aq_cached_cost *cached = &payer->cache[aq_payer_cache_index(work)];

	if (__builtin_expect(cached->function == work->function && cached->blocks == work->blocks && cached->threads == work->threads &&
				     cached->device == (uint32_t)device && cached->cost,
			     1))
		return cached->cost;
	return aq_payer_look_up(cached, device, work);
}

/* Wait for credit and draw it. Without a context the debt stays until a launch that the driver accepts. */
void aq_payer_refill(struct aq_payer *payer, int device, const struct aq_work *work, int64_t cost_ns);
/* By a thread without a place among the payers. */
void aq_pay_at_once(int device, const struct aq_work *work, int64_t cost_ns);

static inline void aq_pay(struct aq_payer *payer, int device, const struct aq_work *work, int64_t cost_ns)
{
	payer->launches[device]++;
	payer->credit_ns[device] -= cost_ns;
	if (__builtin_expect(payer->credit_ns[device] < 0, 0))
		aq_payer_refill(payer, device, work, cost_ns);
}

/* Nothing is known of what this function, or graph, costs. */
void aq_costs_forget(const void *function);

/* In a forked child. */
void aq_payers_forget(void);

#endif
