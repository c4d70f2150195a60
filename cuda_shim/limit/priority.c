/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/priority.h"

/* How far ahead of now the device is wanted by that word; negative = it was. Nonsense counts as long ago. */
static int64_t wanted_for(int64_t until_ns, int64_t now_ns)
{
	int64_t ahead = (int64_t)((uint64_t)until_ns - (uint64_t)now_ns);

	return until_ns <= 0 || ahead > AQ_PRIORITY_HORIZON_NS ? -AQ_PRIORITY_HORIZON_NS : ahead;
}

static int64_t at_most(int64_t ahead_ns)
{
	return ahead_ns < AQ_PRIORITY_HORIZON_NS ? ahead_ns : AQ_PRIORITY_HORIZON_NS;
}

bool aq_priority_want(struct aq_priority_own *own, int64_t now_ns, int64_t cost_ns)
{
	int64_t ahead = wanted_for(atomic_load_explicit(&own->until_ns, memory_order_relaxed), now_ns);
	int64_t until = now_ns + at_most((ahead > 0 ? ahead : 0) + at_most(cost_ns));

	/* Several threads may launch at once: one cost is lost then, and the mark lingers anyway. */
	atomic_store_explicit(&own->until_ns, until, memory_order_relaxed);
	return until - atomic_load_explicit(&own->written_ns, memory_order_relaxed) > AQ_PRIORITY_LATE_NS;
}

int64_t aq_priority_update(struct aq_priority_own *own, int64_t line_ns, int64_t now_ns)
{
	int64_t until = atomic_load_explicit(&own->until_ns, memory_order_relaxed);
	int64_t written = atomic_load_explicit(&own->written_ns, memory_order_relaxed);
	int64_t more = until - (written > now_ns ? written : now_ns);
	int64_t ahead = wanted_for(line_ns, now_ns);
	int64_t wanted = (ahead > 0 ? ahead : 0) + (more > 0 ? more : 0);

	atomic_store_explicit(&own->written_ns, until, memory_order_relaxed);
	/* Never less than this process's own work: what another wrote over, or the agent took off a damaged page, is made good here. */
	return now_ns + at_most(wanted > until - now_ns ? wanted : until - now_ns);
}

uint32_t aq_priority_percent(int64_t line_ns, int64_t now_ns, uint32_t percent)
{
	if (wanted_for(line_ns, now_ns) < -AQ_PRIORITY_LINGER_NS)
		return percent;
	return percent && percent < AQ_PRIORITY_TRICKLE_PERCENT ? percent : AQ_PRIORITY_TRICKLE_PERCENT;
}
