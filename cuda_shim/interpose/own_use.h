/* SPDX-License-Identifier: Apache-2.0 */
/* How much of a device the container's processes really use, as the driver measures it. */
#ifndef AQ_INTERPOSE_OWN_USE_H
#define AQ_INTERPOSE_OWN_USE_H

#include <stdbool.h>
#include <stdint.h>

#include "limit/control.h"
#include "region/region.h"

/* What the driver measured since `*since_us` of its clock, the newest figure that any process of the container has taken in; 0 = since it
 * began. False when the driver has no new figure, or does not report the owner of the work: when it names an MPS server instead of its
 * clients, on MIG instances, or where neither the agent nor the pid namespace names our processes (interpose/naming.h). No new figure is
 * one too: nothing was used until shortly before `now_ns` (CLOCK_MONOTONIC), so `*since_us` moves on. `measured` is valid until the next
 * call. One thread at a time. */
bool aq_own_use(struct aq_region *region, const char *uuid, int device, int64_t now_ns, uint64_t *since_us, struct aq_measured *measured);

/* After that, and after `measured` was settled: give back what processes that ended had paid ahead. */
void aq_own_use_conclude(struct aq_settlement *settlement, int64_t now_ns);

/* In a forked child. */
void aq_own_use_forget(void);

#endif
