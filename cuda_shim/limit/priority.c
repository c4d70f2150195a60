#include "limit/priority.h"

/* How far ahead of now the line says the device is wanted; negative = it was. Nonsense counts as long ago. */
static int64_t wanted_for(const struct aq_priority_line *line, int64_t now_ns)
{
	int64_t until = atomic_load_explicit(&line->wanted_until_ns, memory_order_relaxed);
	int64_t ahead = (int64_t)((uint64_t)until - (uint64_t)now_ns);

	return until <= 0 || ahead > AQ_PRIORITY_HORIZON_NS ? -AQ_PRIORITY_HORIZON_NS : ahead;
}

void aq_priority_want(struct aq_priority_line *line, int64_t now_ns, int64_t cost_ns)
{
	int64_t ahead = wanted_for(line, now_ns);
	int64_t wanted = (ahead > 0 ? ahead : 0) + cost_ns;

	if (wanted > AQ_PRIORITY_HORIZON_NS)
		wanted = AQ_PRIORITY_HORIZON_NS;
	/* Several containers may write at once: one cost is lost then, and the line lingers anyway. */
	atomic_store_explicit(&line->wanted_until_ns, now_ns + wanted, memory_order_relaxed);
}

uint32_t aq_priority_percent(const struct aq_priority_line *line, int64_t now_ns, uint32_t percent)
{
	if (wanted_for(line, now_ns) < -AQ_PRIORITY_LINGER_NS)
		return percent;
	return percent && percent < AQ_PRIORITY_TRICKLE_PERCENT ? percent : AQ_PRIORITY_TRICKLE_PERCENT;
}
