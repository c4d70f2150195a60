/* SPDX-License-Identifier: Apache-2.0 */
/* This process on each device: what it shares with the container's other processes there, and what samples, waits and launches know of
 * each other. Each of those keeps the rest of its state to itself. */
#ifndef AQ_INTERPOSE_PACER_H
#define AQ_INTERPOSE_PACER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "limit/bucket.h"
#include "limit/in_flight.h"
#include "limit/settle.h"
#include "region/region.h"

struct aq_pacer {
	/* in the region */
	struct aq_bucket *bucket;
	struct aq_settlement *settlement;
	struct aq_slot_device *mine;

	struct aq_in_flight flight;
	_Atomic uint32_t unmeasured;   /* timed launches in flight that are not known */
	_Atomic bool runs;             /* one of the timed launches has begun to run */
	_Atomic bool is_metered;       /* launches pay under a ceiling */
	_Atomic bool is_held_up;       /* a wait for them was in vain: launches that are not known do not wait until one has finished */
	_Atomic int64_t marked_ns;     /* flight.submitted_ns at the last timed launch … */
	_Atomic int64_t mark_every_ns; /* … and how much later the next launch is timed, to see the work finish */
};

extern struct aq_pacer aq_pacers[AQ_MAX_DEVICES];

void aq_pacers_open(const struct aq_region *region);
/* In a forked child. */
void aq_pacers_forget(void);

/* CLOCK_MONOTONIC. */
int64_t aq_now_ns(void);
/* Sleep for so long, or for less: the caller looks again. */
void aq_nap(int64_t wanted_ns);

#define AQ_NAP_LEAST_NS 50000
#define AQ_NAP_MOST_NS 2000000

#endif
