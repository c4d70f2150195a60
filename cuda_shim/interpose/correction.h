/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver measured for the container, taken in from time to time (limit/control.h). */
#ifndef AQ_INTERPOSE_CORRECTION_H
#define AQ_INTERPOSE_CORRECTION_H

#include <stdbool.h>
#include <stdint.h>

#define AQ_CONCLUDE_NS 350000000ll

/* Settle the driver's new figure, if there is one and it is time: best while there is nothing to do but wait. `is_held`: a launch has to
 * wait meanwhile. True if the driver was queried. */
bool aq_correct(int device, int64_t now_ns, uint32_t percent, bool is_held);
/* A launch has to wait: give it a part of what was paid ahead, if the driver's last figure was of all processes. */
void aq_correction_give_back(int device);
/* The process is about to end, and has nothing in flight. The driver will report nothing of it then, so wait for the figure of its last
 * launches, at most AQ_CONCLUDE_NS: what a neighbour stretched is given back to the container. It waits only if the container's next launch
 * would have to wait longer. */
void aq_correction_conclude(int device);
/* When the driver last reported use by the container. */
int64_t aq_correction_used_at_ns(int device);

/* In a forked child. */
void aq_correction_forget(void);

#endif
