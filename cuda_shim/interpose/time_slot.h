/* SPDX-License-Identifier: Apache-2.0 */
/* Time slots of containers that hold memory beyond their guarantee (limit/turns.h): wait for the slot, and bring the memory back when it
 * begins. */
#ifndef AQ_INTERPOSE_TIME_SLOT_H
#define AQ_INTERPOSE_TIME_SLOT_H

#include <stdbool.h>

#include "interpose/context.h"
#include "interpose/wait.h"
#include "interpose/work.h"

/* Wait for the container's time slot; if it does not come, continue without one for a while. False = there was nothing to wait for. */
bool aq_time_slot_wait(struct aq_wait *wait);

/* In the first launch of a time slot: others had the device meanwhile, and the driver put their pages where this process's were. */
void aq_time_slot_prefetch(const struct aq_place *place, const struct aq_work *work);

/* Before both of these: how much memory the device has. */
void aq_time_slot_learn_capacity(const struct aq_place *place);

/* In a forked child. */
void aq_time_slots_forget(void);

#endif
