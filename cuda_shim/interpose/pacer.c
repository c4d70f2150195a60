/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/pacer.h"

#include <time.h>

#include "cancel.h"

struct aq_pacer aq_pacers[AQ_MAX_DEVICES];

void aq_pacers_open(const struct aq_region *region)
{
	for (uint32_t i = 0; i < AQ_MAX_DEVICES; i++) {
		aq_pacers[i].bucket = &aq_region_line(region, i)->compute;
		aq_pacers[i].settlement = &aq_region_line(region, i)->settlement;
		aq_pacers[i].mine = aq_region_mine(region, i);
	}
}

void aq_pacers_forget(void)
{
	for (uint32_t i = 0; i < AQ_MAX_DEVICES; i++) {
		aq_pacers[i].bucket = NULL;
		aq_pacers[i].settlement = NULL;
		aq_pacers[i].mine = NULL;
		aq_in_flight_forget(&aq_pacers[i].flight);
		atomic_store(&aq_pacers[i].unmeasured, 0);
		atomic_store(&aq_pacers[i].runs, false);
		atomic_store(&aq_pacers[i].is_held_up, false);
		atomic_store(&aq_pacers[i].marked_ns, 0);
	}
}

int64_t aq_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

void aq_nap(int64_t wanted_ns)
{
	aq_sleep(wanted_ns < AQ_NAP_LEAST_NS ? AQ_NAP_LEAST_NS : wanted_ns > AQ_NAP_MOST_NS ? AQ_NAP_MOST_NS : wanted_ns);
}
