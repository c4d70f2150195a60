/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/life_cycle.h"

/* The linker defines both for the section AQ_PARTS. */
extern __attribute__((visibility("hidden"))) const struct aq_part __start_aq_parts[], __stop_aq_parts[];

#define PASS_ON(event, ...)                                                                                           \
	do {                                                                                                          \
		for (const struct aq_part *part = __start_aq_parts; part < __stop_aq_parts; part++)                   \
			if (part->event)                                                                              \
				part->event(__VA_ARGS__);                                                             \
	} while (0)

void aq_parts_open(struct aq_container *container)
{
	PASS_ON(open, container);
}

void aq_parts_context_begun(int device)
{
	PASS_ON(context_begun, device);
}

void aq_parts_context_ending(const struct aq_ending *ending)
{
	PASS_ON(context_ending, ending);
}

void aq_parts_context_ended(const struct aq_ending *ending, bool has_ended)
{
	PASS_ON(context_ended, ending, has_ended);
}

void aq_parts_context_gone(int device, uint64_t owner)
{
	PASS_ON(context_gone, device, owner);
}

void aq_parts_reclaim(int device)
{
	PASS_ON(reclaim, device);
}

void aq_parts_forget(void)
{
	PASS_ON(forget);
}
