/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/wait.h"

#include "interpose/pacer.h"
#include "interpose/sample.h"

void aq_wait_begin(struct aq_wait *wait, int64_t now_ns)
{
	if (wait->since_ns)
		return;
	wait->since_ns = now_ns;
	atomic_fetch_add_explicit(&aq_pacers[wait->device].mine->waiting, 1, memory_order_relaxed);
}

void aq_wait_end(const struct aq_wait *wait)
{
	if (!wait->since_ns)
		return;
	atomic_fetch_sub_explicit(&aq_pacers[wait->device].mine->waiting, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&aq_pacers[wait->device].mine->throttled_ns, (uint64_t)(aq_now_ns() - wait->since_ns),
				  memory_order_relaxed);
}

/* No other thread may launch meanwhile, so this looks at the limits itself. */
void aq_wait_while_paused(struct aq_wait *wait)
{
	while (aq_is_paused(wait->device)) {
		aq_wait_begin(wait, aq_now_ns());
		aq_samples_look(wait->device);
		aq_nap(AQ_NAP_MOST_NS);
		aq_ceilings_look();
	}
}

void aq_sit_out_pause(int device)
{
	struct aq_wait wait = { device, 0 };

	aq_wait_while_paused(&wait);
	aq_wait_end(&wait);
}
