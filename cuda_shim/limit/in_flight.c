/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/in_flight.h"

/* what was longer ago counts little; some rounds of the slices in which GPUs give processes their time fit in */
#define MEMORY_NS 40000000ll
#define PAUSE_NS 10000000ll        /* a process that did not look for this long did not launch: that is no measurement of the device */
#define PATIENCE_NS 20000000ll
#define PATIENCE_MAX_NS 1000000000ll

static int64_t unfinished(const struct aq_in_flight *flight)
{
	return atomic_load_explicit(&flight->submitted_ns, memory_order_relaxed) -
	       atomic_load_explicit(&flight->finished_ns, memory_order_relaxed);
}

uint32_t aq_in_flight_part(const struct aq_in_flight *flight)
{
	uint32_t part = atomic_load_explicit(&flight->part_q16, memory_order_relaxed);

	return part ? part : AQ_PART_ONE;
}

void aq_in_flight_look(struct aq_in_flight *flight, int64_t now_ns)
{
	int64_t finished = atomic_load_explicit(&flight->finished_ns, memory_order_relaxed);
	int64_t before = atomic_load_explicit(&flight->looked_ns, memory_order_relaxed);
	int64_t elapsed = now_ns - atomic_load_explicit(&flight->looked_at_ns, memory_order_relaxed);
	bool at_work = before < atomic_load_explicit(&flight->submitted_ns, memory_order_relaxed);

	atomic_store_explicit(&flight->looked_at_ns, now_ns, memory_order_relaxed);
	atomic_store_explicit(&flight->looked_ns, finished, memory_order_relaxed);
	if (!at_work || elapsed <= 0 || elapsed > PAUSE_NS)
		return;
	int64_t old = aq_in_flight_part(flight), part = (old * MEMORY_NS + (finished - before) * AQ_PART_ONE) / (MEMORY_NS + elapsed);

	part = part < AQ_PART_LEAST ? AQ_PART_LEAST : part > AQ_PART_ONE ? AQ_PART_ONE : part;
	if (part < old && unfinished(flight) < aq_in_flight_step_ns((uint32_t)old))
		return; /* perhaps all was finished long ago, and the device would have done more */
	atomic_store_explicit(&flight->part_q16, (uint32_t)part, memory_order_relaxed);
}

bool aq_in_flight_has_room(const struct aq_in_flight *flight, uint32_t part_q16, int64_t cost_ns)
{
	int64_t in_flight = unfinished(flight);
	int64_t most = (AQ_IN_FLIGHT_NS + cost_ns) * part_q16 / AQ_PART_ONE; /* over all parts: AQ_IN_FLIGHT_NS and one launch */

	return in_flight <= 0 || in_flight + cost_ns <= most;
}

int64_t aq_in_flight_patience_ns(const struct aq_in_flight *flight, uint32_t part_q16)
{
	int64_t patience = PATIENCE_NS + 2 * aq_in_flight_stretch(unfinished(flight), part_q16);

	return patience < PATIENCE_MAX_NS ? patience : PATIENCE_MAX_NS;
}

void aq_in_flight_give_up(struct aq_in_flight *flight)
{
	atomic_store_explicit(&flight->finished_ns, atomic_load_explicit(&flight->submitted_ns, memory_order_relaxed),
			      memory_order_relaxed);
}

void aq_in_flight_forget(struct aq_in_flight *flight)
{
	atomic_store(&flight->submitted_ns, 0);
	atomic_store(&flight->finished_ns, 0);
	atomic_store(&flight->looked_at_ns, 0);
	atomic_store(&flight->looked_ns, 0);
	atomic_store(&flight->part_q16, 0);
}
