/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that wants to launch and may not yet: the time it waits is the container's throttled time. */
#ifndef AQ_INTERPOSE_WAIT_H
#define AQ_INTERPOSE_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "interpose/ceiling.h"

/* From the first moment at which it may not. */
struct aq_wait {
	int device;
	int64_t since_ns; /* 0 = it did not have to wait yet */
};

void aq_wait_begin(struct aq_wait *wait, int64_t now_ns);
void aq_wait_end(const struct aq_wait *wait);

static inline bool aq_is_paused(int device)
{
	return atomic_load_explicit(&aq_limited->limits.device[device].pause, memory_order_relaxed);
}

/* Until the agent resumes the container. */
void aq_wait_while_paused(struct aq_wait *wait);
void aq_sit_out_pause(int device);

#endif
