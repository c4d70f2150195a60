/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/ceiling.h"

#include "interpose/neighbours.h"
#include "interpose/unpaced.h"

struct aq_container *aq_limited;

uint32_t aq_ceiling_now(int device, int64_t now_ns)
{
	const struct aq_device_limit *limit = &aq_limited->limits.device[device];
	uint32_t percent = atomic_load_explicit(&limit->sm_percent, memory_order_relaxed);
	int32_t priority;
	uint32_t line = aq_ceiling_priority(limit, &priority);

	if (!line || priority >= 0)
		return percent;
	return aq_neighbours_percent(&aq_limited->node.priority, line, now_ns, aq_ceiling_is_one(percent) ? percent : 0);
}

bool aq_ceiling_is_trickle(int device, uint32_t percent)
{
	return percent != atomic_load_explicit(&aq_limited->limits.device[device].sm_percent, memory_order_relaxed);
}

bool aq_ceiling_is_low(int device)
{
	int32_t priority;

	return aq_ceiling_priority(&aq_limited->limits.device[device], &priority) && priority < 0;
}

bool aq_ceiling_restrains(int device)
{
	return aq_ceiling_is_one(atomic_load_explicit(&aq_limited->limits.device[device].sm_percent, memory_order_relaxed)) ||
	       aq_ceiling_is_low(device);
}

void aq_ceilings_read(void)
{
	struct aq_limits *limits = &aq_limited->limits;
	uint64_t generation = atomic_load_explicit(&limits->page->generation, memory_order_relaxed);
	bool paced = false;

	if (aq_limits_changed(limits))
		aq_limits_refresh(limits);
	for (uint32_t i = 0; i < atomic_load_explicit(&limits->device_count, memory_order_acquire); i++)
		paced |= aq_ceiling_paces(&limits->device[i]);
	/* A page that was being written meanwhile has another generation by now, and the next launch looks again. */
	if (paced)
		aq_unpaced_never();
	else
		aq_unpaced_while(generation);
}

void aq_ceilings_open(struct aq_container *container)
{
	aq_limited = container;
	aq_unpaced_watch(&container->limits.page->generation);
	aq_ceilings_read();
}

void aq_ceilings_forget(void)
{
	aq_unpaced_forget();
	aq_limited = NULL;
}
