/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/latch.h"

#include "cancel.h"

#define NAP_NS 20000 /* a holder that did not wait makes only a few queries to the driver */

__thread unsigned aq_latches_held;

void aq_latch_init(struct aq_latch *latch)
{
	pthread_mutex_init(&latch->queue, NULL);
	atomic_store(&latch->taken, false);
	latch->is_queued = false;
}

bool aq_latch_enter_at_once(struct aq_latch *latch)
{
	if (atomic_exchange_explicit(&latch->taken, true, memory_order_acquire)) /* pairs with the release in aq_latch_leave */
		return false;
	aq_latches_held++;
	return true;
}

void aq_latch_enter(struct aq_latch *latch)
{
	pthread_mutex_lock(&latch->queue);
	while (!aq_latch_enter_at_once(latch))
		aq_sleep(NAP_NS);
	latch->is_queued = true;
}

void aq_latch_leave(struct aq_latch *latch)
{
	bool is_queued = latch->is_queued;

	latch->is_queued = false;
	aq_latches_held--;
	atomic_store_explicit(&latch->taken, false, memory_order_release);
	if (is_queued)
		pthread_mutex_unlock(&latch->queue);
}

void aq_latches_forget(void)
{
	aq_latches_held = 0;
}
