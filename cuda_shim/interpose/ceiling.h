/* SPDX-License-Identifier: Apache-2.0 */
/* Which limits of the container restrict compute on a device, and which ceiling holds there now. */
#ifndef AQ_INTERPOSE_CEILING_H
#define AQ_INTERPOSE_CEILING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "region/container.h"

/* The container, since aq_ceilings_open; launches are paced by its limits, and pay from its region. */
extern struct aq_container *aq_limited;

static inline bool aq_ceiling_is_one(uint32_t percent)
{
	return percent > 0 && percent < 100;
}

/* The device's line of the priority page, if this container stands above or below others there; else 0. */
static inline uint32_t aq_ceiling_priority(const struct aq_device_limit *device, int32_t *priority)
{
	uint32_t line = atomic_load_explicit(&device->priority_line, memory_order_relaxed);

	*priority = atomic_load_explicit(&device->priority, memory_order_relaxed);
	bool takes_part = *priority < 0 || (*priority > 0 && aq_limited->node.priority.writable);
	return aq_limited->node.priority.magic && takes_part ? line : 0;
}

/* The device's line of the page of time slots, if this container may hold more than its guarantee; else 0. */
static inline uint32_t aq_ceiling_turns(const struct aq_device_limit *device)
{
	uint32_t line = atomic_load_explicit(&device->priority_line, memory_order_relaxed);

	return aq_limited->node.turns.writable && atomic_load_explicit(&device->burst_bytes, memory_order_relaxed) ? line : 0;
}

static inline bool aq_ceiling_paces(const struct aq_device_limit *device)
{
	int32_t priority;

	return aq_ceiling_is_one(atomic_load_explicit(&device->sm_percent, memory_order_relaxed)) ||
	       atomic_load_explicit(&device->pause, memory_order_relaxed) || aq_ceiling_priority(device, &priority) ||
	       aq_ceiling_turns(device);
}

/* The ceiling that holds now: the device's own, or less while a container of higher priority wants the device. */
uint32_t aq_ceiling_now(int device, int64_t now_ns);
/* Is that ceiling there for the sake of higher priority? Then what was saved up before is not for now. */
bool aq_ceiling_is_trickle(int device, uint32_t percent);
/* Is the container below others on the device? */
bool aq_ceiling_is_low(int device);
/* Do launches that are not known wait for each other? High priority waits for nothing, and neither does who has no ceiling. */
bool aq_ceiling_restrains(int device);

/* Read the limits as they are now. Launches pass freely when the limits do not restrict compute. */
void aq_ceilings_read(void);

static inline void aq_ceilings_look(void)
{
	if (__builtin_expect(aq_limits_changed(&aq_limited->limits), 0))
		aq_ceilings_read();
}

void aq_ceilings_open(struct aq_container *container);
/* In a forked child. */
void aq_ceilings_forget(void);

#endif
